"""Neurons that do not fire, in the whole engine: no token changes, fewer bytes are read, and lists do what they say."""

import json
from contextlib import closing

import numpy as np
import pytest

import tiny_llama
from thinfer.core.active_set import ActiveSet
from thinfer.core.graph import split_ffn
from thinfer.core.neuron_selector import NeuronPredictor, NeuronSelector, StoredMatrix
from thinfer.core.selector import ThresholdSelector
from thinfer.engine import cpu
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import UnsupportedError, UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

pytest.importorskip("thinfer._core")

IDS = np.random.default_rng(4).integers(0, 256, 40).tolist()
FLOAT = {"activations": "f32", "kv_type": "f32"}
NEURONS = tiny_llama.FFN


def write_relu(folder, act="relu"):
    tiny_llama.write_tiny_llama(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": act}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    checkpoint = open_checkpoint(write_relu(tmp_path_factory.mktemp("relu") / "llama"))
    yield load_model(checkpoint)
    checkpoint.close()


def make_engine(model, *, mode="skip", neurons=None, selector=None, **options):
    given = {"executor": "cpu", "threads": 1, "neurons": mode, "layout": "columns"} | options
    return Engine(model, EngineOptions(**given), neurons=neurons, selector=selector)


def all_logits(engine, sparse=False):
    sequence = engine.new_sequence()
    (logits,) = engine.step([Work(sequence, IDS, "all", sparse=sparse)])
    engine.free(sequence)
    return logits


def decoded(engine, sparse=False):
    sequence = engine.new_sequence()
    rows = [engine.step([Work(sequence, [token], sparse=sparse)])[0] for token in IDS]
    engine.free(sequence)
    return np.concatenate(rows)


@pytest.mark.parametrize("options", [{}, {"weights": "q4"}, {"weights": "q8"}, {"weights": "f16"}, FLOAT])
def test_skipping_changes_no_bit(model, options):
    with make_engine(model, mode="off", **options) as engine:
        expected = all_logits(engine)
    for threads in (1, 2):
        with make_engine(model, threads=threads, **options) as engine:
            assert np.array_equal(all_logits(engine), expected)
            assert np.array_equal(decoded(engine), expected)
        with make_engine(model, threads=threads, chunk=5, **options) as engine:
            assert np.array_equal(all_logits(engine), expected)


def test_sums_are_cut_as_in_the_fused_matrix(tmp_path, monkeypatch):
    """Gate and up together are wide and cut in two; each alone would be cut in three."""
    for name, value in {"HIDDEN": 768, "FFN": 2048, "LAYERS": 1}.items():
        monkeypatch.setattr(tiny_llama, name, value)
    with closing(open_checkpoint(write_relu(tmp_path / "llama"))) as checkpoint:
        model = load_model(checkpoint)
        results = []
        for mode in ("off", "skip"):
            with make_engine(model, mode=mode, weights="q4") as engine:
                results.append(all_logits(engine))
        with make_engine(model, neurons=NeuronSelector("given"), weights="q4") as engine:
            results.append(all_logits(engine))
    assert np.array_equal(results[1], results[0])
    assert np.array_equal(results[2], results[0])


@pytest.mark.parametrize("sequences", [2, 9])
def test_sequences_together_equal_each_alone(model, sequences):
    with make_engine(model, weights="q4", threads=2) as engine:
        alone = decoded(engine)
        together = [engine.new_sequence() for _ in range(sequences)]
        for position, token in enumerate(IDS):
            works = [Work(sequence, [token if i == 0 else (token + i) % 256]) for i, sequence in enumerate(together)]
            logits = engine.step(works)
            assert np.array_equal(logits[0][0], alone[position])


def test_what_does_not_fire_is_not_read(model):
    with make_engine(model, weights="q8") as engine:
        decoded(engine)
        sparse = engine.usage()
    with make_engine(model, weights="q8", mode="off") as engine:
        decoded(engine)
        dense = engine.usage()
    assert dense.density > 0.99
    assert 0.5 < sparse.density < 0.9
    for layer in range(tiny_llama.LAYERS):
        up, down = sparse.sites[f"layers.{layer}.gate_up"], sparse.sites[f"layers.{layer}.down"]
        # About half of the neurons fire: half of up is skipped, and half of the channels of down.
        assert 0.6 < up.active / up.total < 0.9
        assert 0.6 < up.bytes / up.dense_bytes < 0.9
        assert 0.3 < down.active / down.total < 0.7
        assert up.total == dense.sites[f"layers.{layer}.gate_up"].total
        assert abs(up.active / up.total - (1 + down.active / down.total) / 2) < 0.05


def test_thresholds_and_exact_zeros_go_together(model):
    sites = [n.attrs["site"] for n in model.graph.nodes if n.op == "linear" and n.attrs["kind"] in ("qkv", "down")]
    selector = ThresholdSelector("teal", dict.fromkeys(sites, 0.3))
    results = []
    for mode in ("off", "skip"):
        for layout in ("rows", "columns"):
            with make_engine(model, weights="q4", selector=selector, layout=layout, mode=mode) as engine:
                results.append(decoded(engine, sparse=True))
    assert all(np.array_equal(result, results[0]) for result in results)


def test_auto_times_both_and_says_so(model):
    with make_engine(model, weights="q4", layout="auto", mode="auto") as engine:
        text = "\n".join(engine.describe())
        assert "exact: 2 layers have exact zeros" in text
        assert "neurons 0." in text
        assert "(assumed" in text


def test_auto_takes_float_weights(model):
    with make_engine(model, layout="auto", mode="auto") as engine:
        assert "neurons 0." in "\n".join(engine.describe())


def test_observers_see_what_they_see_without_skipping(model):
    def seen(mode):
        inputs = []
        with make_engine(model, mode=mode) as engine:
            works = [Work(engine.new_sequence(), IDS)]
            engine.step(works, observe=lambda _, site, x: inputs.append((site, x.copy())))
        return inputs

    for (site, x), (expected_site, expected) in zip(seen("skip"), seen("off"), strict=True):
        assert site == expected_site
        assert np.array_equal(x, expected)


def test_a_model_without_exact_zeros_is_left_alone(tiny_model):
    with make_engine(tiny_model, neurons=None) as engine:
        assert "neurons  " not in "\n".join(engine.describe())


# ---- lists


def random_lists(rows):
    rng = np.random.default_rng(7)
    return [ActiveSet.where(rng.random((rows, NEURONS)) < 0.4) for _ in range(tiny_llama.LAYERS)]


@pytest.mark.parametrize("act", ["relu", "silu"])
def test_given_lists_agree_with_the_reference(tmp_path, act):
    with closing(open_checkpoint(write_relu(tmp_path / "llama", act))) as checkpoint:
        model = load_model(checkpoint)
        selector = NeuronSelector("given")
        with (
            make_engine(model, neurons=selector, **FLOAT) as native,
            Engine(model, EngineOptions(executor="reference"), neurons=selector) as reference,
        ):
            free = all_logits(reference)
            for layer, active in enumerate(random_lists(len(IDS))):
                native.set_active(layer, active)
                reference.set_active(layer, active)
            listed = all_logits(reference)
            assert np.abs(all_logits(native) - listed).max() < 1e-3
            assert np.abs(listed - free).max() > 1e-2
            for layer in range(tiny_llama.LAYERS):
                native.set_active(layer, None)
            assert np.abs(all_logits(native) - free).max() < 1e-3


@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_lists_are_obeyed_where_skipping_is_slower(model, monkeypatch, activations):
    # Nothing timed: all of it lies in rows.
    monkeypatch.setattr(cpu, "measure_layouts", lambda candidates, timer: {})
    selector = NeuronSelector("given", rates=dict.fromkeys(range(tiny_llama.LAYERS), 0.1))
    options = {"weights": "q4", "activations": activations, "neurons": selector, "layout": "auto"}
    with make_engine(model, **options) as some, make_engine(model, mode="auto", **options) as whole:
        assert {packed.layout for packed in whole.executor.linears if packed.site.endswith("gate_up")} == {"rows"}
        free = all_logits(some, sparse=True)
        for layer, active in enumerate(random_lists(len(IDS))):
            some.set_active(layer, active)
            whole.set_active(layer, active)
        listed = all_logits(some, sparse=True)
        assert np.array_equal(all_logits(whole, sparse=True), listed)
        assert not np.array_equal(listed, free)
        for layer in range(tiny_llama.LAYERS):
            some.set_active(layer, None)
            whole.set_active(layer, None)
        assert np.array_equal(all_logits(whole, sparse=True), free)
        for layer, active in enumerate(random_lists(1)):
            some.set_active(layer, active)
            whole.set_active(layer, active)
        assert np.array_equal(decoded(whole, sparse=True), decoded(some, sparse=True))
        densities = [engine.usage().sites["layers.1.gate_up"] for engine in (some, whole)]
        assert densities[0].active == densities[1].active < densities[0].total


def test_how_long_lists_will_be_is_not_guessed(model):
    with make_engine(model, mode="auto", layout="auto", weights="q4", neurons=NeuronSelector("given")) as engine:
        assert {packed.layout for packed in engine.executor.linears if packed.site.endswith("gate_up")} == {"neurons"}


def test_a_list_of_all_neurons_is_dense_to_the_bit(model):
    with make_engine(model, weights="q4", mode="off") as engine:
        expected = decoded(engine)
    with make_engine(model, weights="q4", neurons=NeuronSelector("given")) as engine:
        assert np.array_equal(decoded(engine), expected)
        for layer in range(tiny_llama.LAYERS):
            engine.set_active(layer, ActiveSet.all(NEURONS))
        assert np.array_equal(decoded(engine), expected)


def test_lists_that_do_not_fit_are_refused(model):
    with make_engine(model) as engine, pytest.raises(UsageError, match=r"NeuronSelector\('given'\)"):
        engine.set_active(0, ActiveSet.all(NEURONS))
    with make_engine(model, neurons=NeuronSelector("given")) as engine:
        with pytest.raises(UsageError, match="96 neurons, the list is over 8"):
            engine.set_active(0, ActiveSet.all(8))
        with pytest.raises(UsageError, match="layer 9"):
            engine.set_active(9, ActiveSet.all(NEURONS))
    for wrong in ({"kind": "guess"}, {"kind": "predictor"}, {"rates": {0: 1.5}}):
        with pytest.raises(UsageError):
            NeuronSelector(**wrong)


# ---- predictors


def predictor_of(model, layer, source=None):
    """The layer's own gate: it predicts perfectly where it reads the layer's own input."""
    gate = model.weights.float32(f"model.layers.{layer}.mlp.gate_proj.weight")
    raw = np.ascontiguousarray(gate, np.float32).view(np.uint8).reshape(len(gate), -1)
    return NeuronPredictor((StoredMatrix(raw, "F32", gate.shape[1]),), 0.0, layer if source is None else source)


def test_a_perfect_predictor_changes_no_bit_and_is_counted(model):
    with make_engine(model, mode="off") as engine:
        expected = decoded(engine)
    selector = NeuronSelector("predictor", predictors={0: predictor_of(model, 0), 1: predictor_of(model, 1)})
    with make_engine(model, neurons=selector) as engine:
        assert np.array_equal(decoded(engine, sparse=True), expected)
        usage = engine.usage()
        site = usage.sites["layers.1.predictor"]
        assert site.bytes > 0
        assert site.dense_bytes == 0
        gate_up = usage.sites["layers.1.gate_up"]
        assert 0.3 < gate_up.active / gate_up.total < 0.75
        with pytest.raises(UsageError, match="takes no list"):
            engine.set_active(0, ActiveSet.all(NEURONS))
        assert np.array_equal(all_logits(engine), expected)


def test_a_lookahead_predictor_reads_an_earlier_layer(model):
    selector = NeuronSelector("predictor", predictors={1: predictor_of(model, 1, source=0)})
    with make_engine(model, neurons=selector) as engine:
        sparse = decoded(engine, sparse=True)
        dense = decoded(engine)
        assert np.array_equal(sparse[: selector.sink_tokens], dense[: selector.sink_tokens])
        assert not np.array_equal(sparse, dense)
        gate_up = engine.usage().sites["layers.1.gate_up"]
        assert gate_up.active < gate_up.total


def test_predictors_that_do_not_fit_are_refused(model):
    factor = StoredMatrix(np.zeros((4, 32), np.uint8), "F32", 8)
    for arguments in (((), 0.0, 0), ((factor, factor), 0.0, 0), ((factor,), -1.0, 0)):
        with pytest.raises(UsageError):
            NeuronPredictor(*arguments)
    with pytest.raises(UsageError, match="not before it"):
        NeuronSelector("predictor", predictors={0: NeuronPredictor((factor,), 0.0, 1)})
    graph = split_ffn(model.graph, 1, range(32))
    selector = NeuronSelector("predictor", predictors={0: predictor_of(model, 0)})
    with pytest.raises(UnsupportedError, match="on one executor"):
        Engine(model, EngineOptions(), neurons=selector, graph=graph)
