"""`thinfer recover` from end to end on a tiny model: better, as sparse as before, and it loads anywhere."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from thinfer.cli.main import app
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.checkpoint import load_torch
from thinfer.pruning.quality import torch_perplexity
from thinfer.pruning.recipe import make_recipe
from thinfer.pruning.recovery import recover as module
from thinfer.pruning.recovery.options import RecoverOptions
from thinfer.pruning.recovery.recover import count_zeros, recover
from thinfer.pruning.recovery.session import Evaluation
from thinfer.pruning.recovery.state import STATE_NAME
from thinfer.pruning.run import prune
from thinfer.pruning.saving import save_folder
from thinfer.pruning.verify import verify
from tiny_llama import write_tiny_llama

SMALL = {"seqlen": 32, "batch": 2, "tokens": 20 * 64, "lr": 5e-3}
EVALUATION = Evaluation(ctx=32, windows=8)
QUICK = {"method": "magnitude", "evaluate": False}
FILES = {"recipe.yaml": "method: magnitude\n", "report.json": '{"method": "magnitude"}'}
FLAGS = ["--seqlen", "32", "--batch", "2", "--tokens", "640", "--lr", "5e-3", "--eval-ctx", "32", "--eval-windows", "4"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("dense") / "llama")


@pytest.fixture(scope="module")
def pruned(dense, tmp_path_factory):
    loaded = load_torch(dense)
    with torch.no_grad():
        for layer in loaded.model.model.layers:
            for linear in (layer.self_attn.q_proj, layer.mlp.gate_proj, layer.mlp.down_proj):
                linear.weight[linear.weight.abs() < linear.weight.abs().median()] = 0
    folder = tmp_path_factory.mktemp("pruned") / "model"
    save_folder(loaded.model, folder, source=loaded.checkpoint, files=FILES, dtype="bfloat16")
    return folder


def zeros(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: value == 0 for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("method", "loss"), [("masklora", "lm"), ("lora", "lm"), ("full", "lm"), ("masklora", "distill")]
)
def test_it_recovers_and_keeps_every_zero(pruned, dense, tmp_path, method, loss):
    """Failure row 10."""
    out = tmp_path / "out"
    options = RecoverOptions(method=method, loss=loss, **SMALL)
    report = recover(pruned, out, options, teacher=dense if loss == "distill" else None, evaluation=EVALUATION)
    if loss == "lm":
        assert report["after"]["ppl"] < 0.9 * report["before"]["ppl"]
    else:
        curve = [entry["loss"] for entry in report["training"]["curve"]]
        assert sum(curve[-4:]) < 0.9 * sum(curve[:4])
    assert report["sparsity_after"] == report["sparsity_before"] == count_zeros(load_torch(pruned).model) > 0.2
    before, after = zeros(pruned), zeros(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], mask) for name, mask in before.items() if mask.ndim > 1)
    assert json.loads((out / "report.json").read_text()) == report
    assert (out / "recipe.yaml").read_text() == FILES["recipe.yaml"]
    assert report["pruning"] == {"method": "magnitude"}
    assert f"{report['after']['ppl']:.3f}" in (out / "README.md").read_text()
    # What was measured is what was written, down to the rounding.
    loaded = load_torch(out)
    windows = EVALUATION.cut(loaded)
    assert torch_perplexity(loaded.model, windows, bos_id=loaded.bos_id).ppl == report["after"]["ppl"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_run_resumes_to_the_same_bits(pruned, tmp_path):
    options = RecoverOptions(method="masklora", **SMALL)
    recover(pruned, tmp_path / "whole", options, evaluation=EVALUATION)

    def interrupt(line):
        if line.startswith("step 7 "):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        recover(pruned, tmp_path / "parts", options, evaluation=EVALUATION, progress=interrupt)
    assert not (tmp_path / "parts").exists()
    assert (tmp_path / ".parts.training").is_dir()
    with pytest.raises(UsageError, match="has an unfinished run; --resume continues it"):
        recover(pruned, tmp_path / "parts", options, evaluation=EVALUATION)
    other = RecoverOptions(method="masklora", **SMALL | {"lr": 1e-3})
    with pytest.raises(UsageError, match="other options, text or weights"):
        recover(pruned, tmp_path / "parts", other, evaluation=EVALUATION, resume=True)
    recover(pruned, tmp_path / "parts", options, evaluation=EVALUATION, resume=True)
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


def test_a_refilled_zero_stops_before_anything_is_written(pruned, tmp_path, monkeypatch):
    """Failure row 10: were a merge ever to fill zeros, the check would find it."""
    monkeypatch.setattr(module, "hold", lambda model, masks: NoHold())
    with pytest.raises(CheckFailed, match="no longer zero; nothing was written"):
        recover(pruned, tmp_path / "out", RecoverOptions(method="full", **SMALL), evaluation=EVALUATION)
    assert not (tmp_path / "out").exists()


class NoHold:
    def __enter__(self):
        return lambda step: None

    def __exit__(self, *_):
        return None


def test_a_loss_that_is_not_finite_stops(pruned, tmp_path):
    """Failure row 18."""
    loaded = load_torch(pruned)
    with torch.no_grad():
        loaded.model.model.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    save_folder(loaded.model, tmp_path / "bad", source=loaded.checkpoint)
    with pytest.raises(CheckFailed):
        recover(tmp_path / "bad", tmp_path / "out", RecoverOptions(**SMALL), evaluation=EVALUATION)
    assert not (tmp_path / "out").exists()


def test_the_verb(pruned, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["recover", str(pruned), "-o", str(out), "--method", "full", *FLAGS])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((out / "report.json").read_text())
    assert report["tokens"] == 640
    assert f"perplexity {report['before']['ppl']:.3f} before" in result.stderr
    code = "import sys; from thinfer import LLM; print(LLM(sys.argv[1], threads=1).generate('ab').token_ids[:1])"
    ran = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "where to write? -o DIR2"),
        (["-o", "X", "--loss", "distill"], "--loss distill --teacher MODEL"),
        (["-o", "X", "--teacher", "Y"], "--loss distill --teacher MODEL"),
        (["-o", "X", "--batch", "4", "--micro-batch", "3"], "must be a multiple of micro-batch 3"),
        (["-o", "X", "--device", "nowhere"], "write cpu, cuda or cuda:1"),
        (["-o", "X", "--lr", "-1"], "learning rate -1: must be above 0"),
        (["-o", "X", "--device", "meta"], "write cpu, cuda or cuda:1"),
        (["-o", "X", "--warmup", "2"], "a fraction of the steps"),
        (["-o", "X", "--weight-decay", "nan"], "must be numbers from 0"),
        (["-o", "X", "--alpha", "nan"], "alpha nan must be a number above 0"),
        (["-o", "X", "--seed", str(2**63)], "seed 9223372036854775808: from 0"),
        (["-o", "X", "--loss", "distill", "--teacher", "Y", "--kl-weight", "nan"], "must be numbers from 0"),
        (["-o", "X", "--loss", "distill", "--teacher", "Y", "--kl-weight", "0", "--hidden-weight", "0"], "all weights"),
        (["-o", "/dev/null/x"], "choose another -o"),
    ],
)
def test_wrong_flags_fail_early(pruned, flags, message):
    result = CliRunner().invoke(app, ["recover", str(pruned), *flags])
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_unfinished_run_is_noticed_before_anything_is_loaded(tmp_path):
    (tmp_path / ".out.training").mkdir()
    (tmp_path / ".out.training" / STATE_NAME).touch()
    with pytest.raises(UsageError, match="--resume continues it"):
        recover("no such model", tmp_path / "out", RecoverOptions(**SMALL))


def test_a_rank_above_that_of_every_matrix_is_refused_and_leaves_nothing(pruned, tmp_path):
    with pytest.raises(UsageError, match="no matrix of this model has a rank above"):
        recover(pruned, tmp_path / "out", RecoverOptions(**SMALL, rank=100_000), evaluation=EVALUATION)
    assert not list(tmp_path.iterdir())


def test_the_result_can_be_verified_as_what_was_pruned_could(dense, tmp_path):
    prune(make_recipe({"model": str(dense), "pattern": "2:4", "target": ["*.mlp.*"], **QUICK}), tmp_path / "pruned")
    recover(tmp_path / "pruned", tmp_path / "out", RecoverOptions(**SMALL | {"tokens": 64}), evaluation=EVALUATION)
    before, after = verify(tmp_path / "pruned"), verify(tmp_path / "out")
    assert [check.name for check in after.tensors] == [check.name for check in before.tensors]
    assert (str(after.pattern), after.sparsity, after.problems) == ("2:4", 0.5, ())
