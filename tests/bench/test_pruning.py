"""`thinfer bench prune`: rows of real runs on a tiny model, and the floor counted by hand."""

import json
import tempfile

import pytest
from typer.testing import CliRunner

from thinfer.bench.pruning import as_md, measure
from thinfer.bench.pruning_worker import floor_operations, gemm_rate
from thinfer.cli.main import app
from thinfer.errors import ThinferError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.checkpoint import load_skeleton
from thinfer.pruning.recipe import make_recipe
from tiny_llama import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("bench") / "llama")


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "prune", *arguments])


def test_a_row_for_each_method_and_nothing_is_left(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = invoke("-m", str(folder), "--samples", "3", "--seqlen", "64", "-t", "1", "-o", "json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [row["method"] for row in rows] == ["wanda", "sparsegpt"]
    for row in rows:
        assert (row["model"], row["samples"], row["seqlen"], row["threads"]) == (str(folder), 3, 64, 1)
        assert row["sparsity"] == pytest.approx(0.5, abs=1e-3)
        assert {"load", "statistics", "prune", "replay"} <= row["phases"].keys()
        assert sum(row["phases"].values()) <= row["seconds"]
        assert 0 < row["floor_seconds"] < row["seconds"]
        # A process that has loaded PyTorch.
        assert row["peak_rss_bytes"] > 100e6 > row["model_bytes"] > LAYERS * row["block_bytes"] > 0
    assert not list(tmp_path.iterdir())
    head, _, *lines = as_md(rows).splitlines()
    assert "x floor" in head
    assert [line.split("|")[2].strip() for line in lines] == ["wanda", "sparsegpt"]


def test_the_floor_is_two_passes_and_the_gram_matrices(folder):
    model = load_skeleton(folder).model
    samples, length = 5, 32
    tokens, inner = samples * length, HEADS * HEAD_DIM
    weights = HIDDEN * (2 * inner + 2 * KV_HEADS * HEAD_DIM + 3 * FFN)
    attention = 2 * inner * sum(range(length)) * 2 * samples  # scores and values of every pair of positions, causal
    # The dense pass of a block ends at the input of down.
    passes = LAYERS * (2 * tokens * (weights - HIDDEN * FFN) + attention)
    passes += (LAYERS - 1) * (2 * tokens * weights + attention)

    def floor(method, samples=samples):
        recipe = make_recipe({"model": str(folder), "method": method, "sparsity": 0.5})
        return floor_operations(recipe, model, find_stack(model), samples, length)

    assert floor("wanda") == pytest.approx(passes, rel=0.01)
    # q, k and v read one input, o another, gate and up a third, down the neurons.
    grams = LAYERS * tokens * (2 * HIDDEN**2 + inner**2 + FFN**2)
    assert floor("sparsegpt") - floor("wanda") == pytest.approx(grams)
    assert floor("magnitude", samples=0) == 0


def test_the_rate_is_that_of_the_product_whatever_its_shape():
    small, large = gemm_rate(256, 256), gemm_rate(1024, 512)
    assert 1e8 < small < 1e14
    assert 0.05 < small / large < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "thinfer bench prune -m MODEL"),
        (("-m", "x", "--method", "flap"), "--method flap: choose from alps, magnitude"),
        (("-m", "x", "--sparsity", "1"), "--sparsity 1: a fraction"),
    ],
)
def test_wrong_flags_fail_early(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_a_run_refuses_is_one_message_with_its_exit_code(folder):
    with pytest.raises(ThinferError, match="flap removes structures; bench prune times methods that zero") as raised:
        measure(str(folder), ["flap"])
    assert raised.value.exit_code == 2
