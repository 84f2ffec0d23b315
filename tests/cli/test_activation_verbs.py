"""profile, contextual and predict train from the command line, on a tiny model with a ReLU."""

import json

import pytest
from typer.testing import CliRunner

from activation.relu_llama import write_predictable
from thinfer.cli.main import app
from thinfer.cli.predict import numbers
from thinfer.errors import UsageError

TEXT = " ".join(f"The prince bowed {i} times to lady {i * 7 % 31}, who smiled at room {i * i % 97}." for i in range(60))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_predictable(tmp_path_factory.mktemp("verbs") / "model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), prog_name="thinfer", catch_exceptions=False)


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        (("profile", "-o", "out"), "--seqlen"),
        (("predict", "train", "-o", "out"), "--seqlen"),
        (("calibrate", "-o", "out", "--sparsity", "0.4"), "--seqlen"),
        (("contextual",), "-c"),
    ],
)
def test_windows_longer_than_the_context_are_refused(model, tmp_path, monkeypatch, verb, option):
    monkeypatch.chdir(tmp_path)
    result = invoke(*verb, "-m", model, option, "513")
    assert result.exit_code == 2
    assert f"windows of 513 tokens: the model was made for 512; use {option} 512 or less" in result.stderr
    assert not list(tmp_path.iterdir())


def test_profile_writes_pictures_and_prints_json(model, text, tmp_path):
    pytest.importorskip("matplotlib")
    out = str(tmp_path / "out")
    result = invoke(
        *("profile", model, "-o", out, "--text", text, "--tokens", "256", "--seqlen", "64", "--plot"),
        *("--executor", "reference"),
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["tokens"] == 240
    assert "power-law.png" in result.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "power-law.png",
        "sparsity.png",
        "thinfer.json",
        "thinfer.safetensors",
        "union.png",
    ]


def test_contextual_prints_a_row_for_each_kind_and_share(model, text):
    small = ("-f", text, "-c", "64", "--windows", "1", "--keep", "0.5,0.25")
    result = invoke("contextual", model, *small, "-o", "json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)["rows"]) == 6
    table = invoke("contextual", "-m", model, *small, "--what", "heads").stdout.splitlines()
    assert [line.split()[0] for line in table[2:]] == ["heads", "heads"]


def test_predict_train_reports_and_says_what_counts(model, text, tmp_path):
    pytest.importorskip("torch")
    result = invoke(
        *("predict", "train", model, "-o", str(tmp_path / "out"), "--text", text, "--tokens", "1024"),
        *("--held-out", "256", "--seqlen", "64", "--epochs", "1", "--layers", "1", "--executor", "reference"),
    )
    assert result.exit_code == 0, result.stderr
    assert [row["layer"] for row in json.loads(result.stdout)["predictors"]] == [1]
    assert "neurons 1" in result.stderr
    assert "left out" not in result.stderr


def test_predict_train_says_what_the_budget_leaves_out(model, text, tmp_path):
    pytest.importorskip("torch")
    small = ("--text", text, "--tokens", "256", "--held-out", "64", "--seqlen", "64", "--epochs", "1")
    place = ("predict", "train", model, "-o", str(tmp_path / "out"))
    result = invoke(*place, *small, "--executor", "reference")
    assert result.exit_code == 0, result.stderr
    assert [row["layer"] for row in json.loads(result.stdout)["left_out"]] == [1]
    assert "left out: 1 of 2, which the budget of 10.0% does not hold; --budget 0.11 holds all" in result.stderr
    result = invoke(*place, *small, "--executor", "reference", "--budget", "0.01")
    assert result.exit_code == 2
    assert "a budget of 1.0% of the model's parameters holds no predictor" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile",), "which model"),
        (("profile", "x"), "-o DIR"),
        (("contextual", "x", "--keep", "half"), "--keep half"),
        (("contextual", "x", "--what", "tails"), "choose from heads"),
        (("predict", "train", "x"), "-o DIR"),
        (("predict", "train", "x", "-o", "y", "--layers", "a-b"), "--layers a-b"),
        (("predict", "train", "x", "-o", "y", "--layers", "5-3"), "--layers 5-3: write numbers and ranges"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_layers_are_numbers_and_ranges():
    assert numbers("0,4-6, 9") == [0, 4, 5, 6, 9]
    with pytest.raises(UsageError):
        numbers("")
