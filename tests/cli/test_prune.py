"""``thinfer prune``: flags are the recipe's rows, results and messages, exit codes."""

import dataclasses
import json
import signal
import subprocess
import sys
import time

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from thinfer.cli.main import app
from thinfer.pruning.recipe import Recipe, make_recipe
from thinfer.pruning.run import partial_folder
from tiny_llama import write_tiny_llama

QUICK = ("--samples", "4", "--seqlen", "64", "--eval-ctx", "64", "--eval-windows", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("prune") / "dense"))


def invoke(*arguments):
    return CliRunner().invoke(app, ["prune", *map(str, arguments)], prog_name="thinfer", catch_exceptions=False)


def refused(code, *arguments):
    result = invoke(*arguments)
    assert result.exit_code == code, result.stderr
    return result.stderr


def test_prune_and_verify(folder, tmp_path):
    out = tmp_path / "out"
    result = invoke(folder, "-o", out, "--pattern", "2:4", "--refine", "dsnot", *QUICK)
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["sparsity"] == 0.5
    assert "matrices" not in summary
    assert "thinfer prune verify" in result.stderr
    checked = invoke("verify", out, "-o", "json")
    assert checked.exit_code == 0
    found = json.loads(checked.stdout)
    assert set(found) == {"tensors", "sparsity", "pattern"}
    assert (found["sparsity"], found["pattern"]) == (0.5, "2:4")
    assert all(set(row) == {"name", "shape", "sparsity", "pattern_ok"} for row in found["tensors"])
    assert "14 matrices, 50.0000% zeros, pattern 2:4" in invoke("verify", out).stdout


def test_a_check_that_fails_has_its_exit_code(folder):
    result = invoke("verify", folder, "--pattern", "2:4", "-o", "json")
    assert result.exit_code == 3
    assert "does not follow 2:4 (and 13 more)" in result.stderr
    assert json.loads(result.stdout)["tensors"][0]["pattern_ok"] is False


def test_every_row_of_the_table_is_a_flag_and_no_other(folder, tmp_path):
    command = get_command(app).commands["prune"].commands["model"]
    flags = {option.name for option in command.params}
    rows = {row.name for row in dataclasses.fields(Recipe)}
    assert flags - rows == {"arguments", "out", "recipe", "dry_run", "quiet"}
    assert rows <= flags
    help_text = " ".join(invoke("--help").stdout.split())
    assert "--true-sequential / --no-true-sequential" in help_text
    assert "[default: wanda]" in help_text
    assert invoke().stdout.split() == invoke("--help").stdout.split()


def test_a_recipe_file_and_flags(folder, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {folder}\nmethod: magnitude\nsparsity: 0.5\nset: {{scope: row}}\nevaluate: false\n")
    result = invoke("--recipe", recipe, "-o", tmp_path / "out", "--sparsity", "0.25", "-q")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    summary = json.loads(result.stdout)
    assert (summary["sparsity"], summary["method"]) == (0.25, {"name": "magnitude", "scope": "row"})
    assert make_recipe({}, tmp_path / "out" / "recipe.yaml").to_dict() == summary["recipe"]


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ("-o", "x", "--sparsity", "0.5"), "which model?"),
        (2, ("MODEL", "--sparsity", "0.5"), "where to write?"),
        (2, ("MODEL", "-o", "x"), "how much to prune?"),
        (2, ("MODEL", "-o", "x", "--sparsity", "0.5", "--method", "wnada"), "no pruning method named 'wnada'"),
        (2, ("MODEL", "-o", "x", "--sparsity", "0.5", "--target", "nothing"), "matches no matrix"),
        (2, ("MODEL", "-o", "x", "--sparsity", "0.5", "--set", "block"), "write option=value"),
        (2, ("MODEL", "-o", "x", "--sparsity", "0.5", "--set", "blok=1"), "no option blok"),
        (2, ("MODEL", "-o", "x", "--sparsity", "0.5", "--device", "tpu9"), "write cpu, cuda"),
        (2, ("MODEL", "--dry-run", "--sparsity", "0.5", "--device", "tpu9"), "write cpu, cuda"),
        (2, ("MODEL", "more", "-o", "x", "--sparsity", "0.5"), "unexpected argument 'more'"),
        (2, ("MODEL", "-o", "MODEL", "--sparsity", "0.5"), "exists already"),
        (4, ("no/such/model/at/all", "-o", "x", "--sparsity", "0.5"), "no such file"),
    ],
)
def test_mistakes_are_one_line_and_a_code(folder, tmp_path, monkeypatch, code, arguments, message):
    monkeypatch.chdir(tmp_path)
    stderr = refused(code, *(folder if argument == "MODEL" else argument for argument in arguments))
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_may_be_named_as_the_hidden_verb(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(folder)
    result = invoke("model", "-o", "out", "--sparsity", "0.5", "--method", "magnitude", "--no-evaluate", "-q")
    assert result.exit_code == 0, result.stderr


def test_dry_run_writes_nothing(folder, tmp_path):
    result = invoke(folder, "--dry-run", "--sparsity", "0.5", *QUICK)
    assert result.exit_code == 0, result.stderr
    predicted = json.loads(result.stdout)
    assert {"seconds", "memory_bytes", "size_bytes"} <= set(predicted)
    assert predicted["seconds"]["total"] == pytest.approx(sum(predicted["seconds"].values()) / 2, abs=0.01)


def test_methods_are_listed_with_their_options():
    rows = {row["name"]: row for row in json.loads(invoke("methods", "-o", "json").stdout)}
    assert {"magnitude", "wanda", "ria", "sparsegpt", "alps", "owl", "alpha", "sparseswaps", "dsnot", "flap"} <= set(
        rows
    )
    assert rows["sparsegpt"]["block"] == 128
    assert rows["owl"]["kind"] == "allocation"


def test_without_pytorch_the_message_says_what_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    stderr = refused(2, folder, "-o", tmp_path / "out", "--sparsity", "0.5")
    assert "pruning needs PyTorch and transformers: pip install 'thinfer[prune]'" in stderr
    # Counting zeros needs neither.
    assert invoke("verify", folder).exit_code == 0


def test_help_of_the_program_loads_no_pytorch():
    code = (
        "import sys\nfrom thinfer.cli.main import app\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pydantic', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SLOW = """
import sys, time
from thinfer.pruning import pipeline
whole = pipeline._Run._prune_block
def slow(self, block, *rest):
    if block.index == 1:
        print("second block", flush=True)
        time.sleep(60)
    return whole(self, block, *rest)
pipeline._Run._prune_block = slow
from thinfer.cli.main import main
main()
"""


def test_ctrl_c_keeps_finished_blocks_and_the_same_command_resumes(folder, tmp_path):
    command = ["prune", folder, "-o", str(tmp_path / "out"), "--sparsity", "0.5", "--no-evaluate", *QUICK[:4]]
    # Standard shells start background jobs with SIGINT ignored, and Python then leaves it so.
    started = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + SLOW
    process = subprocess.Popen(
        [sys.executable, "-c", started, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "second block\n", process.stderr.read()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert "finished blocks are kept" in stderr
    assert not (tmp_path / "out").exists()
    assert partial_folder(tmp_path / "out").is_dir()
    result = invoke(*command[1:])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["resumed_blocks"] == 1
    assert not partial_folder(tmp_path / "out").exists()
