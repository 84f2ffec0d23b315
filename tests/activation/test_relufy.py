"""`thinfer relufy` from end to end on a tiny model: nearer to the dense one, resumable, and it loads anywhere."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from thinfer.activation import relufy as module
from thinfer.activation.generated_text import MixedBatches, write_windows
from thinfer.activation.learning_curve import LearningCurve
from thinfer.activation.relu_swap import read_relufied
from thinfer.activation.relufy import relufy
from thinfer.activation.relufy_options import RelufyOptions
from thinfer.cli.main import app
from thinfer.errors import ArtifactError, CheckFailed, ResourceError, UsageError
from thinfer.pruning import saving
from thinfer.pruning.checkpoint import load_torch
from thinfer.pruning.quality import torch_perplexity
from thinfer.pruning.recovery import state
from thinfer.pruning.recovery.language import TextBatches
from thinfer.pruning.recovery.session import Evaluation
from thinfer.pruning.recovery.state import STATE_NAME
from tiny_llama import write_tiny_llama

SMALL = {"seqlen": 32, "batch": 2, "tokens": 20 * 64, "lr": 3e-3, "refit": 0, "eval_points": 4}
EVALUATION = Evaluation(ctx=32, windows=8)
FLAGS = ["--seqlen", "32", "--batch", "2", "--tokens", "640", "--lr", "3e-3", "--refit", "4", "--eval-ctx", "32"]
FLAGS += ["--eval-windows", "4", "--eval-points", "2"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("dense") / "llama")


def options(**changes):
    return RelufyOptions(**SMALL | changes)


@pytest.mark.parametrize(
    "changes",
    [{"refit": 8}, {"lr": 1e-3}, {"progressive": True}, {"lora": True, "lr": 5e-3}, {"generated": 0.3, "train": "ffn"}],
    ids=["fitted", "at once", "progressive", "lora", "written text"],
)
def test_it_comes_nearer_to_the_dense_model(dense, tmp_path, changes):
    out = tmp_path / "out"
    report = relufy(dense, out, options(**changes), evaluation=EVALUATION)
    losses = [entry["loss"] for entry in report["training"]["curve"]]
    # Where the matrices were fitted to a few windows, or ReLU comes little by little, it begins near to the dense one.
    if not changes.keys() & {"progressive", "refit"}:
        assert sum(losses[-4:]) < 0.95 * sum(losses[:4])
    assert [point["step"] for point in report["curve"]] == [0, 5, 10, 15, 20]
    assert all(0.2 < share < 0.9 for share in report["after"]["sparsity_by_layer"])
    assert report["tokens_fitted_on"] == 32 * changes.get("refit", 0)
    assert len(report["fitted"]) == 2 * ("refit" in changes)
    assert all(error["after"] < error["before"] for error in report["fitted"])
    # What was measured is what was written.
    loaded = load_torch(out)
    assert loaded.model.config.hidden_act == "relu"
    ppl = torch_perplexity(loaded.model, EVALUATION.cut(loaded), bos_id=loaded.bos_id).ppl
    assert ppl == pytest.approx(report["after"]["ppl"], rel=1e-4)
    assert json.loads((out / "report.json").read_text()) == report
    assert f"{report['after']['ppl']:.3f}" in (out / "README.md").read_text()
    assert (out / "learning-curve.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_penalty_makes_more_zeros(dense, tmp_path):
    plain = relufy(dense, tmp_path / "a", options(loss="lm"), evaluation=EVALUATION)
    sparse = relufy(dense, tmp_path / "b", options(loss="lm", l1=5.0), evaluation=EVALUATION)
    assert sparse["after"]["sparsity"] > plain["after"]["sparsity"] + 0.02


def test_a_shift_is_kept_as_a_bias(dense, tmp_path):
    relufy(dense, tmp_path / "out", options(shift=0.2, tokens=64), evaluation=EVALUATION)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.mlp_bias
    assert model.model.layers[0].mlp.gate_proj.bias.mean().item() == pytest.approx(-0.2, abs=0.02)


def test_what_thinfer_cannot_run_is_said(dense, tmp_path):
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, vocab_size=load_torch(dense).model.vocab_size)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    for file in dense.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "gpt2")
    report = relufy(tmp_path / "gpt2", tmp_path / "out", options(tokens=64), evaluation=EVALUATION)
    assert report["notes"] == ["model type gpt2: transformers reads it, thinfer does not run it"]


def test_stage_2_from_stage_1_with_the_dense_teacher(dense, tmp_path):
    relufy(dense, tmp_path / "one", options(tokens=64), evaluation=EVALUATION)
    with pytest.raises(UsageError, match="has ReLU already; give the dense model"):
        relufy(tmp_path / "one", tmp_path / "two", options(), evaluation=EVALUATION)
    report = relufy(tmp_path / "one", tmp_path / "two", options(stage=2), teacher=dense, evaluation=EVALUATION)
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert (config["model_type"], config["norm_act"], config["hidden_act"]) == ("relufied_llama", "relu", "relu")
    model = read_relufied(tmp_path / "two")
    windows = EVALUATION.cut(load_torch(dense))
    bos = load_torch(dense).bos_id
    assert torch_perplexity(model, windows, bos_id=bos).ppl == pytest.approx(report["after"]["ppl"], rel=1e-4)
    with pytest.raises(ValueError, match="relufied_llama"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "two")


@pytest.mark.parametrize("changes", [{"refit": 8}, {"progressive": True}, {"generated": 0.5, "lora": True}])
def test_an_interrupted_run_resumes_to_the_same_bits(dense, tmp_path, changes):
    whole = relufy(dense, tmp_path / "whole", options(**changes), evaluation=EVALUATION)

    def interrupt(line):
        if line.startswith("step 7 "):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        relufy(dense, tmp_path / "parts", options(**changes), evaluation=EVALUATION, progress=interrupt)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(UsageError, match="unfinished run; --resume continues"):
        relufy(dense, tmp_path / "parts", options(**changes), evaluation=EVALUATION)
    with pytest.raises(UsageError, match="other options, text or weights"):
        relufy(dense, tmp_path / "parts", options(**changes | {"seed": 1}), evaluation=EVALUATION, resume=True)
    parts = relufy(dense, tmp_path / "parts", options(**changes), evaluation=EVALUATION, resume=True)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "parts/model.safetensors").read_bytes()
    assert parts["curve"] == whole["curve"]
    assert parts["fitted"] == whole["fitted"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


@pytest.mark.parametrize("changes", [{"hidden": 0.0}, {"loss": "lm"}])
def test_matrices_are_not_fitted_to_a_teacher_of_another_shape(dense, tmp_path, changes):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=load_torch(dense).model.config.vocab_size,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
    for file in dense.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "teacher")
    given = {"teacher": tmp_path / "teacher", "evaluation": EVALUATION}
    with pytest.raises(UsageError, match=r"the teacher has 3 layers of 32, the student 2 of 64; use --refit 0"):
        relufy(dense, tmp_path / "out", options(refit=4, **changes), **given)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    relufy(dense, tmp_path / "out", options(tokens=64, **changes), **given)


def test_a_loss_that_is_not_finite_leaves_nothing_or_names_the_state(dense, tmp_path):
    """Failure row 18."""
    wild = {"lr": 1e30, "refit": 4, "warmup": 0.0}
    with pytest.raises(CheckFailed, match=r"use a lower learning rate or a longer warm-up.*$"):
        relufy(dense, tmp_path / "out", options(**wild), evaluation=EVALUATION)
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckFailed, match=r"use a lower .* delete .*\.out\.training, the state before that, to start"):
        relufy(dense, tmp_path / "out", options(**wild, checkpoint_minutes=0), evaluation=EVALUATION)
    assert [path.name for path in tmp_path.iterdir()] == [".out.training"]


@pytest.mark.parametrize("place", ["fitted matrices", "state", "curve", "model"])
def test_a_full_disk_is_one_message_and_the_same_run_ends_later(dense, tmp_path, monkeypatch, place):
    small, out, states = options(refit=4, tokens=4 * 64), tmp_path / "out", tmp_path / ".out.training"

    def full(*args, **kwargs):
        raise SafetensorError("No space left on device")

    def no_room(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if place == "curve":
            patched.setattr(Path, "write_text", no_room)
        elif place == "model":
            patched.setattr(saving, "_save_model", full)
        else:
            patched.setattr(state, "save_file", full if place == "fitted matrices" else Second(full))
        with pytest.raises(ResourceError, match=r"No space left on device.*free some space"):
            relufy(dense, out, small, evaluation=EVALUATION)
    assert not out.exists()
    kept = {"state": {"refit.safetensors", "curve.json"}, "curve": {"refit.safetensors"}}
    kept["model"] = {"refit.safetensors", "curve.json", STATE_NAME, "learning-curve.png"}
    found = {path.name for path in states.iterdir()} if states.exists() else set()
    assert found == kept.get(place, set())
    report = relufy(dense, out, small, evaluation=EVALUATION, resume=True)
    assert report == json.loads((out / "report.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class Second:
    """Calls `save_file` once, and something else from then on."""

    def __init__(self, then):
        self.then, self.calls = then, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return (save_file if self.calls == 1 else self.then)(*args, **kwargs)


def test_a_folder_that_gives_something_else_never_appears(dense, tmp_path, monkeypatch):
    def other(folder):
        model = read_relufied(folder)
        torch.nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
        return model

    monkeypatch.setattr(module, "read_relufied", other)
    with pytest.raises(CheckFailed, match=r"does not give what was trained; nothing was written to .*out"):
        relufy(dense, tmp_path / "out", options(tokens=64), evaluation=EVALUATION)
    assert not (tmp_path / "out").exists()


def test_a_ramp_is_compiled_once_and_changes_nothing(dense, tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled(self, backend=backend))
    ramp = {"stage": 2, "progressive": True, "ramp": 1.0, "tokens": 6 * 64}
    plain = relufy(dense, tmp_path / "plain", options(**ramp), evaluation=EVALUATION)
    report = relufy(dense, tmp_path / "out", options(**ramp, compile=True), evaluation=EVALUATION)
    # Two of the teacher, two of the ramp, one of its end.
    assert 2 <= len(graphs) <= 6
    assert report["curve"] == plain["curve"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


def test_what_was_kept_is_for_one_run_and_damage_is_said(tmp_path):
    calls = []

    def make():
        calls.append(1)
        return {"x": torch.arange(3.0)}, [len(calls)]

    for key, facts in (("a", [1]), ("a", [1]), ("b", [2])):
        tensors, found = state.kept(tmp_path, "name", key, make)
        assert (tensors["x"].tolist(), found) == ([0, 1, 2], facts)
    path = tmp_path / "name.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match=f"delete {tmp_path} and start again"):
        state.kept(tmp_path, "name", "b", make)


def test_written_windows_begin_as_the_text_and_are_spread_evenly(dense):
    model = load_torch(dense).model
    text = TextBatches(torch.randint(4, 200, (10, 20), generator=torch.Generator().manual_seed(0)), 2, 0, "", "")
    written = write_windows(model, text, 3, seed=5)
    assert written.shape == (3, 20)
    one = TextBatches(text.windows, 1, 0, "", "")
    assert torch.equal(written[:, :8], torch.cat([one(n) for n in range(3)])[:, :8])
    assert torch.equal(written, write_windows(model, text, 3, seed=5))
    assert not torch.equal(written, write_windows(model, text, 3, seed=6))
    mixed = MixedBatches(text, written, 0.5)
    rows = torch.cat([mixed(number) for number in range(3)])
    assert torch.equal(rows[1::2], written)
    assert torch.equal(rows[::2], torch.cat([one(n) for n in range(3)]))
    assert torch.equal(MixedBatches(text, written, 0.0)(1), text(1))


def test_the_model_s_own_settings_do_not_bend_what_it_writes(dense, tmp_path):
    text = TextBatches(torch.randint(4, 200, (4, 40), generator=torch.Generator().manual_seed(0)), 1, 0, "", "")
    own = {"repetition_penalty": 1e6, "no_repeat_ngram_size": 1, "num_beams": 2, "temperature": 0.01}
    model = load_torch(write_tiny_llama(tmp_path / "same", generation=own)).model
    assert model.generation_config.repetition_penalty == 1e6
    assert torch.equal(write_windows(model, text, 2), write_windows(load_torch(dense).model, text, 2))
    assert model.generation_config.repetition_penalty == 1e6


def test_measuring_on_the_way_is_not_the_training_s_time(dense, tmp_path, monkeypatch):
    measured = module.Session.measure

    def slow(self, when, model=None):
        time.sleep(0.5 * when.startswith("at step"))
        return measured(self, when, model)

    monkeypatch.setattr(module.Session, "measure", slow)
    began = time.monotonic()
    report = relufy(dense, tmp_path / "out", options(tokens=4 * 64), evaluation=EVALUATION)
    assert len(report["curve"]) == 5
    assert report["training"]["seconds"] < time.monotonic() - began - 4 * 0.5
    assert report["tokens_per_second"] == pytest.approx(4 * 64 / report["training"]["seconds"])


def test_the_curve_survives_and_forgets_other_runs(tmp_path):
    curve = LearningCurve(tmp_path / "curve.json", "a")
    curve.add(4, {"ppl": 2.0})
    curve.add(2, {"ppl": 3.0})
    again = LearningCurve(tmp_path / "curve.json", "a")
    again.add(4, {"ppl": 1.0})
    assert again.points == [{"step": 2, "ppl": 3.0}, {"step": 4, "ppl": 1.0}]
    assert LearningCurve(tmp_path / "curve.json", "b").points == []
    (tmp_path / "curve.json").write_text("{")
    with pytest.raises(ArtifactError, match="delete it"):
        LearningCurve(tmp_path / "curve.json", "a")


def test_the_schedules():
    ramp = options(progressive=True)
    assert [ramp.relu_share(step) for step in (0, 4, 9, 19)] == [0.1, 0.5, 1.0, 1.0]
    assert options().relu_share(0) == 1
    l1 = options(l1=2.0)
    assert l1.penalty(9) == pytest.approx(1.0)
    assert l1.penalty(19) == pytest.approx(2.0)


def test_the_verb_and_the_engine(dense, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["relufy", str(dense), "-o", str(out), *FLAGS])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((out / "report.json").read_text())
    assert f"{report['after']['ppl']:.3f} after 640 tokens" in result.stderr
    code = "import sys; from thinfer import LLM; print(LLM(sys.argv[1], threads=1).generate('ab').token_ids[:1])"
    ran = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "where to write? -o DIR"),
        (["-o", "X", "--batch", "4", "--micro-batch", "3"], "must be a multiple of micro-batch 3"),
        (["-o", "X", "--device", "nowhere"], "write cpu, cuda or cuda:1"),
        (["-o", "X", "--ramp", "2"], "a fraction, from 0 to 1"),
        (["-o", "X", "--shift", "-1"], "must be numbers from 0"),
        (["-o", "X", "--progressive", "--refit", "4"], "--refit or --progressive"),
        (["-o", "/dev/null/x"], "choose another -o"),
        (["-o", "X", "--seqlen", "513"], "windows of 513 tokens: the model was made for 512; use --seqlen 512"),
        (["-o", "X", "--eval-ctx", "513"], "the model was made for 512; use --eval-ctx 512"),
    ],
)
def test_wrong_flags_fail_early(dense, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["relufy", str(dense), *flags])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())
