"""Programs: refused arguments, buffers, counters, the cache; calls from several threads; forks."""

import os
import threading

import numpy as np
import pytest

_core = pytest.importorskip("thinfer._core")


def batch(rows=2, **changes):
    arrays = {
        "tokens": np.zeros(rows, np.int32),
        "positions": np.arange(rows, dtype=np.int32),
        "sequence": np.zeros(rows, np.int32),
        "sparse": np.zeros(rows, np.uint8),
        "out_rows": np.zeros(0, np.int32),
        "block_table": np.zeros((1, 1), np.int32),
    }
    arrays.update({name: np.asarray(value, arrays[name].dtype) for name, value in changes.items()})
    return arrays


@pytest.fixture
def program():
    """embed (vocabulary of 4, width 8) -> attention (1 head of 2, 1 kv head) over a cache of one block."""
    cache = _core.KvCache(1, 1, 2, "f32")
    cache.ensure_blocks(1)
    made = _core.Program(None, _core.ThreadPool(1), 3, cache)
    x, out = made.add_buffer(6), made.add_buffer(2)
    made.op_embed(_core.Float32Rows(np.arange(24, dtype=np.float32).reshape(4, 6)), x)
    made.op_attention(x, out, 0, 1, 1, 2, 1.0)
    return made


def test_a_good_batch_runs(program):
    program.run(0, 2, **batch(tokens=[3, 1]))
    assert program.buffer(0)[:2].tolist() == [[18, 19, 20, 21, 22, 23], [6, 7, 8, 9, 10, 11]]
    assert program.buffer(1)[0].tolist() == [22, 23]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [4, 0]}, "row 0: token 4 is outside the vocabulary of 4"),
        ({"tokens": [0, -1]}, "row 1: token -1"),
        ({"positions": [0, 64]}, "row 1: position 64 is past the block table"),
        ({"positions": [-1, 0]}, "row 0: position -1 is negative"),
        ({"positions": [5, 5]}, "row 1: position 5 does not come after"),
        ({"sequence": [0, 1]}, "row 1: sequence 1 is outside the block table of 1"),
        ({"out_rows": [2]}, "is no row"),
        ({"block_table": [[1]]}, "is none of the cache's 1 blocks"),
        ({"block_table": [[-1]]}, "is none of the cache's 1 blocks"),
        ({"rows": 4}, "1 to 3 rows"),
        ({"rows": 0}, "1 to 3 rows"),
        ({"tokens": [0]}, "one entry a row"),
        ({"sequence": [0, 1], "positions": [0, 0], "block_table": [[0], [0]]}, "two rows write slot 0"),
    ],
)
def test_bad_batches_are_refused(program, changes, message):
    with pytest.raises(ValueError, match=message):
        program.run(0, 2, **batch(**changes))


def test_wrong_types_are_refused(program):
    for name, value in (
        ("tokens", np.zeros(2, np.int64)),
        ("sparse", np.zeros(2, np.bool_)),
        ("positions", np.zeros(4, np.int32)[::2]),
        ("block_table", np.zeros(1, np.int32)),
    ):
        arrays = batch() | {name: value}
        with pytest.raises(TypeError):
            program.run(0, 2, **arrays)
    with pytest.raises(ValueError, match="are not among"):
        program.run(0, 3, **batch())


def test_a_position_without_a_row_of_the_table_is_refused(program):
    program.op_positions(_core.Float32Rows(np.ones((5, 6), np.float32)), 0, 0, 2)
    with pytest.raises(ValueError, match="past the model's 3 learned positions"):
        program.run(0, 3, **batch(positions=np.array([2, 3], np.int32)))


def test_ops_that_do_not_fit_are_refused(program):
    wide = program.add_buffer(7)
    ones = np.ones(6, np.float32)
    for call in (
        lambda: program.add_buffer(0),
        lambda: program.op_add(0, wide, 0),
        lambda: program.op_add(0, 0, 99),
        lambda: program.op_add(-1, 0, 0),
        lambda: program.op_rms_norm(0, 0, ones[:5], 1e-5),
        lambda: program.op_layer_norm(0, 0, ones[:5], ones, 1e-5),
        lambda: program.op_layer_norm(0, 0, ones, ones[:5], 1e-5),
        lambda: program.op_positions(_core.Float32Rows(np.ones((2, 5), np.float32)), 0, 0, 0),
        lambda: program.op_positions(_core.Float32Rows(np.ones((2, 6), np.float32)), 0, 0, 2),
        lambda: program.op_act(0, program.add_buffer(6), "drelu"),
        lambda: program.op_act(0, 0, "relu"),
        lambda: program.op_attention(0, 1, 0, 1, 1, 2, 1.0, None, [0.5, 0.5]),
        lambda: program.op_rope(0, 0, [1.0, 1.0], 1.0, 1, 1, 2),
        lambda: program.op_rope(0, 0, [], 1.0, 1, 1, 2),
        lambda: program.op_rope(wide, wide, [1.0], 1.0, 1, 1, 2),
        lambda: program.op_attention(0, 1, 1, 1, 1, 2, 1.0),
        lambda: program.op_attention(0, 1, 0, 1, 1, 2, 1.0, 0),
        lambda: program.op_attention(0, 1, 0, 3, 2, 2, 1.0),
        lambda: program.op_gated_act(wide, 1, "silu"),
        lambda: program.op_gated_act(0, 1, "silu"),
        lambda: program.op_gated_act(0, wide, "swish", [0, 1, 2]),
        lambda: program.op_gated_act(0, wide, "silu", [0, 2, 2]),
        lambda: program.op_gated_act(0, wide, "silu", [0, 2, 7]),
        lambda: program.op_gated_act(0, wide, "silu", [0, 1]),
        lambda: program.op_select(0, 0),
        lambda: _core.Program("mmx", _core.ThreadPool(1), 1),
        lambda: _core.Program(None, _core.ThreadPool(1), 0),
        lambda: _core.Program(None, _core.ThreadPool(1), 1).op_attention(0, 1, 0, 1, 1, 2, 1.0),
        lambda: _core.ThreadPool(0),
        lambda: _core.KvCache(1, 1, 2, "f64"),
        lambda: _core.KvCache(0, 1, 2),
    ):
        with pytest.raises(ValueError):
            call()


