"""The whole native engine on quantised weights and int8 activations: nothing but a token's own past changes a bit."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.tiny_gguf import FFN, HIDDEN, MIXES, write_tiny_gguf
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

_core = pytest.importorskip("thinfer._core")

IDS = np.random.default_rng(5).integers(0, 300, 80).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quantised")
    opened = {}
    for name, types in MIXES.items():
        opened[name] = open_checkpoint(write_tiny_gguf(folder / f"{name.replace(' ', '-')}.gguf", types))
    yield {name: load_model(checkpoint) for name, checkpoint in opened.items()}
    for checkpoint in opened.values():
        checkpoint.close()


@pytest.fixture(params=MIXES)
def model(models, request):
    return models[request.param]


def block_sites(model):
    return [n.attrs["site"] for n in model.graph.nodes if n.op == "linear" and n.attrs["kind"] != "lm_head"]


def selector_of(model, value, **given):
    return ThresholdSelector("teal", dict.fromkeys(block_sites(model), value), **given)


def make_engine(model, threshold=None, **options):
    """An engine of one thread unless it is said; `threshold` None is dense."""
    selector = None if threshold is None else selector_of(model, threshold)
    given = {"executor": "cpu", "threads": 1, "layout": "columns"} | options
    return Engine(model, EngineOptions(**given), selector=selector)


def all_logits(engine, ids=IDS):
    sequence = engine.new_sequence()
    (logits,) = engine.step([Work(sequence, ids, "all", sparse=True)])
    engine.free(sequence)
    return logits


def decoded(engine, ids=IDS):
    sequence = engine.new_sequence()
    return np.concatenate([engine.step([Work(sequence, [token], sparse=True)])[0] for token in ids])


@pytest.fixture(params=[None, 0.5], ids=["dense", "sparse"])
def threshold(request):
    return request.param


@pytest.fixture(scope="module")
def expected(models):
    """Logits of all positions in one step on one thread, by model and threshold; computed once."""
    found = {}

    def get(model, threshold):
        key = next(name for name, value in models.items() if value is model), threshold
        if key not in found:
            with make_engine(model, threshold) as engine:
                found[key] = all_logits(engine)
                if threshold:
                    assert 0.3 < engine.usage().density < 0.95
        return found[key]

    return get


def test_the_files_are_what_they_should_be(models, expected):
    codecs, most = set(), 0
    for model in models.values():
        with make_engine(model) as engine:
            codecs |= {m.codec for m in engine.executor.linears}
            most = max(most, *(m.plan.segments for m in engine.executor.linears))
    assert codecs == {"u4_d", "u4_dm", "u5_d", "u5_dm", "i8_d", "u4_k", "u5_k", "u6_k", "f16"}
    assert most > 1
    for model in models.values():
        dense, sparse = expected(model, None), expected(model, 0.5)
        assert np.isfinite(dense).all()
        assert 0.3 < dense.std() < 30
        np.testing.assert_array_equal(sparse[:4], dense[:4])
        assert (sparse[4:] != dense[4:]).any(axis=1).all()


def test_int8_is_close_to_float_mode(model, expected):
    with make_engine(model, activations="f32") as engine:
        exact = all_logits(engine)
    error = expected(model, None) - exact
    assert np.sqrt(np.mean(error**2)) < 0.05 * exact.std()


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_float_mode_is_the_reference(model, stage):
    value = None if stage == "dense" else 0.5
    found = []
    for executor in ("cpu", "reference"):
        with make_engine(model, value, executor=executor, activations="f32", kv_type="f32") as engine:
            found.append(all_logits(engine, IDS[:24]))
    assert np.abs(found[0] - found[1]).max() < 1e-3


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_decode_equals_prefill(model, expected, threshold, threads):
    for layout in ("rows", "columns") if threshold else ("columns",):
        with make_engine(model, threshold, threads=threads, layout=layout) as engine:
            assert decoded(engine).tobytes() == expected(model, threshold).tobytes()


@pytest.mark.parametrize(("chunk", "threads"), [(1, 2), (5, 1), (5, 3), (64, 1), (64, 2), (64, 3)])
def test_chunks_and_threads_do_not_change_a_bit(model, expected, threshold, chunk, threads):
    with make_engine(model, threshold, threads=threads, chunk=chunk) as engine:
        assert all_logits(engine).tobytes() == expected(model, threshold).tobytes()


@pytest.mark.parametrize("count", [2, 7, 16])
def test_neighbours_do_not_change_a_bit(model, expected, threshold, count):
    """Sequences of different lengths; odd ones run dense beside sparse ones, and all decode together."""
    with make_engine(model, threshold, threads=2) as engine:
        kinds = [i % 2 == 0 for i in range(count)]
        works = [Work(engine.new_sequence(), IDS[: 5 + 4 * i], "last", sparse=act) for i, act in enumerate(kinds)]
        for step in range(3):
            for work, act, logits in zip(works, kinds, engine.step(works), strict=True):
                right = expected(model, threshold if act else None)[work.sequence.length - 1]
                assert logits[0].tobytes() == right.tobytes(), (step, work.sequence.length, act)
            works = [
                Work(w.sequence, [IDS[w.sequence.length]], sparse=act) for w, act in zip(works, kinds, strict=True)
            ]


def test_thresholds_of_zero_give_the_dense_bits(model, expected):
    with make_engine(model, 0.0, threads=2) as engine:
        assert decoded(engine).tobytes() == expected(model, None).tobytes()
    # The same file and the same packed weights, with and without thresholds.
    with make_engine(model, 0.5, threads=2) as engine:
        assert decoded(engine).tobytes() == expected(model, 0.5).tobytes()
        engine.selector = selector_of(model, 0.0)
        assert decoded(engine).tobytes() == expected(model, None).tobytes()
        engine.selector = None
        assert decoded(engine).tobytes() == expected(model, None).tobytes()


@pytest.mark.parametrize("isa", _core.isas())
def test_instruction_sets_do_not_change_a_bit(model, expected, threshold, isa):
    with make_engine(model, threshold, threads=2, isa=isa) as engine:
        assert f"cpu       {isa}," in "\n".join(engine.describe())
        assert all_logits(engine, IDS[:24]).tobytes() == expected(model, threshold)[:24].tobytes()


def test_five_runs_pick_the_same_tokens(models):
    def run():
        with make_engine(models["K"], 0.5, threads=3) as engine:
            sequence, token, tokens = engine.new_sequence(), IDS[0], []
            for _ in range(30):
                (logits,) = engine.step([Work(sequence, [token], sparse=True)])
                token = int(logits[0].argmax())
                tokens.append((token, float(logits[0, token])))
        return tokens

    first = run()
    assert len({token for token, _ in first}) > 5
    assert [run() for _ in range(4)] == [first] * 4


def test_sites_without_a_threshold_count_as_dense(models):
    """Float products without a threshold have no pass over the rows, but their channels belong to the density."""
    model = next(iter(models.values()))
    downs = {site: 0.5 for site in block_sites(model) if site.endswith("down")}
    density = {}
    for activations in ("int8", "f32"):
        options = EngineOptions(executor="cpu", threads=1, layout="columns", activations=activations)
        with Engine(model, options, selector=ThresholdSelector("teal", downs)) as engine:
            decoded(engine, IDS[:20])
            density[activations] = engine.usage().density
    assert density["f32"] == pytest.approx(density["int8"], abs=0.01)
    assert 0.7 < density["f32"] < 0.99


def test_density_is_that_of_the_thresholds(model):
    """Between the bounds for every kind, as the reference executor counts it, and bytes fall with it."""
    counts = {}
    for executor in ("cpu", "reference"):
        with make_engine(model, 0.5, executor=executor) as engine:
            decoded(engine, IDS[:12])
            engine.reset_usage()
            sequence = engine.new_sequence()
            for token in IDS[:30]:
                engine.step([Work(sequence, [token], sparse=True)])
            counters = engine.executor.counters()
            counts[executor] = {site: count.active / count.total for site, count in counters.items()}
            if executor == "cpu":
                read = {site: count.bytes for site, count in counters.items()}
                packed = sum(m.nbytes for m in engine.executor.linears if not m.site.endswith("lm_head"))
    for kind, reference in counts["reference"].items():
        actual = counts["cpu"][kind]
        if kind != "lm_head":
            assert 0.02 < actual < 0.95
            # Values that round to 0 in int8 are skipped too; never one more than the thresholds keep, but for noise.
            assert reference - 0.06 < actual < reference + 0.02
    skipping = sum(value for kind, value in read.items() if kind != "lm_head")
    assert 0.1 * 30 * packed < skipping < 0.97 * 30 * packed


SCRIPT = """
import hashlib, json, sys
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from thinfer.bench.worker import peak_rss_bytes
from thinfer.core.selector import ThresholdSelector
path, ids, options, threshold = json.loads(sys.argv[1])
before = peak_rss_bytes()
model = load_model(open_checkpoint(path))
sites = [n.attrs["site"] for n in model.graph.nodes if n.op == "linear" and n.attrs["kind"] != "lm_head"]
selector = None if threshold is None else ThresholdSelector("teal", dict.fromkeys(sites, threshold))
with Engine(model, EngineOptions(executor="cpu", **options), selector=selector) as engine:
    (logits,) = engine.step([Work(engine.new_sequence(), ids, "all")])
    print(json.dumps({
        "describe": engine.describe(),
        "logits": hashlib.sha256(logits.tobytes()).hexdigest(),
        "packed": sum(m.nbytes for m in engine.executor.linears),
        "grown": peak_rss_bytes() - before,
    }))
