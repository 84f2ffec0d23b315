"""Attention: close to a float64 reference, and the same bits however the rows come."""

from functools import cache

import numpy as np
import pytest

_core = pytest.importorskip("thinfer._core")

# heads, kv_heads, head_dim, window
SHAPES = [(9, 3, 64, None), (4, 4, 16, None), (6, 1, 128, None), (6, 2, 24, 70), (3, 1, 8, 5)]
TOKENS = 300  # five blocks, three segments


def make_qkv(shape, seed=0):
    heads, kv_heads, dim, _ = shape
    return np.random.default_rng(seed).standard_normal((TOKENS, (heads + 2 * kv_heads) * dim), np.float32)


def expected(qkv, shape):
    """Causal attention in float64, one sequence from position 0."""
    heads, kv_heads, dim, window = shape
    split = qkv.astype(np.float64).reshape(TOKENS, heads + 2 * kv_heads, dim)
    q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
    k, v = np.repeat(k, heads // kv_heads, axis=1), np.repeat(v, heads // kv_heads, axis=1)
    scores = np.einsum("thd,phd->htp", q, k) / np.sqrt(dim)
    t, p = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None]
    scores[:, (p > t) | (p <= t - (window or TOKENS))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("htp,phd->thd", weights, v).reshape(TOKENS, heads * dim)


class Attention:
    """One attention op over its own cache; `step` runs rows of several sequences."""

    def __init__(self, isa, shape, *, threads=1, kv_type="f32", sequences=1, max_rows=TOKENS, lists=None):
        heads, kv_heads, dim, window = shape
        self.per_sequence = -(-TOKENS // 64)
        self.cache = _core.KvCache(2, kv_heads, dim, kv_type)
        self.cache.ensure_blocks(sequences * self.per_sequence)
        blocks = np.random.default_rng(5).permutation(sequences * self.per_sequence)
        self.table = blocks.astype(np.int32).reshape(sequences, self.per_sequence)
        self.program = _core.Program(isa, _core.ThreadPool(threads), max_rows, self.cache)
        self.x = self.program.add_buffer((heads + 2 * kv_heads) * dim)
        self.out = self.program.add_buffer(heads * dim)
        self.program.op_attention(self.x, self.out, 1, heads, kv_heads, dim, dim**-0.5, window, lists=lists)

    def step(self, rows, positions, sequence=None):
        count = len(rows)
        self.program.buffer(self.x)[:count] = rows
        sequence = np.zeros(count, np.int32) if sequence is None else np.asarray(sequence, np.int32)
        none = np.zeros(0, np.int32)
        tokens, sparse = np.zeros(count, np.int32), np.zeros(count, np.uint8)
        self.program.run(0, 1, tokens, np.asarray(positions, np.int32), sequence, sparse, none, self.table)
        return self.program.buffer(self.out)[:count].copy()

    def chunks(self, qkv, sizes):
        """The whole sequence, cut into chunks of the given sizes over and over."""
        parts, first = [], 0
        while first < len(qkv):
            last = min(len(qkv), first + sizes[len(parts) % len(sizes)])
            parts.append(self.step(qkv[first:last], range(first, last)))
            first = last
        return np.concatenate(parts)


@cache
def whole(shape, kv_type):
    """What the portable build makes of the whole sequence in one step."""
    return Attention("scalar", shape, kv_type=kv_type).step(make_qkv(shape), range(TOKENS)).tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_float64(isa, shape):
    qkv = make_qkv(shape)
    actual = Attention(isa, shape).step(qkv, range(TOKENS))
    assert np.abs(actual - expected(qkv, shape)).max() < 3e-6
    half = Attention(isa, shape, kv_type="f16").step(qkv, range(TOKENS))
    assert np.abs(half - expected(qkv, shape)).max() < 3e-3


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_threads_and_instruction_sets_change_no_bit(isa, shape, kv_type):
    qkv = make_qkv(shape)
    for sizes, threads in (([1], 2), ([5], 3), ([64], 1), ([7, 1, 16, 33], 2), ([TOKENS], 3)):
        cut = Attention(isa, shape, kv_type=kv_type, threads=threads).chunks(qkv, sizes)
        assert cut.tobytes() == whole(shape, kv_type), (sizes, threads)


@pytest.mark.parametrize("shape", SHAPES)
def test_other_sequences_change_no_bit(isa, shape):
    first, second = make_qkv(shape), make_qkv(shape, seed=1)
    alone = [Attention(isa, shape).step(qkv, range(TOKENS)) for qkv in (first, second)]
    both = Attention(isa, shape, threads=2, sequences=2)
    # Prefill of one beside decode of the other, and rows of the two interleaved.
    both.step(second[:100], range(100), [1] * 100)
    both.step(first[:250], range(250))
    mixed = both.step(np.concatenate([second[100:101], first[250:260]]), [100, *range(250, 260)], [1] + [0] * 10)
    assert mixed[0].tobytes() == alone[1][100].tobytes()
    assert mixed[1:].tobytes() == alone[0][250:260].tobytes()
    rows = np.stack([first[260], second[101], first[261], second[102]])
    woven = both.step(rows, [260, 101, 261, 102], [0, 1, 0, 1])
    expected_rows = np.stack([alone[0][260], alone[1][101], alone[0][261], alone[1][102]])
    assert woven.tobytes() == expected_rows.tobytes()


def test_nan_of_a_later_row_reaches_no_earlier_one(isa):
    shape = SHAPES[0]
    clean = make_qkv(shape)
    spoiled = clean.copy()
    spoiled[200:] = np.nan
    before = Attention(isa, shape).step(clean, range(TOKENS))
    after = Attention(isa, shape).step(spoiled, range(TOKENS))
    assert after[:200].tobytes() == before[:200].tobytes()
    assert np.isnan(after[200:]).all()


def test_what_a_reused_block_held_does_not_matter(isa):
    shape = SHAPES[0]
    qkv = make_qkv(shape)
    attention = Attention(isa, shape)
    attention.step(np.full_like(qkv, np.nan), range(TOKENS))
    again = attention.chunks(qkv, [17])
    assert again.tobytes() == Attention(isa, shape).step(qkv, range(TOKENS)).tobytes()


def test_large_scores_do_not_overflow(isa):
    shape = (2, 1, 16, None)
    qkv = make_qkv(shape) * np.float32(60)
    actual = Attention(isa, shape).step(qkv, range(TOKENS))
    reference = expected(qkv, shape)
    assert np.isfinite(actual).all()
    assert np.abs(actual - reference).max() < 1e-3 * np.abs(reference).max()


def test_bytes_read_are_counted():
    shape = SHAPES[0]
    attention = Attention("scalar", shape, kv_type="f16")
    qkv = make_qkv(shape)
    attention.step(qkv[:200], range(200))
    attention.program.take_counters()
    attention.step(qkv[200:201], [200])
    [counters] = attention.program.take_counters()
    assert counters.name == "attention"
    assert counters.bytes_read == 4 * 64 * 3 * (64 + 64) * 2


@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.parametrize(("threads", "sizes"), [(1, (TOKENS,)), (2, (1, 40, 7))])
def test_heads_not_listed_are_zero_and_keep_their_keys(isa, shape, threads, sizes):
    heads, _, dim, _ = shape
    qkv = make_qkv(shape)
    wanted = np.random.default_rng(3).random((TOKENS, heads)) < 0.3
    lists = _core.NeuronLists()
    attention = Attention(isa, shape, threads=threads, lists=lists)
    parts, first = [], 0
    while first < TOKENS:
        last = min(TOKENS, first + sizes[len(parts) % len(sizes)])
        rows, ids = np.nonzero(wanted[first:last])
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=last - first))])
        lists.set(ids.astype(np.int32), offsets.astype(np.int32))
        parts.append(attention.step(qkv[first:last], range(first, last)))
        first = last
    everything = np.frombuffer(whole(shape, "f32"), np.float32).reshape(TOKENS, heads, dim)
    result = np.concatenate(parts).reshape(TOKENS, heads, dim)
    assert np.array_equal(result, np.where(wanted[:, :, None], everything, np.float32(0)))
    lists.clear()
    last_row = attention.step(qkv[-1:], [TOKENS - 1])
    assert np.array_equal(last_row.reshape(heads, dim), everything[-1])


def test_heads_of_no_key_are_not_read(isa):
    shape = SHAPES[1]
    lists = _core.NeuronLists()
    attention = Attention(isa, shape, lists=lists)
    attention.step(make_qkv(shape)[:200], range(200))
    read = []
    for heads in ([0, 1, 2, 3], [2]):
        attention.program.take_counters()
        lists.set(np.array(heads, np.int32), np.array([0, len(heads)], np.int32))
        attention.step(make_qkv(shape)[:1], [200])
        read.append(attention.program.take_counters()[0].bytes_read)
    assert read[0] == 4 * read[1] > 0


def test_lists_of_other_rows_and_heads_are_refused(isa):
    lists = _core.NeuronLists()
    attention = Attention(isa, SHAPES[1], lists=lists)
    lists.set(np.array([0], np.int32), np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match="listed for 1 rows, the batch has 2"):
        attention.step(make_qkv(SHAPES[1])[:2], range(2))
    lists.set(np.array([4], np.int32), np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match="head 4 of 4"):
        attention.step(make_qkv(SHAPES[1])[:1], range(1))
