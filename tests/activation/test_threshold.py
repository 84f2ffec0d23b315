"""calibrate end to end on the tiny model."""

import json

import numpy as np
import pytest

from thinfer.activation.measure import measure_decode, measure_loss
from thinfer.activation.scores import block_sites, column_norms
from thinfer.activation.threshold import calibrate
from thinfer.core.sampling import SamplingParams
from thinfer.engine.llm import LLM
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import ArtifactError, UsageError
from tiny_llama import write_tiny_llama

TEXT = "The prince came into the room, and all the ladies looked at him with a smile; he bowed. " * 30
SMALL = {"executor": "reference", "text": TEXT, "samples": 6, "held_out": 3, "seq_len": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("calibrate") / "model")


def test_sites_are_the_four_inputs_of_every_block(tiny_model):
    sites = block_sites(tiny_model, tiny_model.graph)
    assert [site.name for site in sites[:4]] == [f"layers.0.{kind}" for kind in ("qkv", "o", "gate_up", "down")]
    assert len(sites) == 8
    gate_up = sites[2]
    whole = np.concatenate([tiny_model.weights.float32(name) for name in gate_up.weights])
    assert column_norms(tiny_model, gate_up) == pytest.approx(np.linalg.norm(whole, axis=0), rel=1e-6)
    assert gate_up.nbytes == whole.nbytes


@pytest.mark.parametrize("method", ["teal", "wina"])
def test_the_rate_asked_for_is_the_density_measured(model, tmp_path, method):
    report = calibrate(model, tmp_path / "out", method=method, sparsity=0.4, **SMALL)
    assert report["sparsity"] == pytest.approx(0.4)
    assert report["density"] == pytest.approx(0.6, abs=0.05)
    assert report["ppl"] != report["ppl_dense"]
    document = json.loads((tmp_path / "out" / "thinfer.json").read_text())
    assert document["sections"]["calibration"] == json.loads(json.dumps(report))
    assert document["base"] == str(model)
    with LLM(tmp_path / "out", executor="reference") as llm:
        assert llm.engine.selector.method == method
        assert len(llm.engine.selector.thresholds) == 8
        assert llm.engine.selector.rates == dict.fromkeys(llm.engine.selector.thresholds, 0.4)
        assert (len(llm.engine.selector.channel_scale) > 0) == (method == "wina")
        llm.generate("The prince", GREEDY)
        assert llm.engine.usage().density < 0.95


