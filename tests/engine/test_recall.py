"""The recall of predictors while the engine runs: what it counts is the truth, and it changes no token."""

import json
from contextlib import closing

import numpy as np
import pytest

import tiny_llama
from activation.relu_llama import write_predictable
from engine.predicted import make_predictor, write_predictors
from thinfer.core.active_set import ActiveSet
from thinfer.core.neuron_selector import NeuronSelector
from thinfer.core.predictor import selector_of
from thinfer.core.sampling import SamplingParams
from thinfer.core.selector import ThresholdSelector
from thinfer.engine import cpu
from thinfer.engine.llm import LLM
from thinfer.engine.options import EngineOptions
from thinfer.engine.predictors import Scorer
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

pytest.importorskip("thinfer._core")

IDS = np.random.default_rng(4).integers(0, 256, 40).tolist()
FLOAT = {"activations": "f32", "kv_type": "f32", "threads": 1, "neurons": "skip"}
LAYERS = range(tiny_llama.LAYERS)
BAD, EVERYTHING = 1.0, -1e30


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_predictable(tmp_path_factory.mktemp("recall") / "model")


def loaded(folder, act=None):
    """A model folder, with another activation if one is named."""
    if act is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_act": act}))
    with closing(open_checkpoint(folder)) as checkpoint:
        yield load_model(checkpoint)


@pytest.fixture(scope="module")
def model(base):
    yield from loaded(base)


def neurons(model, threshold, layers=LAYERS):
    predictors = [make_predictor(model, "neurons", layer, threshold=threshold) for layer in layers]
    return selector_of(predictors, rates=dict.fromkeys(layers, 0.5))


def make_engine(model, selector, **options):
    return Engine(model, EngineOptions(**FLOAT | options), neurons=selector)


def decode(engine, *, sparse=True, tokens=IDS, observe=None):
    sequence = engine.new_sequence()
    rows = [engine.step([Work(sequence, [token], sparse=sparse)], observe=observe)[0] for token in tokens]
    engine.free(sequence)
    return np.concatenate(rows)


def found_by_site(engine):
    return {site: (count.needed, count.found) for site, count in engine.usage().sites.items() if count.needed}


