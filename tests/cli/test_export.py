"""`thinfer export` from the command to a file that `thinfer run` runs."""

import json

import pytest
from typer.testing import CliRunner

from thinfer.cli.main import app
from tiny_llama import write_tiny_llama


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), prog_name="thinfer", catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny llama whose tokenizer has one merge: GGUF has no vocabulary without any."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("export") / "llama")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["th"] = vocab.pop("Z")
    content["model"]["merges"] = [["t", "h"]]
    file.write_text(json.dumps(content))
    return folder


def test_export_and_run(folder, tmp_path):
    out = tmp_path / "tiny.gguf"
    done = invoke("export", str(folder), "-o", str(out), "--type", "f32")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["type"], report["architecture"], report["zeros_lost"]) == ("f32", "llama", 0)
    assert report["bytes"] == out.stat().st_size
    assert f"thinfer run -m {out}" in done.stderr
    answers = [
        json.loads(
            invoke("run", "-m", str(model), "-p", "the", "-n", "6", "--temp", "0", "-o", "json", "-t", "1",
                   "--executor", "reference", "--ignore-eos").stdout
        )["token_ids"]
        for model in (folder, out)
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6


def test_wrong_use_is_one_line_and_a_code(folder, tmp_path):
    out = tmp_path / "m.gguf"
    cases = [
        (("export",), 2, "which model"),
        (("export", str(folder)), 2, "where to write? -o FILE.gguf"),
        (("export", str(folder), "more", "-o", str(out)), 2, "unexpected argument 'more'"),
        (("export", str(folder), "-o", str(tmp_path / "m.bin")), 2, "ending in .gguf"),
        (("export", str(tmp_path), "-o", str(out)), 4, "neither config.json nor a .gguf file"),
    ]
    for arguments, code, message in cases:
        done = invoke(*arguments)
        assert done.exit_code == code, (arguments, done.stderr)
        assert message in done.stderr
        assert done.stdout == ""
    assert not out.exists()
