"""The script that trains the project's own model: it resumes to the same bits, and both folders load and run."""

import importlib.util
import json
import math
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from thinfer.data import calibration_text
from thinfer.pruning.checkpoint import load_torch
from thinfer.pruning.quality import torch_perplexity

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_relu_model.py"
TINY = ["--steps", "16", "--batch", "4", "--length", "32", "--hidden", "32", "--neurons", "64", "--layers", "2"]
TINY += [
    "--heads",
    "2",
    "--kv-heads",
    "1",
    "--eval-points",
    "4",
    "--eval-windows",
    "8",
    "--threads",
    "1",
    "--lr",
    "1e-2",
]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_relu_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    paths = [folder / f"{number}.txt" for number in range(60)]
    for number, path in enumerate(paths):
        path.write_text(calibration_text()[number * 500 : (number + 1) * 500], encoding="utf-8")
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def trained(script, text, tmp_path_factory):
    threads = torch.get_num_threads()
    out = tmp_path_factory.mktemp("own")
    assert script.main(["-o", str(out), *TINY, "--text", *text]) == 0
    torch.set_num_threads(threads)
    return out


def test_both_twins_learn_and_are_measured(trained):
    for activation, share in (("relu", True), ("silu", False)):
        report = json.loads((trained / activation / "report.json").read_text())
        bits = [point["bits_per_byte"] for point in report["curve"]]
        assert [point["step"] for point in report["curve"]] == [4, 8, 12, 16]
        assert bits[-1] < bits[0] < 9
        assert all((zeros > 0.1) is share for zeros in report["after"]["sparsity"])
        assert (trained / activation / "learning-curve.png").is_file()
        assert f"{report['after']['bits_per_byte']:.4f}" in (trained / activation / "README.md").read_text()
    starts = [
        json.loads((trained / name / "report.json").read_text())["training"][0]["loss"] for name in ("relu", "silu")
    ]
    assert starts[0] == pytest.approx(starts[1], rel=0.1)


def test_an_interrupted_run_continues_to_the_same_bits(script, text, trained, tmp_path, monkeypatch):
    say = script.say

    def interrupt(line):
        say(line)
        if line.startswith("relu: step 7 "):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(script, "say", interrupt)
    arguments = ["-o", str(tmp_path), *TINY, "--verbose", "--text", *text]
    assert script.main(arguments) == 130
    assert not (tmp_path / "relu").exists()
    assert script.main(arguments) == 0
    for name in ("relu", "silu"):
        whole, parts = ((folder / name / "model.safetensors").read_bytes() for folder in (trained, tmp_path))
        assert whole == parts
    assert script.main(arguments) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["relu", "silu"]


def test_tokens_are_bytes_and_the_engine_agrees(trained):
    from thinfer import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(trained / "relu")
    text = "def f(x):\n\treturn 'naïve' # 'δ'\n"
    assert tokenizer(text)["input_ids"] == [256, *text.encode()]
    assert tokenizer.decode(list(text.encode())) == text
    loaded = load_torch(trained / "relu")
    assert loaded.encode(text) == list(text.encode())
    assert loaded.bos_id == 256
    assert AutoModelForCausalLM.from_pretrained(trained / "relu").config.hidden_act == "relu"
    llm = LLM(str(trained / "relu"), threads=1)
    assert llm.tokenizer.encode(text, add_special=False) == list(text.encode())
    assert len(llm.generate("import ", SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4


def test_bits_per_byte_are_the_logarithm_of_the_perplexity(script, text, trained):
    data = script.corpus([Path(path) for path in text], 32, 4, 0, 8)
    loaded = load_torch(trained / "relu")
    report = json.loads((trained / "relu" / "report.json").read_text())
    ppl = torch_perplexity(loaded.model, data.held_out, bos_id=256).ppl
    assert math.log2(ppl) == pytest.approx(report["after"]["bits_per_byte"], rel=1e-4)
    assert all(len(window) == 31 for window in data.held_out)
    learnt = {bytes(window[1:].tolist()) for window in data.batches.windows if int(window[1:].max()) < 256}
    assert not learnt & {bytes(window) for window in data.held_out}
    assert data.facts["bytes"] > 5 * data.facts["held_out_bytes"] > 0


def test_what_cannot_work_is_one_line(script, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("ab")
    assert script.main(["-o", str(tmp_path / "out"), *TINY, "--text", str(short)]) != 0
    assert "error: the text has too few files" in capsys.readouterr().err


def test_a_finished_model_of_other_settings_is_not_taken_for_this_one(script, text, trained, capsys):
    before = (trained / "relu" / "report.json").read_bytes()
    assert script.main(["-o", str(trained), *TINY, "--l1", "0.7", "--text", *text]) == 2
    assert "relu: was trained with other settings or text; choose another -o" in capsys.readouterr().err
    assert (trained / "relu" / "report.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "no such file"], "error: --text no such file: No such file or directory"),
        (["--lr", "nan"], "error: learning rate nan"),
        (["--length", "1"], "error: --length 1: windows hold a begin token and two bytes at least; use 3 or more"),
        (["--steps", "0"], "--steps: 0 is less than 1"),
        (["-o", "/dev/null/x"], "error: /dev/null/x: cannot be written"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_without_a_traceback(
    script, text, tmp_path, capsys, arguments, message
):
    try:
        code = script.main(["-o", str(tmp_path / "out"), *TINY, "--text", *text, *arguments])
    except SystemExit as exit_:  # argparse
        code = exit_.code
    assert code != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "relu").exists()


def test_the_default_has_the_size_that_the_docstring_says(script):
    model = script.Shape().make("relu", 256, 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_296_064
