"""Blocks are given, counted and taken back."""

import pytest

from thinfer.engine.kv_cache import KvLayout, KvPool, Sequence
from thinfer.engine.prefix_cache import Prefix
from thinfer.errors import ResourceError, UsageError


def test_blocks_are_reserved_whole_and_used_again():
    pool = KvPool(KvLayout(num_blocks=3))
    sequence = Sequence()
    pool.reserve(sequence, 64)
    pool.reserve(sequence, 65)
    assert sequence.blocks == [0, 1]
    pool.release(sequence)
    assert pool.num_free == 3
    pool.reserve(sequence, 1)
    assert sequence.blocks == [0]


def test_too_few_blocks_take_none_and_name_the_remedy():
    pool = KvPool(KvLayout(num_blocks=2))
    first, second = Sequence(), Sequence()
    pool.reserve(first, 64)
    with pytest.raises(ResourceError, match=r"needs 3 more blocks.*kv_tokens to at least 256"):
        pool.reserve(second, 129)
    assert second.blocks == []
    assert pool.num_free == 1


def written(pool, ids, sparse=None):
    """A sequence whose keys and values are said to be written and remembered."""
    sequence = Sequence()
    pool.reserve(sequence, len(ids))
    sequence.ids.extend(ids)
    sequence.sparse.extend(bytes(len(ids)) if sparse is None else sparse)
    pool.remember(sequence)
    return sequence


def adopted(pool, ids, sparse=None):
    """A new sequence that begins with what the pool remembers of a text."""
    sequence = Sequence()
    modes = bytes(len(ids)) if sparse is None else bytes(sparse)
    got = pool.adopt(sequence, Prefix.of(pool.root, list(ids), modes, 64))
    assert got == sequence.length == len(sequence.sparse) == 64 * len(sequence.blocks)
    return sequence


IDS = list(range(200))


def test_a_shared_block_stays_until_its_last_holder_leaves():
    pool = KvPool(KvLayout(num_blocks=4))
    first = written(pool, IDS)
    second = adopted(pool, IDS)
    assert second.blocks == first.blocks[:3]
    assert second.ids == IDS[:192]
    pool.release(first)
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (4, 3)


def test_only_equal_beginnings_are_found():
    pool = KvPool(KvLayout(num_blocks=4))
    written(pool, IDS)
    assert adopted(pool, IDS[:127]).length == 64
    assert adopted(pool, IDS[:63]).length == 0
    assert adopted(pool, [*IDS[:64], 7, *IDS[65:]]).length == 64
    # The same block after another beginning is another block.
    assert adopted(pool, [7, *IDS[1:]]).length == 0


def test_only_equal_modes_are_found():
    pool = KvPool(KvLayout(num_blocks=9))
    decode = bytes(100) + b"\1" * 100
    written(pool, IDS, decode)
    assert adopted(pool, IDS, decode).length == 192
    assert adopted(pool, IDS).length == 64
    assert adopted(pool, IDS, bytes(99) + b"\1" * 101).length == 64
    assert adopted(pool, IDS, b"\1" * 200).length == 0


def test_another_root_finds_nothing_and_a_sequence_keeps_its_own():
    pool = KvPool(KvLayout(num_blocks=9))
    old = written(pool, IDS[:64])
    pool.change_root()
    assert adopted(pool, IDS).length == 0
    # What the old sequence goes on to write hangs on the old root.
    pool.reserve(old, 128)
    old.ids.extend(IDS[64:128])
    old.sparse.extend(bytes(64))
    pool.remember(old)
    assert adopted(pool, IDS).length == 0


def test_the_least_recently_used_block_goes_first_and_ends_before_beginnings():
    pool = KvPool(KvLayout(num_blocks=4))
    first, second = written(pool, IDS[:128]), written(pool, IDS[64:192])
    pool.release(first)
    pool.release(second)
    pool.release(adopted(pool, IDS[:128]))
    pool.reserve(Sequence(), 1)
    assert adopted(pool, IDS[64:192]).length == 64
    assert adopted(pool, IDS[:128]).length == 128
    assert pool.num_free == 0


def test_an_evicted_block_is_forgotten_and_a_held_one_is_never_evicted():
    pool = KvPool(KvLayout(num_blocks=2))
    first = written(pool, IDS[:128])
    with pytest.raises(ResourceError):
        pool.reserve(Sequence(), 1)
    pool.release(first)
    other = Sequence()
    pool.reserve(other, 128)
    assert adopted(pool, IDS[:128]).length == 0
    pool.release(other)
    assert (pool.num_free, pool.num_cached) == (2, 0)


def test_a_text_written_twice_is_remembered_once():
    pool = KvPool(KvLayout(num_blocks=2))
    first, second = written(pool, IDS[:64]), written(pool, IDS[:64])
    assert adopted(pool, IDS[:64]).blocks == first.blocks
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_a_running_sequence_takes_over_what_another_wrote_meanwhile():
    pool = KvPool(KvLayout(num_blocks=9))
    late = written(pool, IDS[:64])
    prefix = Prefix.of(pool.root, IDS, bytes(200), 64)
    assert pool.adopt(late, prefix) == 0
    early = written(pool, IDS)
    assert pool.adopt(late, prefix) == 128
    assert late.blocks[1:] == early.blocks[1:3]
    # Inside a block nothing can be taken over.
    inside = written(pool, IDS[:70])
    assert pool.adopt(inside, prefix) == 0


def test_a_sequence_is_cut_but_never_into_what_was_remembered():
    pool = KvPool(KvLayout(num_blocks=4))
    sequence = written(pool, range(100), bytes(90) + b"\1" * 10)
    pool.truncate(sequence, 70)
    assert (sequence.length, len(sequence.sparse), len(sequence.blocks)) == (70, 70, 2)
    pool.truncate(sequence, 64)
    with pytest.raises(UsageError, match="64 positions are remembered, so the sequence cannot be cut to 63"):
        pool.truncate(sequence, 63)
    pool.release(sequence)
    assert pool.num_free == 4
