"""Weights in the block types of GGUF, and what that does to zeros."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer.errors import UnsupportedError
from thinfer.formats.floats import FLOATS, widen
from thinfer.formats.tensor import BLOCKS

TYPES = ("f32", "f16", "q8_0", "q4_0")

# Rows of about this many values are decoded and encoded at a time.
_PIECE_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor in one block type.

    Attributes:
        data: uint8 [rows, row_bytes].
        zeros: Values that were zero before.
        zeros_lost: Those of them that the type turned into something else.
        zeros_new: Values that became zero.
    """

    data: NDArray[np.uint8]
    zeros: int
    zeros_lost: int
    zeros_new: int


def row_bytes(columns: int, kind: str) -> int:
    """Bytes of a row of values in a block type.

    Example:
        >>> row_bytes(64, "Q8_0")
        68
    """
    values, size = BLOCKS[kind]
    return columns // values * size


def encode_rows(
    rows: Callable[[int, int], NDArray[np.float32]], shape: tuple[int, int], kind: str, name: str
) -> Encoded:
    """Encode a matrix piece by piece.

    Args:
        rows: Gives rows ``first`` to ``last - 1`` as float32 [last - first, columns].
        shape: Rows and columns; the columns are a multiple of the type's block.
        kind: F32, F16, Q8_0 or Q4_0.
        name: The tensor, for messages.

    Raises:
        UnsupportedError: A value that the type cannot hold, such as one above 65504 in F16, or that is not finite.

    Example:
        >>> w = np.array([[0.0] * 31 + [1.0]], np.float32)
        >>> encode_rows(lambda a, b: w[a:b], (1, 32), "Q4_0", "w").zeros_lost
        0
    """
    count, columns = shape
    data = np.empty((count, row_bytes(columns, kind)), np.uint8)
    zeros = lost = new = 0
    step = max(1, _PIECE_VALUES // max(1, columns))
    for first in range(0, count, step):
        last = min(first + step, count)
        before = rows(first, last)
        # The package casts scales to half precision: what overflows there is found below.
        with np.errstate(all="ignore"):
            data[first:last] = _quantise(before, kind)
            after = _restore(data[first:last], kind)
        if not np.isfinite(after).all():
            worst = float(np.nan_to_num(np.abs(before), nan=np.inf).max())
            raise UnsupportedError(
                f"{name}: a weight of size {worst:g} does not fit type {kind.lower()};"
                + (" export as f32" if np.isfinite(worst) else " the model is broken: train or prune it again")
            )
        was, now = before == 0, after == 0
        zeros += int(was.sum())
        lost += int((was & ~now).sum())
        new += int((now & ~was).sum())
    return Encoded(data, zeros, lost, new)


def _quantise(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    if kind == "F32":
        return np.ascontiguousarray(values, "<f4").view(np.uint8)
    if kind == "F16":
        return values.astype("<f2").view(np.uint8)
    gguf = _package()
    quantised: NDArray[np.uint8] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return quantised


def _restore(data: NDArray[np.uint8], kind: str) -> NDArray[np.float32]:
    if kind in FLOATS:
        return widen(data, kind)
    gguf = _package()
    values: NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return values


def _package() -> Any:
    # Half a second of imports, needed for quantised types only.
    import gguf

    return gguf
