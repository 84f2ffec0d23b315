"""Blocks are given, counted and taken back."""

import pytest

from thinfer.engine.kv_cache import KvLayout, KvPool, Sequence
from thinfer.errors import ResourceError


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


def test_a_shared_block_stays_until_its_last_holder_leaves():
    pool = KvPool(KvLayout(num_blocks=1))
    first, second = Sequence(), Sequence()
    pool.reserve(first, 10)
    second.blocks = list(first.blocks)
    pool.share(second.blocks)
    pool.release(first)
    assert pool.num_free == 0
    pool.release(second)
    assert pool.num_free == 1


def test_modes_start_dense_and_remember_sparse_rows():
    pool = KvPool(KvLayout(num_blocks=3))
    sequence = Sequence()
    pool.reserve(sequence, 192)
    pool.mark_sparse(sequence, 70, 71)
    pool.mark_sparse(sequence, 4, 4)
    assert [pool.mode(block) for block in sequence.blocks] == ["dense", "sparse", "dense"]
    pool.release(sequence)
    pool.reserve(sequence, 128)
    assert [pool.mode(block) for block in sequence.blocks] == ["dense", "dense"]
