"""The KV pool: which block of positions belongs to which sequence. The keys and values live in the executors."""

import threading
from dataclasses import dataclass, field

from thinfer.engine.options import KvType
from thinfer.engine.prefix_cache import Prefix, PrefixCache, extend_keys
from thinfer.errors import ResourceError, UsageError

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of the keys and values an executor holds for each layer: [num_blocks, block_size, kv_heads, head_dim]."""

    num_blocks: int
    block_size: int = BLOCK_SIZE
    type: KvType = "f16"


@dataclass(slots=True)
class Sequence:
    """One sequence: what its keys and values in the cache were made from, and the blocks that hold them.

    Attributes:
        ids: token ids whose keys and values are in the cache, one a position.
        sparse: how each position was written: 1 under thresholds, 0 dense.
        blocks: KV block ids in order of position.
        keys: the pool's root when the first block came, then the keys of the full blocks that were remembered.
    """

    ids: list[int] = field(default_factory=list)
    sparse: bytearray = field(default_factory=bytearray)
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of positions in the cache; the next token goes to this position."""
        return len(self.ids)


class KvPool:
    """Free list and reference counts of the KV blocks, and the prefix cache over the full ones.

    Several sequences may hold one full block, which nobody writes any more. What was remembered stays findable after
    its last holder left, until blocks are needed: the least recently used go first. A block is found only for the
    same tokens written in the same modes (row by row dense or under thresholds) under the same root. Threads may
    reserve and release at once.

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
        self._cache = PrefixCache()
        self._roots = 0

    @property
    def num_free(self) -> int:
        """Blocks nobody holds; those that the prefix cache remembers among them."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds that the prefix cache remembers."""
        return self._cache.num_idle

    @property
    def root(self) -> bytes:
        """The start of all key chains; other thresholds have another one."""
        return self._roots.to_bytes(8, "little")

    def change_root(self) -> None:
        """Find nothing that was written up to now, because what follows is written under other thresholds."""
        with self._lock:
            self._roots += 1

    def blocks_for(self, length: int) -> int:
        """Blocks that ``length`` positions take."""
        return -(-length // self.layout.block_size)

    def reserve(self, sequence: Sequence, length: int) -> None:
        """Give the sequence blocks for ``length`` positions; too few free blocks raise ResourceError, none is taken."""
        missing = self.blocks_for(length) - len(sequence.blocks)
        if missing <= 0 and sequence.keys:
            return
        with self._lock:
            if missing > self.num_free:
                size = self.layout.block_size
                short = (missing - self.num_free) * size
                raise ResourceError(
                    f"the KV cache needs {missing} more blocks of {size} tokens and has {self.num_free} free of "
                    f"{self.layout.num_blocks}; raise kv_tokens to at least {self.layout.num_blocks * size + short} "
                    f"or run fewer sequences together"
                )
            self._take_root(sequence)
            for _ in range(missing):
                block = self._free.pop() if self._free else self._cache.evict()
                self._holders[block] = 1
                sequence.blocks.append(block)

    def adopt(self, sequence: Sequence, prefix: Prefix) -> int:
        """Continue a sequence with the remembered blocks of a text it is the beginning of.

        Args:
            sequence: one without reserved blocks beyond its length, which is a whole number of blocks.
            prefix: the text, with keys from this pool's root.

        Returns:
            Number of positions that the sequence has more than before.
        """
        size = self.layout.block_size
        with self._lock:
            self._take_root(sequence)
            first = len(sequence.blocks)
            if sequence.keys != prefix.keys[: first + 1]:
                return 0
            for key in prefix.keys[first + 1 :]:
                block = self._cache.find(key)
                if block is None:
                    break
                self._cache.hold(block)
                self._holders[block] += 1
                sequence.blocks.append(block)
                sequence.keys.append(key)
            start, stop = first * size, len(sequence.blocks) * size
            sequence.ids.extend(prefix.ids[start:stop])
            sequence.sparse.extend(prefix.sparse[start:stop])
            return stop - start

    def remember(self, sequence: Sequence) -> None:
        """Make the sequence's full blocks findable; nothing writes them from now on."""
        size = self.layout.block_size
        known = len(sequence.keys) - 1
        if sequence.length // size <= known:
            return
        with self._lock:
            extend_keys(sequence.keys, sequence.ids, sequence.sparse, size)
            for key, block in zip(sequence.keys[known + 1 :], sequence.blocks[known:], strict=False):
                self._cache.add(key, block)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the positions from ``length`` on; what comes next is written over them, in the blocks it has.

        Raises:
            UsageError: some of them are in blocks that were remembered, which others may read.
        """
        kept = max(len(sequence.keys) - 1, 0) * self.layout.block_size
        if length < kept:
            raise UsageError(f"{kept} positions are remembered, so the sequence cannot be cut to {length}")
        del sequence.ids[length:], sequence.sparse[length:]

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's blocks back; those that others hold stay theirs."""
        with self._lock:
            # From the end: the beginning of a text serves more texts than its end, so it is evicted last.
            for block in reversed(sequence.blocks):
                self._holders[block] -= 1
                if self._holders[block] == 0 and not self._cache.let_go(block):
                    self._free.append(block)
            sequence.blocks.clear()
            sequence.ids.clear()
            sequence.sparse.clear()
            sequence.keys.clear()

    def _take_root(self, sequence: Sequence) -> None:
        if not sequence.keys:
            sequence.keys.append(self.root)
