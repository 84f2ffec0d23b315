"""Predictors in a folder drive the engine: loaded by hash, equal to the NumPy executor, alone or in a batch."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import tiny_llama
from activation.relu_llama import write_predictable
from engine.predicted import make_predictor, write_predictors
from thinfer.activation.masked_run import RecordedSets, WindowRunner
from thinfer.activation.profile import profile
from thinfer.core.predictor import selector_of
from thinfer.core.sampling import SamplingParams
from thinfer.engine.llm import LLM
from thinfer.engine.options import EngineOptions
from thinfer.engine.predictors import Scorer
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import ArtifactError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

pytest.importorskip("thinfer._core")

IDS = np.random.default_rng(4).integers(0, 256, 40).tolist()
FLOAT = {"activations": "f32", "kv_type": "f32", "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_predictable(tmp_path_factory.mktemp("predicted") / "model")


@pytest.fixture(scope="module")
def model(base):
    with closing(open_checkpoint(base)) as checkpoint:
        yield load_model(checkpoint)


@pytest.fixture(scope="module")
def predictors(model):
    return [make_predictor(model, target, layer) for target in ("neurons", "heads") for layer in (0, 1)]


def decoded(engine, *, sparse=True):
    sequence = engine.new_sequence()
    rows = [engine.step([Work(sequence, [token], sparse=sparse)])[0] for token in IDS]
    engine.free(sequence)
    return np.concatenate(rows)


def test_a_folder_of_predictors_is_a_model(base, predictors, tmp_path):
    folder = write_predictors(tmp_path / "out", base, predictors)
    with LLM(folder, threads=1, weights="q4", neurons="skip") as llm, LLM(base, threads=1, weights="q4") as plain:
        lines = "\n".join(llm.describe())
        assert f"artifact  {folder}" in lines
        assert "predictor neurons: 2 of 2 layers count; held out: recall 0.970, 50% named, 45% needed" in lines
        assert "sparsity  predicted, decode; prefill dense; first 6 tokens dense" in lines
        assert "heads     predictor: 2 layers" in lines
        sparse, exact = decoded(llm.engine), decoded(plain.engine)
        assert np.array_equal(sparse[:6], exact[:6])
        assert not np.array_equal(sparse[6:], exact[6:])
        assert np.array_equal(decoded(llm.engine, sparse=False), exact)
        sites = llm.engine.usage().sites
        for layer in (0, 1):
            assert sites[f"layers.{layer}.predictor"].bytes > 0
            assert sites[f"layers.{layer}.head_predictor"].bytes > 0
            assert sites[f"layers.{layer}.o"].active < 0.9 * sites[f"layers.{layer}.o"].total
            assert sites[f"layers.{layer}.gate_up"].active < 0.8 * sites[f"layers.{layer}.gate_up"].total


def test_predictors_that_read_more_than_they_save_are_left_out(base, model, tmp_path):
    made = [make_predictor(model, "neurons", layer, density=density) for layer, density in ((0, 0.5), (1, 0.2))]
    folder = write_predictors(tmp_path / "out", base, made)
    left_out = "left out  predictor of the neurons of layer 0: it reads more than it saves"
    ran = {}
    for neurons in ("auto", "skip"):
        with LLM(folder, threads=1, weights="q8", neurons=neurons) as llm:
            assert (left_out in llm.describe()) == (neurons == "auto")
            ran[neurons] = decoded(llm.engine)
            read = {layer for layer in (0, 1) if f"layers.{layer}.predictor" in llm.engine.usage().sites}
            assert read == ({1} if neurons == "auto" else {0, 1})
    assert not np.array_equal(ran["auto"], ran["skip"])
    write_predictors(folder, base, made[:1])
    with LLM(folder, threads=1, weights="q8") as llm, LLM(base, threads=1, weights="q8") as plain:
        assert left_out in llm.describe()
        assert np.array_equal(decoded(llm.engine), decoded(plain.engine))


def test_prompts_run_no_predictor(base, predictors, tmp_path):
    folder = write_predictors(tmp_path / "out", base, predictors)
    with LLM(folder, threads=1) as llm:
        sequence = llm.engine.new_sequence()
        llm.engine.step([Work(sequence, IDS)])
        assert llm.engine.usage().sites["layers.0.predictor"].bytes == 0
        llm.engine.step([Work(sequence, [5], sparse=True)])
        assert llm.engine.usage().sites["layers.0.predictor"].bytes > 0


@pytest.mark.parametrize(
    ("options", "message"), [({"sparsity": False}, "sparsity is off"), ({"neurons": "off"}, "off")]
)
def test_options_leave_predictors_unused(base, predictors, tmp_path, options, message):
    folder = write_predictors(tmp_path / "out", base, predictors)
    with LLM(folder, threads=1, **options) as llm, LLM(base, threads=1) as plain:
        assert any(line.startswith("ignored") and message in line for line in llm.describe())
        assert np.array_equal(decoded(llm.engine), decoded(plain.engine))


def test_predictors_of_other_weights_are_refused(predictors, tmp_path):
    own = write_predictable(tmp_path / "model")
    folder = write_predictors(tmp_path / "out", own, predictors)
    tiny_llama.write_tiny_llama(own, seed=1)
    with pytest.raises(ArtifactError, match=r"stale artifact.*run thinfer predict train again"):
        LLM(folder, threads=1)


def test_damaged_entries_are_refused(base, predictors, tmp_path):
    folder = write_predictors(tmp_path / "out", base, predictors)
    path = folder / "thinfer.json"
    document = json.loads(path.read_text())
    document["sections"]["predictors"]["entries"][0]["source"] = "lm_head"
    path.write_text(json.dumps(document))
    with pytest.raises(ArtifactError, match="train the predictors again"):
        LLM(folder, threads=1)


def test_only_those_that_count_are_used(base, model, tmp_path):
    weak = [make_predictor(model, "neurons", 0, recall=0.9), make_predictor(model, "neurons", 1)]
    folder = write_predictors(tmp_path / "out", base, weak)
    with LLM(folder, threads=1) as llm:
        decoded(llm.engine)
        sites = llm.engine.usage().sites
        assert "layers.0.predictor" not in sites
        assert sites["layers.1.predictor"].bytes > 0
        assert any("predictor neurons: 1 of 2 layers count" in line for line in llm.describe())
    folder = write_predictors(tmp_path / "none", base, weak[:1])
    with LLM(folder, threads=1) as llm, LLM(base, threads=1) as plain:
        assert np.array_equal(decoded(llm.engine), decoded(plain.engine))


@pytest.mark.parametrize("targets", [("neurons",), ("heads",), ("neurons", "heads")])
def test_naming_everything_changes_no_bit(model, predictors, targets):
    everything = [replace(each, threshold=-1e30) for each in predictors if each.target in targets]
    options = {"threads": 1, "weights": "q4", "layout": "columns"}
    with Engine(model, EngineOptions(**options), neurons=selector_of(everything)) as engine:
        result = decoded(engine)
        assert sum(count.bytes > 0 for site, count in engine.usage().sites.items() if "predictor" in site) == len(
            everything
        )
    with Engine(model, EngineOptions(**options, neurons="off")) as engine:
        assert np.array_equal(result, decoded(engine))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_it_agrees_with_the_numpy_executor(model, lookahead, layout):
    chosen = [
        make_predictor(model, target, layer, source=max(layer - lookahead, 0), threshold=0.05)
        for target in ("neurons", "heads")
        for layer in (0, 1)
    ]
    results = []
    for executor in ("cpu", "reference"):
        options = EngineOptions(executor=executor, layout=layout, **FLOAT)
        with Engine(model, options, neurons=selector_of(chosen)) as engine:
            results.append(decoded(engine))
            assert np.abs(results[-1] - decoded(engine, sparse=False)).max() > 1e-2
    assert np.abs(results[0] - results[1]).max() < 1e-3


@pytest.mark.parametrize("activations", ["int8", "f32"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_looking_ahead_beside_other_work_changes_no_bit(model, threads, activations):
    """An observed run stops at every linear: its predictors run in order, the other one's beside what follows."""
    chosen = [
        make_predictor(model, target, layer, source=max(layer - 1, 0), threshold=0.05)
        for target in ("neurons", "heads")
        for layer in (0, 1)
    ]
    options = EngineOptions(**FLOAT | {"threads": threads, "activations": activations, "chunk": 8})
    with Engine(model, options, neurons=selector_of(chosen)) as engine:
        for observe in (None, lambda batch, site, x: None):
            sequence = engine.new_sequence()
            rows = [engine.step([Work(sequence, IDS[:20], "all")], observe=observe)[0]]
            rows += [engine.step([Work(sequence, [token], sparse=True)], observe=observe)[0] for token in IDS[20:]]
            engine.free(sequence)
            if observe is None:
                beside, counts = np.concatenate(rows), {n: c.bytes for n, c in engine.usage().sites.items()}
                engine.reset_usage()
        assert np.array_equal(np.concatenate(rows), beside)
        assert {name: count.bytes for name, count in engine.usage().sites.items()} == counts


