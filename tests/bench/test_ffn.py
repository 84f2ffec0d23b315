"""bench ffn: its power law, its rows, and that it refuses what it cannot time."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("thinfer._core")

from thinfer.bench import ffn
from thinfer.cli.main import app

SMALL = ["--hidden", "256", "--intermediate", "512", "-t", "1", "-r", "1", "-q"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "ffn", *arguments], prog_name="thinfer")


def test_a_quarter_of_the_neurons_makes_four_fifths_of_what_fires():
    rng = np.random.default_rng(0)
    assert ffn.firing(4000, 0.1, rng).mean() == pytest.approx(0.1, abs=0.02)
    weights = np.arange(1, 11009) ** -ffn.EXPONENT
    assert weights[:2862].sum() / weights.sum() == pytest.approx(0.8, abs=0.02)
    assert ffn.firing(100, 1.0, rng).all()


@pytest.mark.parametrize("stored", ["q4_0", "f16"])
@pytest.mark.parametrize("gated", ["--gated", "--plain"])
def test_a_row_a_level_and_kind(stored, gated):
    kinds = [option for kind in ("exact", "given", "predictor") for option in ("--list", kind)]
    result = invoke(*SMALL, gated, "--type", stored, "--sparsity", "0,0.9", *kinds, "-o", "json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert all(list(row) == list(ffn.COLUMNS) for row in rows)
    assert [(row["list"], row["sparsity"]) for row in rows] == [
        (kind, level) for kind in ("exact", "given", "predictor") for level in (0.0, 0.9)
    ]
    for row in rows:
        assert row["ratio_median"] > 0
        assert row["type"] == stored
        if row["sparsity"] == 0:
            assert row["byte_ceiling"] == 1.0
        elif row["list"] == "given":
            assert row["byte_ceiling"] == pytest.approx(1 / row["active"], rel=0.01)
            assert 1 < row["bytes_ratio"] <= row["byte_ceiling"] * 1.01


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hidden", "300"],
        ["--sparsity", "1"],
        ["--sparsity", "x"],
        ["--sparsity", "0.999999", "--list", "given"],
        ["--seed", "-1"],
    ],
)
def test_what_cannot_be_timed_is_refused(arguments):
    assert invoke(*SMALL, *arguments).exit_code == 2
