"""Predictors of a model whose gates have low rank: recall on held-out text, artifact, quality, stale weights."""

import json
import tempfile
from dataclasses import replace

import numpy as np
import pytest

from activation.relu_llama import write_broken, write_predictable, write_relu
from thinfer.activation.masked_run import WindowRunner
from thinfer.activation.predictor import PredictOptions, train_predictors
from thinfer.core.artifact import Artifact
from thinfer.core.predictor import selector_of
from thinfer.engine.llm import LLM
from thinfer.engine.predictors import PredictedSets, Scorer, load_predictors
from thinfer.errors import ArtifactError, CheckFailed, UsageError
from tiny_llama import write_tiny_llama

pytest.importorskip("torch")
TEXT = " ".join(f"The prince bowed {i} times to lady {i * 7 % 31}, who smiled at room {i * i % 97}." for i in range(80))
SIZES = {"tokens": 1536, "held_out": 512, "seq_len": 64, "epochs": 2}
# The smallest predictors of both layers take 11 % of so small a model.
SMALL = {"executor": "reference", "text": TEXT, "budget": 0.2, **SIZES}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_predictable(tmp_path_factory.mktemp("predict") / "model")


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("predictors") / "out"
    return out, train_predictors(model, out, **SMALL)


def test_predictors_of_low_rank_gates_count(model, trained):
    out, report = trained
    assert report["all_count"]
    assert report["left_out"] == []
    assert [row["layer"] for row in report["predictors"]] == [0, 1]
    for row in report["predictors"]:
        assert row["recall"] >= 0.95
        assert row["density"] <= 1.5 * row["true_density"]
        assert 0 < row["precision"] <= 1
        assert row["bytes"] > 0
    assert report["quality"]["predictors"] == 2
    assert 0 < report["quality"]["kl_mean"] < 1
    document = json.loads((out / "thinfer.json").read_text())
    assert document["sections"]["predictors"]["report"] == json.loads(json.dumps(report))


def test_recall_and_density_are_those_of_the_stored_predictor(model, trained):
    """On other text of the kind it was trained on, run here token by token from what the model reads and makes."""
    out, _ = trained
    with LLM(model, executor="reference", sparsity=False) as llm:
        predictors = load_predictors(out, llm.engine.model.checkpoint.fingerprint())
        seen = {}
        window = llm.encode("The prince bowed 93 times to lady 11, who smiled at room 5. ")
        WindowRunner(llm.engine.model, len(window)).run(window, observe=lambda site, x: seen.update({site: x.copy()}))
    for predictor in predictors:
        needed = Scorer(predictor.scorer).needed(seen[predictor.source])
        fired = seen[predictor.aim] != 0
        assert (needed & fired).sum() / fired.sum() > 0.9
        assert needed.mean() < 1.7 * fired.mean()


def test_predictions_act_at_the_aim_and_leave_sinks_alone(model, trained):
    out, _ = trained
    with LLM(model, executor="reference", sparsity=False) as llm:
        predictors = load_predictors(out, llm.engine.model.checkpoint.fingerprint())
        runner = WindowRunner(llm.engine.model, 40)

        def sets(chosen):
            return PredictedSets(selector_of(chosen), llm.engine.graph)

        window = llm.encode("The prince bowed 93 times to lady 11.")[:40]
        dense = runner.run(window)
        assert (runner.run(window, sets(predictors))[:4] == dense[:4]).all()
        # A threshold below all scores names every neuron: exactly the dense result; one above all names none.
        everything = [replace(p, threshold=-1e30) for p in predictors]
        assert (runner.run(window, sets(everything)) == dense).all()
        nothing = [replace(p, threshold=1e30) for p in predictors]
        assert not np.allclose(runner.run(window, sets(nothing))[4:], dense[4:])


def test_nan_leaves_nothing_out(model, trained):
    out, _ = trained
    with LLM(model, executor="reference", sparsity=False) as llm:
        predictor = load_predictors(out, llm.engine.model.checkpoint.fingerprint())[0]
    assert Scorer(predictor.scorer).needed(np.full((1, predictor.inputs), np.nan, np.float32)).all()


def test_stale_and_missing_predictors_are_refused(model, trained, tmp_path):
    out, _ = trained
    with pytest.raises(ArtifactError, match="stale"):
        load_predictors(out, "0" * 64)
    Artifact("model", "0" * 64).save(tmp_path)
    with pytest.raises(ArtifactError, match="thinfer predict train"):
        load_predictors(tmp_path, "0" * 64)


def test_training_repeats_to_the_byte(model, trained, tmp_path):
    out, _ = trained
    train_predictors(model, tmp_path / "again", **SMALL)
    assert (tmp_path / "again/thinfer.safetensors").read_bytes() == (out / "thinfer.safetensors").read_bytes()


def test_heads_mlps_lookahead_and_4_bits(model, tmp_path):
    options = {**SMALL, "targets": ("neurons", "heads"), "kind": "mlp", "lookahead": 1, "bits": 4, "budget": 0.3}
    report = train_predictors(model, tmp_path / "out", **options)
    rows = {(row["target"], row["layer"]): row for row in report["predictors"]}
    assert rows["neurons", 0]["source"] == "layers.0.gate_up"
    assert rows["neurons", 1]["source"] == "layers.0.gate_up"
    assert rows["heads", 1]["source"] == "layers.0.qkv"
    assert rows["heads", 1]["aim"] == "layers.1.o"
    assert rows["heads", 1]["true_density"] == 0.5
    assert {row["type"] for row in report["predictors"]} == {"Q4_0"}
    for row in report["predictors"]:
        assert row["recall"] > 0.9


