"""The scan asks for the right losses, and its allocation is the best that a grid search finds."""

import itertools
import math

import pytest
import torch

from pruning.allocation.views import View
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.allocation.sensitivity import Sensitivity, cheapest, kinds_of
from thinfer.pruning.base import make

COST = {"self_attn.q_proj": 0.05, "mlp.up_proj": 1.0, "mlp.down_proj": 0.3}


def model_view(interaction=0.0, blocks=4):
    stack = [
        {
            f"model.layers.{block}.self_attn.q_proj": torch.ones(8, 8),
            f"model.layers.{block}.mlp.up_proj": torch.ones(16, 8),
            f"model.layers.{block}.mlp.down_proj": torch.ones(8, 16),
        }
        for block in range(blocks)
    ]

    def loss(rates):
        parts = [COST[name.split(".", 3)[3]] * rate**3 / blocks for name, rate in rates.items()]
        return 2.0 + sum(parts) + interaction * (sum(parts) - max(parts, default=0.0))

    return View(stack, loss=loss)


def test_cheap_kinds_take_more_and_the_mean_is_met():
    view, allocation = model_view(), Sensitivity()
    rates = allocation.rates(view, 0.5)
    assert view.mean(rates) == pytest.approx(0.5, abs=1e-9)
    q, up, down = (rates[f"model.layers.2.{kind}"] for kind in COST)
    assert q > down > up
    assert list(rates) == [name for block in view.blocks for name in block]
    assert all(rates[name] == rates[name.replace(".2.", ".0.")] for name in view.blocks[2])
    assert view.loss(rates) < view.loss(make("uniform", kind="allocation").rates(view, 0.5))


def test_every_kind_is_measured_alone_at_every_probe_and_kept():
    view, allocation = model_view(), Sensitivity(probes=(0.8, 0.4))
    allocation.rates(view, 0.5)
    (scan,) = allocation.scans
    assert scan.dense == 2.0
    assert set(scan.curves) == set(COST)
    for kind, curve in scan.curves.items():
        assert dict(curve) == pytest.approx({rate: COST[kind] * rate**3 for rate in (0.4, 0.8)})
        assert [rate for rate, _ in curve] == [0.4, 0.8]
    assert view.asked[0] == {}
    assert {len(asked) for asked in view.asked[1:-2]} == {4}
    assert len(view.asked) == 1 + 3 * 2 + 2
    assert scan.chosen < scan.uniform


def test_parts_of_the_stack_are_measured_apart():
    view, allocation = model_view(), Sensitivity(probes=(0.5,), parts=2)
    allocation.rates(view, 0.3)
    assert "mlp.up_proj, blocks 0-1" in allocation.scans[0].curves
    assert "mlp.up_proj, blocks 2-3" in allocation.scans[0].curves
    assert len(allocation.scans[0].curves) == 6


def test_where_the_sum_misleads_one_rate_for_all_is_kept():
    uniform = make("uniform", kind="allocation").rates(model_view(), 0.5)
    view = model_view()
    view._loss = lambda rates: model_view().loss(rates) if len(set(rates.values())) < 2 else 9.0
    assert Sensitivity().rates(view, 0.5) == uniform
    view._loss = lambda rates: math.nan if len(set(rates.values())) > 1 else 2.0 + sum(rates.values())
    assert Sensitivity().rates(view, 0.5) == uniform


@pytest.mark.parametrize("sparsity", [0.0, 0.95, 1.0])
def test_beyond_what_was_measured_all_take_the_same(sparsity):
    view = model_view()
    assert Sensitivity().rates(view, sparsity) == make("uniform", kind="allocation").rates(view, sparsity)


@pytest.mark.parametrize("sparsity", [0.1, 0.3, 0.55, 0.7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_allocation_is_the_best_of_a_grid(sparsity, seed):
    random = torch.Generator().manual_seed(seed)
    probes = (0.25, 0.5, 0.75)
    slopes = {kind: sorted(torch.rand(3, generator=random).tolist()) for kind in "abc"}
    curves = {
        kind: tuple(zip(probes, itertools.accumulate(0.25 * slope for slope in steep), strict=True))
        for kind, steep in slopes.items()
    }
    weights = {"a": 100, "b": 300, "c": 200}

    def cost(rates):
        total = 0.0
        for kind, rate in rates.items():
            points = ((0.0, 0.0), *curves[kind])
            low, high = next((p, q) for p, q in itertools.pairwise(points) if rate <= q[0] + 1e-9)
            total += low[1] + (rate - low[0]) / (high[0] - low[0]) * (high[1] - low[1])
        return total

    found = cheapest(curves, weights, sparsity)
    assert sum(found[kind] * weights[kind] for kind in weights) == pytest.approx(sparsity * 600)
    grid = [step / 60 for step in range(46)]
    best = math.inf
    for a, b in itertools.product(grid, grid):
        c = (sparsity * 600 - 100 * a - 300 * b) / 200
        if -1e-9 <= c <= 0.75 + 1e-9:
            best = min(best, cost({"a": a, "b": b, "c": min(max(c, 0.0), 0.75)}))
    assert cost(found) <= best + 1e-9
    assert cost(found) >= best - 0.02


def test_noise_and_losses_that_are_not_finite_are_borne():
    curves = {"a": ((0.3, -0.01), (0.5, 0.2), (0.7, 0.1)), "b": ((0.3, 0.1), (0.5, math.nan), (0.7, math.inf))}
    rates = cheapest(curves, {"a": 1, "b": 1}, 0.5)
    assert rates["a"] == pytest.approx(0.7)
    assert rates["b"] == pytest.approx(0.3)


def test_kinds_of_other_names():
    names = [["transformer.h.0.mlp.experts.gate_up_proj[0]", "transformer.h.0.mlp.experts.gate_up_proj[11]"]]
    assert list(kinds_of(names)) == ["mlp.experts.gate_up_proj"]
    assert list(kinds_of([["x.blocks.3.experts.7.w1", "x.blocks.3.fc"]])) == ["experts.w1", "fc"]
    assert list(kinds_of([["a.0.fc"], ["a.1.fc"]], parts=9)) == ["fc, blocks 0-0", "fc, blocks 1-1"]


def test_a_dense_loss_that_is_not_finite_is_an_error():
    view = model_view()
    view._loss = lambda rates: math.nan
    with pytest.raises(CheckFailed, match="dense"):
        Sensitivity().rates(view, 0.5)


@pytest.mark.parametrize("options", [{"probes": ()}, {"probes": (0.5, 1.0)}, {"probes": (0.0,)}, {"parts": 0}])
def test_options_out_of_range(options):
    with pytest.raises(UsageError):
        Sensitivity(**options)


def test_what_was_measured_is_no_option():
    with pytest.raises(UsageError, match="no option scans"):
        make("sensitivity", {"scans": []}, kind="allocation")