"""


def in_a_process(path, ids, options, threshold=None, **env):
    arguments = json.dumps([str(path), ids, options, threshold])
    command = [sys.executable, "-c", SCRIPT, arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("isa", _core.isas())
def test_a_forced_instruction_set_runs_and_gives_the_same_logits(models, expected, isa):
    model = models["Q4_0"]
    path = model.weights.source("lm_head.weight").checkpoint.path
    result = in_a_process(path, IDS[:10], {"threads": 2}, THINFER_ISA=isa)
    assert f"cpu       {isa}," in "\n".join(result["describe"])
    assert result["logits"] == hashlib.sha256(expected(model, None)[:10].tobytes()).hexdigest()


MIB = 1 << 20


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("threshold", [None, 0.5], ids=["dense", "sparse"])
def test_weights_are_in_memory_once(tmp_path, threshold):
    """90 MiB of weights: with the file's pages kept, or a second copy, the peak would be twice that."""
    path = tmp_path / "large.gguf"
    write_tiny_gguf(path, {"": "Q4_K"}, layers=4, hidden=1024, ffn=12288)
    result = in_a_process(path, IDS[:8], {"threads": 2}, threshold)
    assert 80 * MIB < result["packed"] < 1.03 * path.stat().st_size
    # Buffers, code pages, and with thresholds two sets of 32 MiB that are timed before anything is packed.
    assert result["grown"] < 1.1 * result["packed"] + 80 * MIB, result


def test_an_unsupported_type_is_named_before_anything_runs(tmp_path):
    path = write_tiny_gguf(tmp_path / "model.gguf", MIXES["Q4_0"])
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert int.from_bytes(data[at : at + 4], "little") == 2  # Q4_0
    data[at : at + 4] = (20).to_bytes(4, "little")  # IQ4_NL, with blocks of the same size
    path.write_bytes(data)
    checkpoint = open_checkpoint(path)
    with pytest.raises(UnsupportedError, match=r"blk\.1\.ffn_down\.weight has type IQ4_NL"):
        make_engine(load_model(checkpoint))
    checkpoint.close()


def test_sizes_of_the_tiny_model():
    """Several partial sums need inputs of at least 512, two-level scales a multiple of 256."""
    assert HIDDEN >= 512
    assert FFN % 256 == HIDDEN % 256 == 0
