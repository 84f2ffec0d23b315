"""The engine: chunking, batching and limits change nothing but what they should."""

import threading
from importlib.util import find_spec

import numpy as np
import pytest

from thinfer.core.selector import ThresholdSelector
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import CancelledError, Engine, Work
from thinfer.errors import ResourceError, UsageError

IDS = np.random.default_rng(1).integers(0, 256, 150).tolist()


EXECUTORS = {
    "reference": {"executor": "reference"},
    "cpu": {"executor": "cpu", "threads": 2},
    "cpu-f32": {"executor": "cpu", "activations": "f32", "kv_type": "f32", "threads": 2},
}


@pytest.fixture(scope="module", params=EXECUTORS)
def make_engine(request):
    """Builds engines on one executor; every test here holds for all of them."""
    given = EXECUTORS[request.param]
    if given["executor"] == "cpu" and find_spec("thinfer._core") is None:
        pytest.skip("the native part is not built")
    return lambda model, **options: Engine(model, EngineOptions(**(given | options)))


def all_logits(engine, ids, **work):
    sequence = engine.new_sequence()
    (logits,) = engine.step([Work(sequence, ids, "all", **work)])
    engine.free(sequence)
    return logits


@pytest.fixture(scope="module")
def expected(make_engine, tiny_model):
    with make_engine(tiny_model) as engine:
        return all_logits(engine, IDS)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_do_not_change_a_bit(make_engine, tiny_model, expected, chunk):
    with make_engine(tiny_model, chunk=chunk) as engine:
        assert np.array_equal(all_logits(engine, IDS), expected)


@pytest.mark.parametrize("count", [2, 7, 16])
def test_neighbours_do_not_change_a_bit(make_engine, tiny_model, expected, count):
    with make_engine(tiny_model, chunk=64) as engine:
        works = [Work(engine.new_sequence(), IDS[: 10 + 7 * i], "last") for i in range(count)]
        for work, logits in zip(works, engine.step(works), strict=True):
            assert np.array_equal(logits, expected[len(work.tokens) - 1 :][:1])
        # One more token each: decode rows of different lengths together.
        more = [Work(w.sequence, [IDS[w.sequence.length]]) for w in works]
        for work, logits in zip(more, engine.step(more), strict=True):
            assert np.array_equal(logits, expected[work.sequence.length - 1 :][:1])


def test_logits_can_be_streamed_and_left_out(make_engine, tiny_model, expected):
    with make_engine(tiny_model, chunk=32) as engine:
        seen = []
        first, second = engine.new_sequence(), engine.new_sequence()
        result = engine.step(
            [Work(first, IDS, "all"), Work(second, IDS[:9], "none")],
            on_logits=lambda sequence, start, rows: seen.append((sequence, start, rows.copy())),
        )
        assert [len(rows) for rows in result] == [0, 0]
        assert all(sequence is first for sequence, _, _ in seen)
        assert [start for _, start, _ in seen] == [0, 32, 64, 96, 128]
        assert np.array_equal(np.concatenate([rows for _, _, rows in seen]), expected)
        assert second.length == 9


def test_logit_rows_are_bounded(make_engine, tiny_model, expected, monkeypatch):
    monkeypatch.setattr("thinfer.engine.options._LOGITS_BYTES", 4 * 260 * 3)
    with make_engine(tiny_model) as engine:
        sizes = []
        engine.step(
            [Work(engine.new_sequence(), IDS[:10], "all")] + [Work(engine.new_sequence(), IDS[:4]) for _ in range(5)],
            on_logits=lambda sequence, start, rows: sizes.append(len(rows)),
        )
        assert max(sizes) == 3
        assert sum(sizes) == 15
        assert np.array_equal(all_logits(engine, IDS), expected)


def test_freed_blocks_serve_again(make_engine, tiny_model, expected):
    with make_engine(tiny_model, kv_tokens=192) as engine:
        for _ in range(3):
            assert np.array_equal(all_logits(engine, IDS), expected)
        assert engine.pool.num_free == 3


def test_limits_name_both_numbers_and_run_nothing(make_engine, tiny_model):
    with make_engine(tiny_model, max_model_len=100) as engine:
        sequence = engine.new_sequence()
        with pytest.raises(ResourceError, match="150 tokens do not fit the context of 100"):
            engine.step([Work(sequence, IDS)])
        assert sequence.length == 0
    with make_engine(tiny_model, kv_tokens=64) as engine, pytest.raises(ResourceError, match="kv_tokens"):
        engine.step([Work(engine.new_sequence(), IDS)])