def test_a_predictor_behind_a_layer_without_one_runs_once(model):
    """Gate and up of that layer run apart, and both read what the predictor reads."""
    chosen = make_predictor(model, "neurons", 1, source=0, threshold=0.05)
    with Engine(model, EngineOptions(**FLOAT, neurons="skip"), neurons=selector_of([chosen])) as engine:
        decoded(engine)
        assert sum(node is not None and node.op == "neurons" for node in engine.executor._nodes) == 2
        read = engine.usage().sites["layers.1.predictor"].bytes
    steps = len(IDS) - selector_of([chosen]).sink_tokens
    assert read == steps * sum(factor.raw.nbytes for factor in chosen.scorer.factors)


def test_what_a_predictor_reads_stays_until_its_list_is_used(model):
    """Its ops may wait behind others: no buffer between its source and its reader takes the place of what it reads."""
    chosen = [make_predictor(model, target, 1, source=0, threshold=0.05) for target in ("neurons", "heads")]
    with Engine(model, EngineOptions(**FLOAT), neurons=selector_of(chosen)) as engine:
        nodes, place = engine.executor._nodes, engine.executor._buffers
        nodes = [node for node in nodes if node is not None]
        for kind, reader in (("gate_up", "neurons"), ("qkv", "attention")):
            first = next(i for i, n in enumerate(nodes) if n.attrs.get("kind") == kind and n.attrs["layer"] == 0)
            last = next(i for i, n in enumerate(nodes) if n.op == reader and n.attrs["layer"] == 1)
            assert place[nodes[first].inputs[0]] not in [place[node.output] for node in nodes[first : last + 1]]


