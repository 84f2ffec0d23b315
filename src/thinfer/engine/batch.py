"""Batch: the rows of one executor call, in the arrays that native code and the NumPy executor both read."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Batch:
    """M rows (tokens) of S sequences, run together in one call.

    Row m is token ``tokens[m]`` at position ``positions[m]`` of the sequence whose KV blocks are
    ``block_table[sequence[m]]``. Rows of one sequence come in ascending order of position, without gaps, so that
    attention may look at earlier rows of the same batch.

    Attributes:
        tokens: int32 [M], token ids.
        positions: int32 [M], positions in the sequence, from 0.
        sequence: int32 [M], index into ``block_table``.
        sparse: uint8 [M], 1 where the selector's thresholds apply to the row.
        out_rows: int32 [L], ascending rows whose logits are wanted.
        block_table: int32 [S, max_blocks], KV block ids by position // block_size; unused entries are -1.
    """

    tokens: Int32
    positions: Int32
    sequence: Int32
    sparse: UInt8
    out_rows: Int32
    block_table: Int32

    @property
    def rows(self) -> int:
        """M, the number of rows."""
        return len(self.tokens)

    def slots(self, block_size: int) -> Int32:
        """KV slot of every row, int32 [M]: block id times block size plus the place inside the block."""
        blocks = self.block_table[self.sequence, self.positions // block_size]
        return (blocks * block_size + self.positions % block_size).astype(np.int32)