def test_a_calibration_repeats_to_the_byte(model, tmp_path):
    for name in ("a", "b"):
        calibrate(model, tmp_path / name, sparsity=0.3, seed=5, **SMALL)
    for file in ("thinfer.json", "thinfer.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    calibrate(model, tmp_path / "c", sparsity=0.3, seed=6, **SMALL)
    assert (tmp_path / "a" / "thinfer.json").read_bytes() != (tmp_path / "c" / "thinfer.json").read_bytes()


def test_sparsity_0_gives_the_dense_tokens_and_1_still_runs(model, tmp_path):
    assert calibrate(model, tmp_path / "none", sparsity=0.0, **SMALL)["density"] == 1.0
    assert calibrate(model, tmp_path / "all", sparsity=1.0, **SMALL)["density"] == 0.0
    with LLM(model, executor="reference") as dense, LLM(tmp_path / "none", executor="reference") as none:
        assert none.generate("The prince", GREEDY).token_ids == dense.generate("The prince", GREEDY).token_ids
    with LLM(tmp_path / "all", executor="reference") as everything:
        assert len(everything.generate("The prince", GREEDY).token_ids) == 16


def test_a_budget_is_kept_and_the_curve_reported(model, tmp_path):
    report = calibrate(model, tmp_path / "out", max_ppl_increase=0.05, **SMALL)
    assert report["ppl"] <= report["ppl_dense"] * 1.05 * (1 + 1e-9)
    assert len(report["curve"]) >= 13
    assert set(report["rates"]) == {"qkv", "o", "gate_up", "down"}
    assert report["options"]["max_ppl_increase"] == 0.05
    assert report["text"]["source"] == "given text"


def test_greedy_reaches_the_sparsity_asked_for(model, tmp_path):
    report = calibrate(model, tmp_path / "out", sparsity=0.3, allocation="greedy", **SMALL)
    assert report["sparsity"] == pytest.approx(0.3, abs=0.02)
    assert len(set(report["rates"].values())) > 1


def test_parts_of_the_depth_are_calibrated_apart(model, tmp_path):
    report = calibrate(model, tmp_path / "out", sparsity=0.3, allocation="greedy", depth_parts=2, **SMALL)
    assert set(report["rates"]) == {f"{kind}/{part}" for kind in ("qkv", "o", "gate_up", "down") for part in (1, 2)}
    assert report["sparsity"] == pytest.approx(0.3, abs=0.02)
    with LLM(tmp_path / "out", executor="reference") as llm:
        rates = llm.engine.selector.rates
    for site, rate in rates.items():
        _, layer, kind = site.split(".")
        assert rate == pytest.approx(report["rates"][f"{kind}/{int(layer) + 1}"])


def test_an_artifact_in_the_model_s_own_folder_moves_with_it(tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    calibrate(model, model / "sparse", sparsity=0.3, **SMALL)
    assert json.loads((model / "sparse" / "thinfer.json").read_text())["base"] == ".."
    moved = model.rename(tmp_path / "moved")
    LLM(moved / "sparse", executor="reference").close()
    write_tiny_llama(moved, seed=9)
    with pytest.raises(ArtifactError, match="stale"):
        LLM(moved / "sparse", executor="reference")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either sparsity or max_ppl_increase"),
        ({"sparsity": 0.4, "max_ppl_increase": 0.1}, "either"),
        ({"sparsity": 1.5}, "between 0 and 1"),
        ({"sparsity": 0.4, "method": "magic"}, "teal, wina"),
        ({"sparsity": 0.4, "allocation": "magic"}, "uniform, greedy"),
        ({"sparsity": 0.95, "allocation": "greedy"}, "uniform for more"),
        ({"max_ppl_increase": -1.0}, "above 0"),
        ({"sparsity": 0.4, "depth_parts": 3}, "depth_parts needs"),
        ({"sparsity": 0.4, "allocation": "greedy", "depth_parts": 0}, "depth_parts must be"),
        ({"sparsity": 0.4, "samples": 0}, "samples"),
        ({"sparsity": 0.4, "samples": "many"}, "samples"),
        ({"sparsity": "half"}, "sparsity must be a number"),
        ({"sparsity": 0.4, "bogus": 1}, "unknown option bogus"),
    ],
)
def test_wrong_options_are_refused_before_any_work(model, tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        calibrate(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_loss_equals_a_softmax_and_selectors_are_put_back(tiny_model):
    window = list(range(50, 90))
    with Engine(tiny_model, EngineOptions(executor="reference", chunk=16)) as engine:
        (logits,) = engine.step([Work(engine.new_sequence(), window, "all")])
        rows = logits[:-1].astype(np.float64)
        expected = np.log(np.exp(rows).sum(axis=1)) - rows[np.arange(39), window[1:]]
        loss = measure_loss(engine, [window, window], None)
        assert loss.tokens == pytest.approx(np.tile(expected, 2), rel=1e-5)
        assert loss.ppl == pytest.approx(np.exp(expected.mean()), rel=1e-5)
        assert loss.rise_over(loss) == (0.0, 0.0)
        usage = measure_decode(engine, window, None, steps=8)
        assert usage.rows == 8
        assert engine.selector is None
        assert usage.bytes_per_token > 0


def test_many_rows_a_call_measure_what_decode_steps_would(tiny_model, tmp_path, tiny_folder):
    calibrate(tiny_folder, tmp_path / "out", sparsity=0.5, **SMALL)
    window = list(range(50, 90))
    with LLM(tmp_path / "out", executor="reference") as llm:
        engine = llm.engine
        loss = measure_loss(engine, [window], engine.selector)
        sequence = engine.new_sequence()
        rows = [engine.step([Work(sequence, [token], "last", sparse=True)])[0][0] for token in window]
        logits = np.array(rows[:-1], np.float64)
        expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(39), window[1:]]
        assert loss.tokens == pytest.approx(expected, rel=1e-5)
