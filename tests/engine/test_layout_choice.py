"""Columns or rows where channels are skipped: chosen by time, said, and without influence on a single bit."""

from dataclasses import replace

import numpy as np
import pytest

import tiny_llama
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.options import EngineOptions
from thinfer.engine.plan import LinearShape, MatrixPlan, Skipped, plan_linear
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

pytest.importorskip("thinfer._core")

from thinfer import _core
from thinfer.bench.kernels import random_blocks
from thinfer.engine import cpu
from thinfer.engine.layout_choice import (
    Candidate,
    LayoutTimer,
    LayoutTimes,
    measure_layouts,
    set_bytes,
    settle,
    undisturbed,
)

IDS = np.random.default_rng(4).integers(0, 256, 40).tolist()
FAST_COLUMNS = LayoutTimes(columns=0.00041, rows=0.0007)
FAST_ROWS = LayoutTimes(columns=0.00094, rows=0.0007)
NO_GAIN = LayoutTimes(columns=0.00098, rows=0.001)


def plan_of(skipped):
    return MatrixPlan(("w",), skipped.type, skipped.codec, "columns", 64, 2, "", skipped)


def candidate(inputs=256, outputs=64, rate=0.5, pack=None, assumed=False):
    skipped = Skipped("Q4_1", None, inputs, outputs, rate, assumed)
    return Candidate(skipped, plan_of(skipped), pack)


# ---- the choice


@pytest.mark.parametrize(("times", "layout"), [(FAST_COLUMNS, "columns"), (FAST_ROWS, "rows"), (NO_GAIN, "rows")])
def test_columns_must_win_beyond_noise_and_the_figures_are_the_reason(times, layout):
    plan = candidate(rate=0.4).plan
    settled = settle(plan, {plan.skipped: times})
    assert settled.layout == layout
    assert settled.chunk == (64 if layout == "columns" else 0)
    assert settled.segments == plan.segments
    assert settled.why == f"{times} at 40 % skipped"


def test_figures_are_said_in_milliseconds():
    assert str(FAST_COLUMNS) == "columns 0.41 ms against rows 0.70 ms"
    assert str(LayoutTimes(columns=0.0000121, rows=0.00002)) == "columns 0.012 ms against rows 0.020 ms"


def test_an_assumed_rate_is_said_and_one_measurement_serves_both():
    known, assumed = candidate().plan, candidate(assumed=True).plan
    times = {known.skipped: FAST_COLUMNS}
    assert settle(assumed, times).why.endswith("at 50 % skipped (assumed: the artifact does not say)")


def test_what_was_not_measured_is_as_fast_as_dense():
    settled = settle(candidate().plan, {})
    assert (settled.layout, settled.chunk) == ("rows", 0)
    assert "no time to measure" in settled.why


def test_a_settled_plan_stays():
    plan = replace(candidate().plan, skipped=None)
    assert settle(plan, {}) is plan


def test_the_lower_quartile_ignores_disturbed_samples():
    assert undisturbed([1.0, 9.0, 1.1, 8.0, 7.0]) == 1.1
    assert undisturbed([2.0]) == 2.0


# ---- what is measured


def test_a_shape_is_timed_once_for_all_its_rates_and_the_heaviest_comes_first():
    asked = []

    def timer(given, rates, seconds):
        asked.append((given.skipped.inputs, rates, seconds))
        return dict.fromkeys(rates, FAST_COLUMNS)

    light, heavy = [candidate(256, 64, 0.3)], [candidate(512, 64, rate) for rate in (0.6, 0.5, 0.6)]
    times = measure_layouts(light + heavy, timer, clock=lambda: 0.0)
    assert asked == [(512, [0.5, 0.6], 0.1), (256, [0.3], 0.1)]
    assert set(times) == {c.skipped for c in light + heavy}


def test_the_time_allowed_is_kept():
    now = 0.0

    def timer(given, rates, seconds):
        nonlocal now
        now += 0.12
        return dict.fromkeys(rates, FAST_COLUMNS)

    shapes = [candidate(256 * n) for n in range(1, 9)]
    times = measure_layouts(shapes, timer, seconds=0.3, clock=lambda: now)
    assert {key.inputs for key in times} == {2048, 1792, 1536}