def test_more_training_is_never_worse_than_the_start(model, tmp_path):
    from thinfer.activation.predictor_training import Data, FitOptions, Start, fit, threshold_for

    rng = np.random.default_rng(0)
    x = rng.standard_normal((800, 64)).astype(np.float32)
    y = x @ rng.standard_normal((64, 48)).astype(np.float32) > 4
    start = Start(x[:600], y[:600])
    data = Data(x[:600], y[:600], x[600:], y[600:])

    def density(epochs):
        fitted = fit(data, start, 32, FitOptions("lowrank", 0.95, epochs, 64, 5e-3, "cpu", 0))
        scores = x[600:] @ fitted.first.T @ fitted.second.T + fitted.bias
        return (scores > threshold_for(scores, y[600:], 0.95)).mean()

    assert density(6) <= density(1) + 1e-9


def test_a_start_of_full_rank_is_the_gate_itself():
    from thinfer.activation.predictor_training import Start

    rng = np.random.default_rng(0)
    x = (rng.standard_normal((500, 64)) * rng.uniform(0.1, 3, 64) + 0.3).astype(np.float32)
    gate = rng.standard_normal((40, 64)).astype(np.float32)
    start = Start(x, x @ gate.T > 0, (x, gate))
    for kind, rank in (("lowrank", 64), ("mlp", 128)):
        first, second, bias = start.of_rank(rank, kind)
        hidden = x @ (first @ start.whiten).T
        scores = (np.maximum(hidden, 0) if kind == "mlp" else hidden) @ second.T + bias
        wrong = (scores > 0) != (x @ gate.T > 0)
        assert wrong.mean() < 0.02


def test_stock_models_are_refused_unless_a_share_is_named(tmp_path):
    silu = write_tiny_llama(tmp_path / "silu")
    with pytest.raises(UsageError, match="--label-share"):
        train_predictors(silu, tmp_path / "out", **SMALL)
    assert not (tmp_path / "out").exists()
    report = train_predictors(silu, tmp_path / "out", **SMALL, label_share=0.3, layers=[1])
    assert [row["layer"] for row in report["predictors"]] == [1]
    assert report["predictors"][0]["true_density"] == pytest.approx(0.3, abs=0.01)


def test_random_gates_get_predictors_that_say_whether_they_count(tmp_path):
    report = train_predictors(write_relu(tmp_path / "m"), tmp_path / "out", **SMALL)
    for row in report["predictors"]:
        assert row["counts"] == (row["recall"] >= 0.95 and row["density"] <= 1.5 * row["true_density"])
        assert row["tried"]


def test_a_layer_that_the_budget_does_not_hold_gets_none(model, tmp_path):
    report = train_predictors(model, tmp_path / "out", **SMALL | {"budget": 0.1})
    assert [row["layer"] for row in report["predictors"]] == [0]
    assert report["left_out"] == [{"target": "neurons", "layer": 1, "parameters": 32 * (64 + 96) + 96}]
    assert report["budget_for_all"] == 0.11
    assert report["parameters_share"] <= 0.1
    assert report["parameters_share"] <= report["options"]["budget"]
    assert report["all_count"]
    with LLM(model, executor="reference", sparsity=False) as llm:
        stored = load_predictors(tmp_path / "out", llm.engine.model.checkpoint.fingerprint())
    assert [each.layer for each in stored] == [0]


def test_a_budget_that_holds_nothing_is_refused_before_anything_runs(model, tmp_path):
    told = []
    with pytest.raises(UsageError, match=r"5\.0%.* the smallest takes 5\.5%; --budget 0\.11 holds"):
        train_predictors(model, tmp_path / "out", progress=told.append, **SMALL | {"budget": 0.05})
    assert not told
    assert not (tmp_path / "out").exists()


def test_recording_leaves_no_name_on_the_disk(model, tmp_path, monkeypatch):
    """So that nothing stays behind when the process is killed."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    told = []

    def progress(line):
        told.append(line)
        assert not list(scratch.iterdir())

    train_predictors(model, tmp_path / "out", progress=progress, **SMALL | {"epochs": 1, "layers": [0]})
    assert sum("recording" in line for line in told) > 2
    assert sum("training" in line for line in told) == 1
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("toes",)}, "choose from neurons, heads"),
        ({"targets": ("heads", "heads")}, "each once"),
        ({"layers": []}, "no layer is named"),
        ({"kind": "magic"}, "lowrank, mlp"),
        ({"lookahead": 2}, "0 .* or 1"),
        ({"bits": 3}, "8 or 4"),
        ({"recall": 1.5}, "recall must lie"),
        ({"label_share": 0}, "label_share must lie"),
        ({"epochs": 0}, "epochs must be"),
        ({"seq_len": 5, "sink_tokens": 4}, "seq_len"),
        ({"seq_len": 8, "sink_tokens": 7}, "past 7 sinks"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        PredictOptions(**options)


def test_layers_and_devices_that_are_not_there(model, tmp_path):
    with pytest.raises(UsageError, match="layers 0 to 1"):
        train_predictors(model, tmp_path / "out", **SMALL, layers=[2])
    with pytest.raises(UsageError, match="--device cpu"):
        train_predictors(model, tmp_path / "out", **SMALL, device="cuda:99")


@pytest.mark.parametrize("targets", [("neurons",), ("heads",)])
def test_broken_weights_are_one_message_and_nothing_is_written(tmp_path, targets):
    model = write_broken(tmp_path / "model", write_predictable)
    with pytest.raises(CheckFailed, match=r"is NaN: the model's weights are broken; fetch or make the model again"):
        train_predictors(model, tmp_path / "out", targets=targets, **SMALL)
    assert not (tmp_path / "out").exists()
