"""Prefix cache: full KV blocks, found again by what wrote them and everything that came before."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

_KEY_BYTES = 16


def extend_keys(keys: list[bytes], ids: Sequence[int], sparse: bytes | bytearray, block_size: int) -> None:
    """Append the keys of all full blocks that have none yet.

    A key is a cryptographic hash of the key before it, the block's token ids and one byte a row that says whether
    thresholds acted: equal keys mean equal keys and values, and no choice of prompts makes two texts collide.

    Args:
        keys: the root, which stands for the thresholds in use, then one key a block.
        ids: token ids by position.
        sparse: 1 at the positions where thresholds act, 0 elsewhere.
        block_size: positions in a block.

    Example:
        >>> keys = [b"root"]
        >>> extend_keys(keys, [5, 6, 7], bytes(3), 2)
        >>> len(keys)
        2
    """
    for block in range(len(keys) - 1, len(ids) // block_size):
        part = slice(block * block_size, (block + 1) * block_size)
        content = np.array(ids[part], np.int32).tobytes() + bytes(sparse[part])
        keys.append(blake2b(keys[-1] + content, digest_size=_KEY_BYTES).digest())


@dataclass(frozen=True, slots=True)
class Prefix:
    """A text as it is looked up.

    Attributes:
        ids: token ids by position.
        sparse: 1 at the positions where thresholds act, 0 elsewhere.
        keys: the root and the keys of its full blocks.
    """

    ids: list[int]
    sparse: bytes
    keys: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, root: bytes, ids: list[int], sparse: bytes, block_size: int) -> "Prefix":
        """The text with the keys of its full blocks."""
        keys = [root]
        extend_keys(keys, ids, sparse, block_size)
        return cls(ids, sparse, keys)


class PrefixCache:
    """Which block holds which key, and which of these blocks nobody holds, least recently used first.

    Example:
        >>> cache = PrefixCache()
        >>> cache.add(b"key", 3)
        >>> cache.find(b"key"), cache.let_go(3), cache.evict(), cache.find(b"key")
        (3, True, 3, None)
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Known blocks that nobody holds."""
        return len(self._idle)

    def add(self, key: bytes, block: int) -> None:
        """Remember what a held block holds; the first block of a key stays the one that is found."""
        if key not in self._blocks:
            self._blocks[key] = block
            self._keys[block] = key

    def find(self, key: bytes) -> int | None:
        """The block with this key."""
        return self._blocks.get(key)

    def hold(self, block: int) -> None:
        """Somebody holds the block: it is not idle."""
        self._idle.pop(block, None)

    def let_go(self, block: int) -> bool:
        """Nobody holds the block any more; whether it is kept, because it is known."""
        if block not in self._keys:
            return False
        self._idle[block] = None
        return True

    def evict(self) -> int:
        """Forget the idle block that was used longest ago, and return it."""
        block, _ = self._idle.popitem(last=False)
        del self._blocks[self._keys.pop(block)]
        return block
