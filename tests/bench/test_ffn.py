"""bench ffn: its power law, its rows, and that it refuses what it cannot time."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("thinfer._core")

from thinfer.bench import ffn
from thinfer.cli.main import app
from thinfer.core.graph import Node
from thinfer.engine.layout_choice import LayoutTimes
from thinfer.engine.neurons import NeuronFfn, as_part_of, neuron_nodes, plan_neurons
from thinfer.engine.options import EngineOptions
from thinfer.engine.plan import LinearShape, plan_linear

SMALL = ["--hidden", "256", "--intermediate", "512", "-t", "1", "-r", "1", "-q"]
# Large enough for a predictor to save more than it reads.
LARGER = ["--hidden", "1024", "--intermediate", "4096", "-t", "1", "-r", "1", "-q"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", "ffn", *arguments], prog_name="thinfer")


def rows_of(*arguments, sizes=SMALL):
    result = invoke(*sizes, *arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.fixture
def asked(monkeypatch):
    """What is timed: axis, rate and whether from memory; skipping wins above a rate of 0.7."""
    asked = []

    def make_timer(isa, pool, activations, *, cold):
        def timer(candidate, rates, seconds):
            asked.append((candidate.skipped.axis, *rates, cold))
            return {rate: LayoutTimes(1.0 - rate, 0.3) for rate in rates}

        return timer

    monkeypatch.setattr(ffn, "LayoutTimer", make_timer)
    return asked


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
    rows = rows_of(gated, "--type", stored, "--sparsity", "0,0.9", *kinds, "--layout", "skip")
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


# ---- layouts


@pytest.mark.parametrize(
    ("gated", "kind", "stored", "axes", "dense", "sparse"),
    [
        ("--gated", "exact", "q4_0", ["outputs", "inputs"], "rows", "neurons+columns"),
        ("--plain", "exact", "q4_0", ["inputs"], "rows", "rows+columns"),
        ("--gated", "given", "q4_0", ["outputs", "inputs"], "rows", "neurons+columns"),
        ("--plain", "given", "q4_0", ["outputs", "inputs"], "rows", "neurons+columns"),
        ("--gated", "exact", "f16", ["outputs"], "columns", "neurons+columns"),
        ("--plain", "exact", "f16", [], "columns", "columns"),
        ("--gated", "given", "f16", [], "neurons+columns", "neurons+columns"),
    ],
)
def test_what_the_engine_times_is_chosen_at_each_level(asked, gated, kind, stored, axes, dense, sparse):
    rows = rows_of(gated, "--list", kind, "--type", stored, "--sparsity", "0,0.88")
    assert [row["layout"] for row in rows] == [dense, sparse]
    # Rates are taken in steps of 0.05, as in the engine.
    assert sorted(asked) == sorted((axis, rate, True) for rate in (0.0, 0.9) for axis in axes)
    if dense == "rows":
        assert rows[0]["bytes_ratio"] == 1.0


def test_where_nothing_is_skipped_the_matrices_are_those_of_dense(asked, monkeypatch):
    plans, pack = [], ffn._Stored.pack

    def packed(stored, plan, arena):
        plans.append((plan.weights, plan.layout))
        return pack(stored, plan, arena)

    monkeypatch.setattr(ffn._Stored, "pack", packed)
    assert rows_of("--sparsity", "0")[0]["layout"] == "rows"
    assert plans == 2 * [(("gate", "up"), "rows"), (("down",), "rows")]


@pytest.mark.parametrize(("wins", "layout"), [("outputs", "neurons+rows"), ("inputs", "rows+columns")])
def test_up_and_down_are_chosen_apart(monkeypatch, wins, layout):
    def measure(candidates, timer):
        return {c.skipped: LayoutTimes(0.1 if c.skipped.axis == wins else 0.3, 0.2) for c in candidates}

    monkeypatch.setattr(ffn, "measure_layouts", measure)
    assert [row["layout"] for row in rows_of("--sparsity", "0.5")] == [layout]


@pytest.mark.parametrize("layout", ["auto", "skip"])
def test_a_predictor_that_reads_more_than_it_saves_is_left_out(asked, layout):
    none, most = rows_of("--list", "predictor", "--sparsity", "0,0.9", "--layout", layout, sizes=LARGER)
    assert most["ran"] == "predictor"
    assert none["ran"] == ("exact" if layout == "auto" else "predictor")
    assert (none["bytes_ratio"] == 1) == (layout == "auto")
    assert most["layout"] == "neurons+columns"
    # Each level as what ran: both skip what the other does, timed at the rate that it has.
    both = [(axis, rate, True) for rate in (0.0, 0.9) for axis in ("outputs", "inputs")]
    assert sorted(asked) == (sorted(both) if layout == "auto" else [])


def test_skip_times_nothing(asked):
    kinds = [option for kind in ("exact", "given", "predictor") for option in ("--list", kind)]
    assert {row["layout"] for row in rows_of(*kinds, "--layout", "skip")} == {"neurons+columns"}
    assert not asked


def test_the_choice_by_a_real_timing():
    (row,) = rows_of("--sparsity", "0.5")
    assert list(row) == list(ffn.COLUMNS)
    assert row["layout"] in {"neurons+columns", "neurons+rows", "rows+columns", "rows"}


@pytest.mark.parametrize("stored", ["Q4_0", "Q6_K", "F16"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["exact", "given"])
def test_plans_are_those_of_the_engine(stored, gated, kind):
    # Gate and up together are wide and their sums cut in two; each alone would be cut in three.
    hidden, intermediate, rate, options = 768, 2048, 0.9, EngineOptions(threads=3)
    names = ("gate", "up") if gated else ("up",)
    shapes = dict.fromkeys(names, (intermediate, hidden)) | {"down": (hidden, intermediate)}
    weights = SimpleNamespace(source=lambda name: SimpleNamespace(type=stored, shape=shapes[name]))
    site = {"layer": 0, "kind": "gate_up", "site": "first"}
    first = Node("linear", ("x",), "first", names, {**site, "biases": ("",) * len(names)})
    act = Node("gated_act" if gated else "act", ("first",), "act", (), {"act": "relu"})
    down = Node("linear", ("act",), "out", ("down",), {"layer": 0, "kind": "down", "site": "down", "biases": ("",)})

    def linear(node, zeros=None):
        return plan_linear(node, weights, None, options, LinearShape.of(node, weights), zeros or {})

    ffn_found = NeuronFfn(0, 0, gated, True, kind == "given", rate, False)
    gate, _ = neuron_nodes([first, act, down], ffn_found)
    expected = plan_neurons(first, ffn_found, weights, options)
    if kind == "exact":
        expected = [*as_part_of(linear(gate), linear(first)), *expected[1:]] if gated else linear(first)
    expected += linear(down, {"down": (rate, False)})

    def seen(plans):
        return [(p.weights, p.type, p.codec, p.layout, p.chunk, p.segments, p.skipped) for p in plans]

    shape = ffn.FfnShape(hidden, intermediate, stored, gated)
    assert seen(ffn.skipping_plans(shape, kind, rate, 3)) == seen(expected)
    assert seen(ffn.dense_plans(shape)) == seen([*linear(first), *linear(down)])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hidden", "300"],
        ["--sparsity", "1"],
        ["--sparsity", "x"],
        ["--sparsity", "0.999999", "--list", "given"],
        ["--seed", "-1"],
        ["--layout", "rows"],
    ],
)
def test_what_cannot_be_timed_is_refused(arguments):
    assert invoke(*SMALL, *arguments).exit_code == 2