def test_copies_take_a_share_of_the_memory_that_is_available(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable:   64000 kB\n")
    assert set_bytes(meminfo) == 4000 * 1024
    meminfo.write_text("MemAvailable: 640000000 kB\n")
    assert set_bytes(meminfo) == 32 << 20
    assert set_bytes(tmp_path / "absent") == 32 << 20


def test_a_real_measurement():
    pool = _core.ThreadPool(1)
    raw = random_blocks(np.random.default_rng(0), "Q4_1", 512, 512)

    def pack(plan, arena):
        return _core.PackedMatrix.pack(
            [(raw, "Q4_1", None)], 512, None, plan.layout, plan.chunk, plan.segments, pool, arena
        )

    timer = LayoutTimer(_core.default_isa(), pool, "int8")
    times = timer(candidate(512, 512, pack=pack), [0.0, 0.9], 0.05)
    assert list(times) == [0.0, 0.9]
    assert all(0 < t.columns < 0.1 and 0 < t.rows < 0.1 for t in times.values())
    assert times[0.0].rows == times[0.9].rows


# ---- in the engine


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Inputs wide enough for several partial sums."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HIDDEN": 512, "HEAD_DIM": 128, "FFN": 1024}.items():
            patch.setattr(tiny_llama, name, value)
        folder = tiny_llama.write_tiny_llama(tmp_path_factory.mktemp("wide") / "llama")
    checkpoint = open_checkpoint(folder)
    yield load_model(checkpoint)
    checkpoint.close()


def selector_of(model, rates=True):
    sites = [n.attrs["site"] for n in model.graph.nodes if n.op == "linear" and n.attrs["kind"] != "lm_head"]
    return ThresholdSelector("teal", dict.fromkeys(sites, 0.5), rates=dict.fromkeys(sites, 0.42) if rates else {})


def logits_of(model, steps, **options):
    with Engine(model, EngineOptions(**options), selector=selector_of(model)) as engine:
        layouts = {m.layout for m in engine.executor.linears if not m.site.endswith("lm_head")}
        sequence = engine.new_sequence()
        parts, start = [], 0
        while start < len(IDS):
            stop = min(start + steps, len(IDS))
            parts += engine.step([Work(sequence, IDS[start:stop], "all", sparse=True)])
            start = stop
        return np.concatenate(parts), layouts, engine.usage().density


@pytest.mark.parametrize("options", [{"weights": "q4"}, {"weights": "q8"}, {"weights": "q4", "activations": "f32"}])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_layouts_give_the_same_bits(wide_model, options, steps):
    rows, row_layouts, row_density = logits_of(wide_model, steps, layout="rows", threads=2, **options)
    columns, column_layouts, density = logits_of(wide_model, steps, layout="columns", threads=2, **options)
    assert (row_layouts, column_layouts) == ({"rows"}, {"columns"})
    assert np.array_equal(rows, columns)
    assert row_density == pytest.approx(density, abs=0.01)
    assert density < 0.9


@pytest.mark.parametrize(("times", "layout"), [(FAST_COLUMNS, "columns"), (FAST_ROWS, "rows")])
@pytest.mark.parametrize("rates", [True, False])
def test_the_faster_layout_is_packed_and_start_up_says_why(tiny_model, monkeypatch, times, layout, rates):
    monkeypatch.setattr(cpu, "measure_layouts", lambda given, timer: {c.skipped: times for c in given})
    options = EngineOptions(executor="cpu", weights="q8")
    with Engine(tiny_model, options, selector=selector_of(tiny_model, rates)) as engine:
        lines = "\n".join(engine.describe())
        assert {m.layout for m in engine.executor.linears if m.site.startswith("layers")} == {layout}
    assert f"{times} at {'40' if rates else '50'} % skipped" in lines
    assert ("assumed" in lines) is not rates
    assert "layouts   4 timed in" in lines


def test_the_engine_measures_by_itself(tiny_model):
    with Engine(tiny_model, EngineOptions(executor="cpu", weights="q8"), selector=selector_of(tiny_model)) as engine:
        whys = [m.plan.why for m in engine.executor.linears if m.site.startswith("layers")]
    assert len(whys) == 8
    assert all(" against rows " in why for why in whys)


@pytest.mark.parametrize("layout", ["auto", "rows"])
def test_float_weights_have_columns_only(tiny_model, layout):
    options = EngineOptions(executor="cpu", layout=layout)
    node = next(node for node in tiny_model.graph.nodes if node.op == "linear")
    shape = LinearShape.of(node, tiny_model.weights)
    (plan,) = plan_linear(node, tiny_model.weights, selector_of(tiny_model), options, shape)
    assert (plan.layout, plan.skipped) == ("columns", None)
    assert "no other layout" in plan.why


def test_a_layout_without_thresholds_is_ignored_and_said(tiny_model):
    with Engine(tiny_model, EngineOptions(executor="cpu", layout="columns", weights="q8")) as engine:
        assert "ignored   layout columns" in "\n".join(engine.describe())
        assert {m.layout for m in engine.executor.linears} == {"rows"}


def test_an_unknown_layout_is_refused():
    with pytest.raises(UsageError, match="auto, rows, columns"):
        EngineOptions(layout="diagonal")
