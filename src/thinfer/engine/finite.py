"""Weights that can be re-quantised: finite, and inside the range of a float16 scale; activations that are numbers."""

import numpy as np
from numpy.typing import NDArray

from thinfer.errors import CheckFailed, CheckpointError
from thinfer.models.loader import WeightSource

_PIECE_BYTES = 4 << 20
# Unsigned type of the bits, a mask without the sign, the first magnitude that float16 rounds to infinity.
# Bits of positive floats sort as the floats do, and those of infinity and NaN come last.
_LIMITS = {
    "F32": (np.uint32, 0x7FFFFFFF, 0x477FF000),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x4780),
}


def require_finite(source: WeightSource, weights: str) -> None:
    """Check a float weight before it is re-quantised: one bad value would spoil its group of 32, silently.

    Args:
        source: a weight stored as F32, F16 or BF16; other types are not re-quantised and pass.
        weights: the precision asked for, for the message.

    Raises:
        CheckpointError: a value is NaN, infinite or 65520 or more in magnitude; the message names the tensor.

    Example:
        >>> require_finite(model.weights.source("lm_head.weight"), "q8")  # doctest: +SKIP
    """
    if source.type not in _LIMITS:
        return
    unsigned, magnitude, limit = _LIMITS[source.type]
    raw = source.raw
    rows = max(1, _PIECE_BYTES // raw.shape[1])
    for first in range(0, len(raw), rows):
        bits = raw[first : first + rows].view(unsigned) & unsigned(magnitude)
        if bits.max(initial=0) >= limit:
            row = first + int((bits >= limit).any(axis=1).argmax())
            raise CheckpointError(
                f"{source.checkpoint.path}: tensor {source.stored_name} has NaN, infinity or a value beyond float16 in "
                f"row {row}, which weights {weights} cannot hold; repair the checkpoint, or load it with weights stored"
            )


def require_numbers(x: NDArray[np.float32], what: str) -> None:
    """Check values of a model, any shape, from which figures are made: NaN would spoil all of them, silently.

    Args:
        x: the values.
        what: they are, for the message.

    Raises:
        CheckFailed: a value is NaN.

    Example:
        >>> require_numbers(np.ones(3, np.float32), "the input of layers.0.down")
    """
    # The smallest is NaN where any value is.
    if x.size and np.isnan(x.min()):
        raise CheckFailed(f"{what} is NaN: the model's weights are broken; fetch or make the model again")