def test_ops_after_select_work_on_the_selected_rows():
    program = _core.Program(None, _core.ThreadPool(2), 8)
    x, y, z = program.add_buffer(3), program.add_buffer(3), program.add_buffer(3)
    program.op_select(x, y)
    program.op_add(y, y, z)
    program.buffer(x)[:] = np.arange(24, dtype=np.float32).reshape(8, 3)
    program.buffer(z)[:] = -1
    program.run(0, 2, **batch(rows=8, out_rows=[1, 6]))
    assert program.buffer(z)[:3].tolist() == [[6, 8, 10], [36, 38, 40], [-1, -1, -1]]
    with pytest.raises(ValueError, match="selected rows"):
        program.op_add(x, y, z)
    with pytest.raises(ValueError, match="selected already"):
        program.op_select(z, y)


def test_a_buffer_view_keeps_the_program_alive():
    program = _core.Program(None, _core.ThreadPool(1), 5)
    view = program.buffer(program.add_buffer(17))
    del program
    view[:] = 3
    assert view.shape == (5, 17)
    assert view.sum() == 255


def test_forced_instruction_set(monkeypatch):
    monkeypatch.setenv("THINFER_ISA", "scalar")
    assert _core.Program(None, _core.ThreadPool(1), 1).isa == "scalar"
    monkeypatch.setenv("THINFER_ISA", "sse9")
    with pytest.raises(ValueError, match=r"THINFER_ISA: instruction set 'sse9'.*scalar"):
        _core.default_isa()


def test_counters_and_profiling(program):
    program.run(0, 2, **batch())
    program.set_profiling(True)
    program.run(0, 2, **batch())
    counters = program.take_counters()
    assert [(c.name, c.calls) for c in counters] == [("embed", 2), ("attention", 2)]
    assert all(c.nanoseconds > 0 for c in counters)
    assert [c.calls for c in program.take_counters()] == [0, 0]


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_cache_blocks_read_back_what_was_written(kv_type):
    cache = _core.KvCache(2, 3, 5, kv_type)
    assert cache.blocks == 0
    cache.ensure_blocks(2)
    cache.ensure_blocks(1)
    cache.ensure_blocks(4)
    assert cache.blocks == 4
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((64, 3, 5)).astype(np.float16).astype(np.float32) for _ in range(2))
    cache.write(1, 3, keys, values)
    cache.copy_block(3, 0)
    for block in (3, 0):
        for actual, written in zip(cache.read(1, block), (keys, values), strict=True):
            np.testing.assert_array_equal(actual, written)
    assert not cache.read(0, 0)[0].any()
    for bad in (lambda: cache.read(2, 0), lambda: cache.read(0, 4), lambda: cache.copy_block(0, -1)):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(ValueError):
        cache.write(0, 0, keys[:63], values)
    with pytest.raises(MemoryError):
        cache.ensure_blocks(2**31 - 1) if cache.block_bytes > 2**40 else _core.KvCache(1000, 1000, 1000).ensure_blocks(
            10**9
        )


def test_calls_from_several_threads_take_turns():
    pool = _core.ThreadPool(3)
    rows = _core.Float32Rows(np.arange(4000, dtype=np.float32).reshape(4, 1000))

    def work(token, failures):
        program = _core.Program(None, pool, 64)
        x = program.add_buffer(1000)
        program.op_embed(rows, x)
        program.op_add(x, x, x)
        for _ in range(50):
            program.run(0, 2, **batch(rows=64, tokens=[token] * 64))
            if not (program.buffer(x)[:, 7] == 2 * (1000 * token + 7)).all():
                failures.append(token)

    failures = []
    threads = [threading.Thread(target=work, args=(token, failures)) for token in range(4)]
    for thread in threads:
        thread.start()
    for size in (1, 4, 2):
        pool.threads = size
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.threads == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_starts_its_own_workers():
    program = _core.Program(None, _core.ThreadPool(2), 64)
    x = program.add_buffer(2000)
    program.op_add(x, x, x)
    program.buffer(x)[:] = 1
    program.run(0, 1, **batch(rows=64))
    child = os.fork()
    if child == 0:
        program.run(0, 1, **batch(rows=64))
        os._exit(0 if (program.buffer(x) == 4).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (program.buffer(x) == 2).all()


def test_an_idle_pool_burns_no_cpu():
    pool = _core.ThreadPool(3)
    program = _core.Program(None, pool, 64)
    x = program.add_buffer(2000)
    program.op_add(x, x, x)
    program.run(0, 1, **batch(rows=64))
    threading.Event().wait(0.05)
    before = sum(os.times()[:2])
    threading.Event().wait(0.5)
    assert sum(os.times()[:2]) - before < 0.1