@pytest.mark.parametrize("threads", [1, 2])
def test_heads_left_out_are_those_of_the_masked_run(model, threads):
    """Keys and values of all heads are written: the same as a run in which only what the heads add is masked."""
    heads = [make_predictor(model, "heads", layer) for layer in (0, 1)]
    selector = selector_of(heads)
    tokens = 4 * IDS  # more than one segment of the cache
    seen = {}
    with Engine(model, EngineOptions(**FLOAT | {"threads": threads}), neurons=selector) as engine:
        logits, sequence = [], engine.new_sequence()
        for token in tokens:
            made = engine.step(
                [Work(sequence, [token], sparse=True)], observe=lambda b, s, x: seen.setdefault(s, []).append(x.copy())
            )
            logits.append(made[0])
        engine.free(sequence)
        masks = {}
        for layer, predictor in selector.heads.items():
            needed = Scorer(predictor).needed(np.concatenate(seen[f"layers.{layer}.qkv"]))
            masks[f"layers.{layer}.o"] = np.repeat(needed, tiny_llama.HEAD_DIM, axis=1)
            added = np.concatenate(seen[f"layers.{layer}.o"])[selector.sink_tokens :]
            assert np.array_equal(added != 0, masks[f"layers.{layer}.o"][selector.sink_tokens :])
        whole_groups = ~needed.reshape(len(tokens), tiny_llama.KV_HEADS, -1).any(axis=2)
        assert whole_groups.any()
        together = engine.step([Work(engine.new_sequence(), tokens, "all", sparse=True)])[0]
    expected = WindowRunner(model, len(tokens), selector.sink_tokens).run(tokens, RecordedSets(masks))
    assert np.abs(np.concatenate(logits) - expected).max() < 1e-3
    assert np.array_equal(together, np.concatenate(logits))


@pytest.mark.parametrize(("weights", "streams"), [("stored", 9), ("q4", 3), ("q4", 9), ("q4", 32), ("q8", 9)])
def test_a_batch_gives_each_row_what_it_gets_alone(base, predictors, tmp_path, weights, streams):
    folder = write_predictors(tmp_path / "out", base, predictors)
    prompts = [[(7 * i + j) % 256 for j in range(3 + i % 5)] for i in range(streams)]
    options = {"weights": weights, "max_sequences": streams, "kv_tokens": 64 * streams, "neurons": "skip"}
    with LLM(folder, threads=2, **options) as llm:
        alone = [llm.generate(prompt, GREEDY).token_ids for prompt in prompts]
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == alone
        assert len(set(alone)) > 1
        assert llm.engine.usage().sites["layers.0.predictor"].bytes > 0


def test_a_profile_says_what_to_expect(base, tmp_path):
    with LLM(base, threads=1, weights="q4") as llm:
        assert "(assumed" in "\n".join(llm.describe())
    found, _ = profile(base, tmp_path / "profile", tokens=64, seq_len=32, threads=1)
    with LLM(tmp_path / "profile", threads=1, weights="q4") as llm:
        lines = "\n".join(llm.describe())
        assert "(assumed" not in lines
        assert all(f"{round(20 * rate) * 5} % skipped" in lines for rate in found.sparsity())
        with LLM(base, threads=1, weights="q4") as plain:
            assert np.array_equal(decoded(llm.engine), decoded(plain.engine))


def test_rates_of_predictors_are_used_and_held_out_recall_holds(base, predictors, tmp_path):
    """On text that had no part in anything: what the engine leaves out is next to nothing of what fires."""
    # Few enough to be worth the predictor's bytes.
    folder = write_predictors(tmp_path / "out", base, [replace(one, density=0.2) for one in predictors[:2]])
    seen = {}

    def watch(_, site, x):
        seen.setdefault(site, []).append(x.copy())

    for each in (base, folder):
        with LLM(each, threads=1, weights="q8") as llm:
            sequence = llm.engine.new_sequence()
            for token in IDS:
                llm.engine.step([Work(sequence, [token], sparse=True)], observe=watch)
            if each == folder:
                assert "55 % skipped" in "\n".join(llm.describe())
    fired = np.concatenate(seen["layers.0.down"]) != 0
    dense, predicted = fired[: len(IDS)], fired[len(IDS) :]
    assert not (predicted & ~dense).any()
    assert 0.95 <= (dense & predicted).sum() / dense.sum() < 1