@pytest.mark.parametrize("threads", [1, 2])
def test_it_is_the_share_of_what_fires_that_the_predictor_names(model, threads):
    """The truth from the layers' inputs and the weights, in NumPy."""
    selector = neurons(model, BAD)
    seen = {}
    with make_engine(model, selector, recall_steps=1, threads=threads) as engine:
        decode(engine, observe=lambda _, site, x: seen.setdefault(site, []).append(x.copy()))
        counted, recall = found_by_site(engine), engine.usage().recall
    truth = {}
    for layer, predictor in selector.predictors.items():
        x = np.concatenate(seen[f"layers.{layer}.gate_up"])[selector.sink_tokens :]
        gate, up = (model.weights.float32(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up"))
        fired = np.maximum(x @ gate.T, 0) * (x @ up.T) != 0
        truth[f"layers.{layer}.predictor"] = fired.sum(), (fired & Scorer(predictor).needed(x)).sum()
    assert counted == truth
    needed, found = np.sum(list(truth.values()), axis=0)
    assert recall == found / needed
    assert 0.3 < recall < 0.9


@pytest.mark.parametrize("act", ["relu", "relu2"])
def test_both_executors_count_the_same(tmp_path, act):
    for model in loaded(write_predictable(tmp_path / "model"), act):
        counted = []
        for executor in ("cpu", "reference"):
            with make_engine(model, neurons(model, BAD), executor=executor, recall_steps=1) as engine:
                decode(engine)
                decode(engine, sparse=False)
                together = [Work(engine.new_sequence(), IDS, "none", sparse=sparse) for sparse in (True, False)]
                engine.step(together)
                counted.append(found_by_site(engine))
                assert 0.3 < engine.usage().recall < 0.9
        assert counted[0] == counted[1]
        assert set(counted[0]) == {f"layers.{layer}.predictor" for layer in LAYERS}


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_who_names_everything_misses_nothing(model, executor):
    with make_engine(model, neurons(model, EVERYTHING), executor=executor, recall_steps=1) as engine:
        assert engine.usage().recall is None
        decode(engine)
        usage = engine.usage()
        assert usage.recall == 1.0
        assert usage.needed == usage.found > 0
        decode(engine)
        assert engine.usage().since(usage).needed == usage.needed
        engine.reset_usage()
        assert engine.usage().recall is None


@pytest.mark.parametrize(("options", "steps"), [({"recall_steps": 8}, 8), ({}, 64)])
def test_a_layer_is_sampled_once_in_so_many_steps_and_no_two_together(model, options, steps):
    with make_engine(model, neurons(model, BAD), **options) as engine:
        sequence = engine.new_sequence()
        engine.step([Work(sequence, IDS[:8])])
        sampled, before = [], engine.usage()
        for step in range(3 * steps):
            engine.step([Work(sequence, [step % 256], sparse=True)])
            usage = engine.usage()
            sampled.append([site for site, count in usage.since(before).sites.items() if count.needed])
            before = usage
    assert max(map(len, sampled)) == 1
    for layer in LAYERS:
        places = [step for step, sites in enumerate(sampled) if f"layers.{layer}.predictor" in sites]
        assert np.diff(places).tolist() == [steps, steps]


@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_it_is_the_same_where_all_rows_are_read(model, monkeypatch, activations):
    monkeypatch.setattr(cpu, "measure_layouts", lambda candidates, timer: {})  # nothing timed: all of it lies in rows
    results, found = [], []
    for mode in ("skip", "auto"):
        options = {"weights": "q4", "activations": activations, "neurons": mode}
        with make_engine(model, neurons(model, BAD), recall_steps=2, **options) as engine:
            layouts = {packed.layout for packed in engine.executor.linears if packed.site.endswith("gate_up")}
            assert layouts == {"neurons" if mode == "skip" else "rows"}
            results.append(decode(engine))
            found.append(found_by_site(engine))
    assert np.array_equal(results[0], results[1])
    assert found[0] == found[1] != {}


@pytest.mark.parametrize("weights", ["stored", "q4"])
@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_sampling_changes_no_bit(model, weights, activations):
    options = {"weights": weights, "activations": activations, "kv_type": "f16", "layout": "columns"}
    results, usages = [], []
    for steps in (0, 1, 3):
        with make_engine(model, neurons(model, BAD), recall_steps=steps, **options) as engine:
            results.append(decode(engine))
            usages.append(engine.usage())
    assert np.array_equal(results[1], results[0])
    assert np.array_equal(results[2], results[0])
    never, always, sometimes = usages
    assert never.recall is None
    # The density is that of the tokens' own weights; what is read is read.
    assert never.density == always.density == sometimes.density
    assert never.bytes_per_token < sometimes.bytes_per_token < always.bytes_per_token
    for layer in LAYERS:
        read, plain = (usage.sites[f"layers.{layer}.gate_up"].bytes for usage in (always, never))
        assert plain < read < always.sites[f"layers.{layer}.gate_up"].dense_bytes


def test_streams_together_keep_their_tokens(base, model, tmp_path):
    folder = write_predictors(
        tmp_path / "out", base, [make_predictor(model, "neurons", i, threshold=BAD) for i in LAYERS]
    )
    prompts = [[(7 * i + j) % 256 for j in range(3 + i % 5)] for i in range(9)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokens, recalls = [], []
    for steps in (0, 1):
        with LLM(folder, threads=2, weights="q4", neurons="skip", recall_steps=steps) as llm:
            tokens.append([output.token_ids for output in llm.generate(prompts, params)])
            recalls.append(llm.engine.usage().recall)
    assert tokens[0] == tokens[1]
    assert recalls[0] is None
    assert 0.3 < recalls[1] < 0.9


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_without_exact_zeros_there_is_none(tmp_path, executor):
    for model in loaded(write_predictable(tmp_path / "model"), "silu"):
        with make_engine(model, neurons(model, BAD), executor=executor, recall_steps=1) as engine:
            decode(engine)
            assert engine.usage().recall is None


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_heads_have_none(model, executor):
    heads = selector_of([make_predictor(model, "heads", layer) for layer in LAYERS])
    with make_engine(model, heads, executor=executor, recall_steps=1) as engine:
        decode(engine)
        assert engine.usage().recall is None


def test_lists_of_a_caller_are_not_judged(model):
    # Thresholds mark rows as sparse.
    selector = ThresholdSelector("teal", {"layers.0.qkv": 0.1})
    options = EngineOptions(**FLOAT, recall_steps=1)
    with Engine(model, options, selector=selector, neurons=NeuronSelector("given")) as engine:
        engine.set_active(0, ActiveSet.where(np.arange(tiny_llama.FFN)[None] < 5))
        decode(engine)
        assert engine.usage().recall is None


def test_only_layers_with_a_predictor_count(model):
    with make_engine(model, neurons(model, BAD, layers=[1]), recall_steps=1) as engine:
        decode(engine)
        assert set(found_by_site(engine)) == {"layers.1.predictor"}


@pytest.mark.parametrize("steps", [-1, 1.5, True, 1 << 31])
def test_steps_are_a_number(steps):
    with pytest.raises(UsageError, match="recall_steps"):
        EngineOptions(recall_steps=steps)
