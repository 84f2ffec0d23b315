"""The small ReLU model of this repository on real text: its zeros, its quality, skipping, predictors end to end."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from thinfer import LLM, SamplingParams
from thinfer.activation.predictor import train_predictors
from thinfer.activation.profile import profile
from thinfer.calibration.text import cut_windows
from thinfer.evals.perplexity import perplexity

pytest.importorskip("thinfer._core")
MODEL = Path(__file__).parents[2] / "models" / "relu-bytes-3m"
MODULES = ("textwrap.py", "heapq.py", "json/decoder.py", "argparse.py", "tarfile.py")


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """What it was trained on: Python's standard library, of the Python that runs this."""
    library = Path(sysconfig.get_paths()["stdlib"])
    path = tmp_path_factory.mktemp("code") / "code.txt"
    path.write_text("\n".join((library / name).read_text(encoding="utf-8") for name in MODULES), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def predictors(code, tmp_path_factory):
    out = tmp_path_factory.mktemp("predictors") / "out"
    options = {"tokens": 8192, "held_out": 2048, "epochs": 4, "threads": 1}
    return out, train_predictors(MODEL, out, text=code, **options)


def test_most_neurons_do_not_fire(code, tmp_path):
    found, report = profile(MODEL, tmp_path, texts=[code], tokens=2048, seq_len=256, threads=1)
    assert 0.8 < report["exact_zeros"] < 0.95
    assert found.sparsity().min() > 0.6
    assert report["reuse"] > report["reuse_by_chance"]


@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_skipping_them_changes_no_token(activations):
    params = SamplingParams(max_tokens=100, temperature=0.8, seed=1)
    tokens = []
    for neurons in ("skip", "off"):
        with LLM(MODEL, threads=1, neurons=neurons, activations=activations) as llm:
            tokens.append(llm.generate("def ", params).token_ids)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) > 50


def test_it_knows_python(code):
    """Bytes cost far less than those of a model that knows their frequencies alone."""
    text = code.read_text(encoding="utf-8")
    with LLM(MODEL, threads=1) as llm:
        windows = cut_windows(llm.tokenizer.encode(text, add_special=False), 255, 16, 8)
        scored = perplexity(llm.engine, windows, bos_id=llm.tokenizer.bos_id)
    _, counts = np.unique(np.frombuffer(text.encode(), np.uint8), return_counts=True)
    frequencies = counts / counts.sum()
    assert np.log2(scored.ppl) < 0.5 * -(frequencies * np.log2(frequencies)).sum()


@pytest.mark.slow
def test_predictors_find_what_fires(predictors):
    _, report = predictors
    assert report["parameters_share"] <= report["options"]["budget"]
    for row in report["predictors"]:
        assert row["recall"] > 0.93
        assert row["true_density"] < row["density"] < 0.5
    assert sum(row["counts"] for row in report["predictors"]) >= 1


@pytest.mark.slow
def test_predicted_neurons_cost_little(predictors, code):
    folder, report = predictors
    text = code.read_text(encoding="utf-8")
    with LLM(folder, threads=1) as predicted, LLM(MODEL, threads=1) as dense:
        windows = cut_windows(dense.tokenizer.encode(text, add_special=False), 255, 4, 40)
        scored = perplexity(
            predicted.engine, windows, bos_id=dense.tokenizer.bos_id, decode=True, reference=dense.engine
        )
        assert 0 < scored.kl_mean < 0.02
        used = [row for row in report["predictors"] if row["counts"]]
        held_out = sum(row["recall"] * row["true_density"] for row in used) / sum(row["true_density"] for row in used)
        assert predicted.engine.usage().recall == pytest.approx(held_out, abs=0.02)
        params = SamplingParams(max_tokens=30, temperature=0)
        together = predicted.generate(["import os\n", "class A:\n", "def f(x"], params)
        assert [each.token_ids for each in together] == [
            predicted.generate(text, params).token_ids for text in ("import os\n", "class A:\n", "def f(x")
        ]
