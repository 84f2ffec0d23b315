"""Plain float types widened to float32."""

import numpy as np
import numpy.typing as npt

FLOATS = ("F32", "F16", "BF16")


def widen(raw: npt.NDArray[np.uint8], type_name: str) -> npt.NDArray[np.float32]:
    """Return a float32 copy of contiguous little-endian F32, F16 or BF16 bytes, with the last axis now in values.

    Example:
        >>> widen(np.array([0x80, 0x3F], np.uint8), "BF16").tolist()
        [1.0]
    """
    if type_name == "F32":
        return raw.view("<f4").astype(np.float32)
    if type_name == "F16":
        return raw.view("<f2").astype(np.float32)
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
