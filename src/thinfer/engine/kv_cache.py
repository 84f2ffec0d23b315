"""The KV pool: which block of positions belongs to which sequence. The keys and values live in the executors."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from thinfer.engine.options import KvType
from thinfer.errors import ResourceError

BLOCK_SIZE = 64
BlockMode = Literal["dense", "sparse"]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of the keys and values an executor holds for each layer: [num_blocks, block_size, kv_heads, head_dim]."""

    num_blocks: int
    block_size: int = BLOCK_SIZE
    type: KvType = "f16"


@dataclass(slots=True)
class Sequence:
    """One sequence: its token ids so far and the blocks that hold their keys and values.

    Attributes:
        ids: token ids whose keys and values are in the cache, one a position.
        blocks: KV block ids in order of position.
    """

    ids: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of positions in the cache; the next token goes to this position."""
        return len(self.ids)


class KvPool:
    """Free list, reference counts and modes of the KV blocks.

    A block is "sparse" once any of its rows was written under thresholds; only then may it differ from what a dense
    run would have written. Counts allow several sequences to hold one block. Threads may reserve and release at once.

    Example:
        >>> pool = KvPool(KvLayout(num_blocks=2))
        >>> sequence = Sequence()
        >>> pool.reserve(sequence, 65)
        >>> sequence.blocks, pool.num_free
        ([0, 1], 0)
    """

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        # Reentrant: the collector may drop an abandoned stream, which releases, in the middle of a call.
        self._lock = threading.RLock()
        # Taken from the end: a block that was just freed is used again first, so untouched memory stays uncommitted.
        self._free = list(range(layout.num_blocks - 1, -1, -1))
        self._holders = [0] * layout.num_blocks
        self._modes: list[BlockMode] = ["dense"] * layout.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, length: int) -> int:
        """Blocks that ``length`` positions take."""
        return -(-length // self.layout.block_size)

    def reserve(self, sequence: Sequence, length: int) -> None:
        """Give the sequence blocks for ``length`` positions; too few free blocks raise ResourceError, none is taken."""
        with self._lock:
            missing = self.blocks_for(length) - len(sequence.blocks)
            if missing > len(self._free):
                size = self.layout.block_size
                short = (missing - len(self._free)) * size
                raise ResourceError(
                    f"the KV cache needs {missing} more blocks of {size} tokens and has {len(self._free)} free of "
                    f"{self.layout.num_blocks}; raise kv_tokens to at least {self.layout.num_blocks * size + short} "
                    f"or run fewer sequences together"
                )
            for _ in range(missing):
                block = self._free.pop()
                self._holders[block] = 1
                self._modes[block] = "dense"
                sequence.blocks.append(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each block."""
        with self._lock:
            for block in blocks:
                self._holders[block] += 1

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's blocks back; those that others hold stay theirs."""
        with self._lock:
            for block in reversed(sequence.blocks):
                self._holders[block] -= 1
                if self._holders[block] == 0:
                    self._free.append(block)
            sequence.blocks.clear()
            sequence.ids.clear()

    def mark_sparse(self, sequence: Sequence, first: int, last: int) -> None:
        """Remember that positions ``first`` to ``last - 1`` (if any) were written under thresholds."""
        if first >= last:
            return
        size = self.layout.block_size
        for index in range(first // size, self.blocks_for(last)):
            self._modes[sequence.blocks[index]] = "sparse"

    def mode(self, block: int) -> BlockMode:
        """What wrote the block: "dense", or "sparse" if thresholds applied to any of its rows."""
        return self._modes[block]