def test_wrong_work_is_refused(make_engine, tiny_model):
    with make_engine(tiny_model) as engine:
        sequence = engine.new_sequence()
        with pytest.raises(UsageError, match="twice"):
            engine.step([Work(sequence, [1]), Work(sequence, [2])])
        with pytest.raises(UsageError, match="outside the vocabulary of 260"):
            engine.step([Work(sequence, [260])])
        with pytest.raises(UsageError, match="no tokens"):
            engine.step([Work(sequence, [])])


@pytest.mark.parametrize(
    "keywords", [{"chunk": 0}, {"threads": 1.5}, {"kv_type": "f8"}, {"bogus": 1}, {"executor": "gpu"}]
)
def test_wrong_options_name_themselves(keywords):
    with pytest.raises(UsageError, match=next(iter(keywords))):
        EngineOptions.from_keywords(keywords)


def test_context_beyond_the_model_is_refused(make_engine, tiny_model):
    with pytest.raises(UsageError, match="made for 512"):
        make_engine(tiny_model, max_model_len=513)


def test_cancel_keeps_the_rows_that_ran(make_engine, tiny_model):
    with make_engine(tiny_model, chunk=50) as engine:
        sequence = engine.new_sequence()
        asked = []
        with pytest.raises(CancelledError):
            engine.step([Work(sequence, IDS)], cancel=lambda: asked.append(1) or len(asked) > 2)
        assert sequence.length == 100
        flag = threading.Event()
        flag.set()
        with pytest.raises(CancelledError):
            engine.step([Work(sequence, IDS[100:])], cancel=flag)
        assert sequence.length == 100


def selector(model, value, **given):
    sites = [node.attrs["site"] for node in model.graph.nodes if node.op == "linear"]
    return ThresholdSelector("teal", {site: value for site in sites if site.startswith("layers.")}, **given)


def test_sparse_rows_start_after_the_sinks_and_are_marked(make_engine, tiny_model, expected):
    with make_engine(tiny_model, chunk=64) as engine:
        engine.selector = selector(tiny_model, 0.5)
        sequence = engine.new_sequence()
        (rows,) = engine.step([Work(sequence, IDS[:70], "all", sparse=True)])
        assert np.array_equal(rows[:4], expected[:4])
        assert (rows[4:] != expected[4:70]).any(axis=1).all()
        assert sequence.sparse == bytes(4) + b"\1" * 66
        assert 0.5 < engine.usage().density < 0.99
        # A dense prompt stays dense.
        other = engine.new_sequence()
        (rows,) = engine.step([Work(other, IDS[:70], "all")])
        assert np.array_equal(rows, expected[:70])
        engine.step([Work(other, IDS[70:71], sparse=True)])
        assert other.sparse == bytes(70) + b"\1"


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_sparse_logits_depend_on_no_chunk(make_engine, tiny_model, chunk):
    with make_engine(tiny_model) as engine:
        engine.selector = selector(tiny_model, 0.3)
        whole = all_logits(engine, IDS, sparse=True)
    with make_engine(tiny_model, chunk=chunk) as engine:
        engine.selector = selector(tiny_model, 0.3)
        assert np.array_equal(all_logits(engine, IDS, sparse=True), whole)


def test_thresholds_of_zero_give_the_dense_bits(make_engine, tiny_model, expected):
    with make_engine(tiny_model) as engine:
        engine.selector = selector(tiny_model, 0.0)
        assert np.array_equal(all_logits(engine, IDS, sparse=True), expected)
        assert engine.usage().density == 1.0
        engine.selector = None
        engine.reset_usage()
        assert np.array_equal(all_logits(engine, IDS, sparse=True), expected)
        assert engine.usage().rows == len(IDS)


def test_describe_says_context_cache_and_sparsity(make_engine, tiny_model):
    with make_engine(tiny_model, max_model_len=128, kv_tokens=256) as engine:
        text = "\n".join(engine.describe())
        assert "context 128 (model max 512; max_model_len to raise)" in text
        assert "256 tokens in 4 blocks" in text
        assert "every row is dense" in text
        engine.selector = selector(tiny_model, 0.5, prefill=True)
        assert "decode and prefill; first 4 tokens dense" in "\n".join(engine.describe())
