"""What a stored tensor is: its name, shape, type and size, and how each type cuts a row into blocks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from thinfer.errors import UnsupportedError

# type -> (values in a block, bytes of a block)
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor.

    Attributes:
        name: The name in the file.
        shape: The extent of each axis in NumPy order, so ``(out, in)`` for a linear layer.
        type: The block type, a key of ``BLOCKS`` or the name of a type that cannot be decoded.
        nbytes: The stored size in bytes.

    Example:
        >>> TensorInfo("w", (2, 64), "Q8_0", 136).row_bytes
        68
    """

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int

    @property
    def rows(self) -> int:
        """The number of rows; a row is the last axis, and a tensor of one axis or none is one row."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """The bytes of one row."""
        return self.nbytes // self.rows if self.rows else 0


def require_supported(info: TensorInfo, where: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse a tensor whose type cannot be decoded.

    Args:
        info: The tensor that is wanted.
        where: The file, for the message.
        tensors: All tensors of the checkpoint, so that one message tells of all that would fail.

    Raises:
        UnsupportedError: Names the tensor, its type, and how many others have such types.
    """
    if info.type in BLOCKS:
        return
    others = sorted({t.type for t in tensors.values() if t.type not in BLOCKS})
    count = sum(t.type not in BLOCKS for t in tensors.values())
    raise UnsupportedError(
        f"{where}: tensor {info.name} has type {info.type}, which is not supported"
        f" ({count} of {len(tensors)} tensors have such types: {', '.join(others)}); supported are {', '.join(BLOCKS)};"
        " get the checkpoint in one of these types, for example Q4_K_M, Q8_0 or F16"
    )
