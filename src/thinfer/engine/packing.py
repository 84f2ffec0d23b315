"""Stored weights as the native packer takes them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from thinfer.models.loader import WeightSource


def stored_part(
    source: WeightSource, rows: Sequence[int] | None, columns: Sequence[int] | None
) -> tuple[NDArray[np.uint8], str, NDArray[np.int32] | None]:
    """Raw rows, type and row order of a weight; `rows` and `columns` (whole blocks) as a split keeps them."""
    raw, index = source.raw, source.row_index
    if rows is not None:
        kept = np.asarray(rows, np.int32)
        index = kept if index is None else np.ascontiguousarray(index[kept])
    if columns is not None:
        per_block = raw.shape[1] * _block_inputs(source.type) // source.shape[1]
        blocks = np.asarray(columns[:: _block_inputs(source.type)]) // _block_inputs(source.type)
        raw = np.ascontiguousarray(raw.reshape(raw.shape[0], -1, per_block)[:, blocks].reshape(raw.shape[0], -1))
    return raw, source.type, index


def _block_inputs(stored: str) -> int:
    """Inputs of one stored block of a type."""
    if stored in ("F32", "F16", "BF16"):
        return 1
    return 256 if stored.endswith("_K") else 32
