"""Every verb from end to end on a tiny model, with the executor that needs no native part."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from thinfer.cli.main import app
from tiny_llama import write_tiny_llama

PLAIN = ("--executor", "reference", "-t", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_llama(tmp_path_factory.mktemp("verbs") / "llama", context=1024))


@pytest.fixture(scope="module")
def sparse_folder(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("sparse") / "half"
    result = invoke(
        "calibrate", folder, "-o", str(out), "--sparsity", "0.5", "--samples", "2", "--executor", "reference"
    )
    assert result.exit_code == 0, result.stderr
    return str(out)


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), prog_name="thinfer", catch_exceptions=False)


def data(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_run(folder):
    arguments = ("run", "-m", folder, "-p", "abc", "-n", "8", "--temp", "0", "--ignore-eos", "-o", "json", *PLAIN)
    row = data(*arguments)
    assert set(row) == {"text", "token_ids", "prompt_tokens", "finish_reason", "timings"}
    assert len(row["token_ids"]) == 8
    assert row["prompt_tokens"] == 4, "three bytes and BOS"
    assert row["finish_reason"] == "length"
    assert data(*arguments)["token_ids"] == row["token_ids"]


def test_run_streams_the_same_text(folder):
    arguments = ("run", "-m", folder, "-p", "abc", "-n", "8", "--seed", "1", "--ignore-eos", *PLAIN)
    assert invoke(*arguments).stdout == data(*arguments, "-o", "json")["text"] + "\n"


def test_chat_without_a_template_says_how_to_pass_one(folder, tmp_path):
    bare = write_tiny_llama(tmp_path / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    result = invoke("run", "-m", str(bare), "-p", "abc", "--chat", *PLAIN)
    assert result.exit_code != 0
    assert "chat" in result.stderr.splitlines()[-1]
    assert "template" in result.stderr.splitlines()[-1]
    row = data("run", "-m", folder, "-p", "abc", "--chat", "-n", "2", "-o", "json", *PLAIN)
    assert row["prompt_tokens"] == 7, "<s> <|user|> a b c </s> <|assistant|>"


def test_bench(folder, sparse_folder):
    rows = data("bench", "-m", folder, "-m", sparse_folder, "-p", "20", "-n", "6", "-r", "2", "-o", "json", *PLAIN)
    assert [(row["model"], row["test"]) for row in rows] == [
        (folder, "pp20"),
        (sparse_folder, "pp20"),
        (folder, "tg6"),
        (sparse_folder, "tg6"),
    ]
    dense, sparse = rows[2:]
    assert (dense["sparsity"], sparse["sparsity"]) == (0.0, 0.5)
    assert dense["density"] == 1.0
    assert 0.2 < sparse["density"] < 0.8
    assert sparse["bytes_per_token"] <= dense["bytes_per_token"], "NumPy reads what it does not need"
    assert rows[1]["density"] == 1.0, "prompts stay dense"
    for row in rows:
        assert len(row["samples"]) == 2
        assert row["rss_bytes"] > 1 << 20
        assert row["n_params"] > 10_000


def test_bench_dense_on_request(sparse_folder):
    (row,) = data(
        "bench", "-m", sparse_folder, "-p", "0", "-n", "4", "-r", "1", "-o", "json", "--sparsity", "0", *PLAIN
    )
    assert (row["sparsity"], row["density"]) == (0.0, 1.0)


def test_bench_md(folder):
    result = invoke("bench", "-m", folder, "-p", "8", "-n", "0", "-r", "1", *PLAIN)
    assert result.stdout.startswith("| model ")
    assert "pp8" in result.stdout
    assert "sparsity" in result.stdout


def test_bench_against_a_folder_is_refused(folder):
    result = invoke("bench", "-m", folder, "-p", "8", "-n", "0", "--against", "llama.cpp", *PLAIN)
    assert result.exit_code == 2
    assert "GGUF" in result.stderr


def perplexity(*arguments):
    return data("eval", "perplexity", *arguments, "--ctx", "64", "--windows", "2", "-o", "json", *PLAIN)


def test_perplexity(folder, tmp_path):
    row = perplexity("-m", folder)
    assert set(row) == {"ppl", "ppl_stderr", "tokens", "ctx", "windows", "bos"}
    assert (row["tokens"], row["ctx"], row["windows"], row["bos"]) == (126, 64, 2, True)
    text = tmp_path / "crlf.txt"
    text.write_bytes(b"one\r\ntwo\r\n" * 30)
    with_crlf = perplexity("-m", folder, "-f", str(text))
    text.write_bytes(b"one\ntwo\n" * 30)
    assert perplexity("-m", folder, "-f", str(text)) == with_crlf


def test_perplexity_against_a_model(folder, sparse_folder):
    same = perplexity("-m", folder, "--kl-against", folder)
    assert same["kl_mean"] == pytest.approx(0, abs=1e-9)
    assert same["top1_agreement"] == 1.0
    dense = perplexity("-m", sparse_folder, "--kl-against", folder)
    assert dense["kl_mean"] == pytest.approx(0, abs=1e-9), "without --decode a prompt is dense"
    sparse = perplexity("-m", sparse_folder, "--kl-against", folder, "--decode")
    assert sparse["kl_mean"] > 1e-3
    assert perplexity("-m", sparse_folder, "--decode", "--sparsity", "0") == perplexity("-m", folder)


def test_perplexity_of_too_short_a_text(folder, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("short")
    result = invoke("eval", "perplexity", "-m", folder, "-f", str(text), *PLAIN)
    assert result.exit_code == 2
    assert "give a longer text" in result.stderr


def test_sparsity_zero_gives_the_dense_tokens(folder, sparse_folder):
    arguments = ("-p", "abc", "-n", "12", "--temp", "0", "--ignore-eos", "-o", "json", *PLAIN)
    dense = data("run", "-m", folder, *arguments)["token_ids"]
    assert data("run", "-m", sparse_folder, "--sparsity", "0", *arguments)["token_ids"] == dense


def test_calibrate_reports_json(sparse_folder, tmp_path):
    report = data(
        "calibrate",
        sparse_folder,
        "-o",
        str(tmp_path / "again"),
        "--method",
        "wina",
        "--sparsity",
        "0.3",
        "--samples",
        "2",
        "--executor",
        "reference",
    )
    assert report["ppl"] > 0
    assert set(report["rates"]) == {"qkv", "o", "gate_up", "down"}


def test_info_of_the_machine():
    machine = data("info", "-o", "json")["machine"]
    assert machine["threads"] >= 1
    assert machine["read_gb_s"] > 0
    assert "linear" in machine["kernels"]


def test_info_of_a_model(folder):
    model = data("info", folder, "-o", "json", *PLAIN)["model"]
    assert (model["type"], model["layers"], model["hidden"]) == ("llama", 2, 64)
    assert "model.layers.0.mlp.up_proj.weight" in [row["tensor"] for row in model["tensors"]]
    assert any("sparsity" in line for line in model["plan"])
    text = invoke("info", "-m", folder, *PLAIN).stdout
    assert "model.layers.0.mlp.up_proj.weight" in text


def test_an_unknown_instruction_set_is_a_usage_error(monkeypatch):
    pytest.importorskip("thinfer._core")
    monkeypatch.setenv("THINFER_ISA", "foo")
    result = invoke("info")
    assert result.exit_code == 2
    assert "'foo' is unknown" in result.stderr


def test_text_that_is_not_utf8_is_a_usage_error(folder, tmp_path):
    result = CliRunner().invoke(app, ["run", "-m", folder, "-q", *PLAIN], input=b"\xff\xfe", prog_name="thinfer")
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr
    template = tmp_path / "template.jinja"
    template.write_bytes(b"\xff")
    result = invoke("run", "-m", folder, "-p", "a", "--chat", "--chat-template", str(template), *PLAIN)
    assert result.exit_code == 2
    assert "not UTF-8 at byte 0" in result.stderr


def test_closed_standard_streams_are_no_crash(folder):
    for closed in ("<&-", ">&-"):
        words = [sys.executable, "-m", "thinfer", "run", folder, "-q", "-n", "2", *PLAIN]
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *words], capture_output=True, text=True, check=False
        )
        assert "internal error" not in done.stderr
        assert "Traceback" not in done.stderr


def test_calibrate_refuses_a_file_as_its_folder_at_once(folder, tmp_path):
    (tmp_path / "file").touch()
    result = invoke("calibrate", folder, "-o", str(tmp_path / "file"), "--sparsity", "0.4", *PLAIN)
    assert result.exit_code == 2
    assert "a file, not a folder" in result.stderr


def test_too_many_threads_are_a_usage_error(folder):
    assert invoke("run", "-m", folder, "-p", "a", "-t", "5000").exit_code == 2
