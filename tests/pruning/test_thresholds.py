"""Rates by one threshold and by q·σ, against a sort of all weights and a bisection of q."""

import numpy as np
import pytest
import torch

from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.base import Target, make
from thinfer.pruning.magnitude import Magnitude
from thinfer.pruning.masks import zero_count
from thinfer.pruning.statistics import InputStatistics


class View:
    """A model of some matrices."""

    def __init__(self, **weights):
        self.weights = weights
        self.blocks = [[name] for name in weights]

    def weight(self, name):
        return self.weights[name]


def random_view(seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = {"a": (8, 12), "b": (20, 5), "c": (3, 3), "d": (16, 16)}
    scales = [0.02, 1.0, 30.0, 1e-30]
    weights = {
        n: torch.randn(s, generator=random) * x + x / 3 for (n, s), x in zip(shapes.items(), scales, strict=True)
    }
    return View(**weights)


def zeros_of(view, rates):
    assert list(rates) == list(view.weights)
    return {name: zero_count(view.weights[name].numel(), rate) for name, rate in rates.items()}


@pytest.mark.parametrize("sparsity", [0.0, 0.001, 0.3, 0.5, 0.83, 1.0])
def test_one_threshold_prunes_the_smallest_of_all(sparsity):
    view = random_view()
    rates = make("global-threshold", kind="allocation").rates(view, sparsity)
    size = np.concatenate([w.abs().numpy().reshape(-1) for w in view.weights.values()])
    owner = np.concatenate([[name] * w.numel() for name, w in view.weights.items()])
    lowest = owner[np.argsort(size, kind="stable")[: round(sparsity * size.size)]]
    assert zeros_of(view, rates) == {name: int((lowest == name).sum()) for name in view.weights}


def test_with_magnitude_exactly_the_smallest_weights_go():
    view = random_view(1)
    rates = make("global-threshold", kind="allocation").rates(view, 0.6)
    kept, gone = [], []
    for name, weight in view.weights.items():
        mask = Magnitude().prune(weight, InputStatistics(weight.shape[1], frozenset()), Target(rates[name])).mask
        kept += weight[mask].abs().tolist()
        gone += weight[~mask].abs().tolist()
    assert max(gone) < min(kept)


@pytest.mark.parametrize("sparsity", [0.2, 0.5, 0.9])
def test_q_sigma_is_the_q_that_a_bisection_finds(sparsity):
    view = random_view(2)
    rates = make("sigma", kind="allocation").rates(view, sparsity)
    arrays = {name: w.double().numpy() for name, w in view.weights.items()}
    wanted = round(sparsity * sum(a.size for a in arrays.values()))
    low, high = 0.0, 100.0
    for _ in range(200):
        q = (low + high) / 2
        below = {name: int((np.abs(a) < q * a.std()).sum()) for name, a in arrays.items()}
        low, high = (q, high) if sum(below.values()) < wanted else (low, q)
    below = {name: int((np.abs(a) < high * a.std()).sum()) for name, a in arrays.items()}
    assert zeros_of(view, rates) == below
    assert sum(below.values()) == wanted


@pytest.mark.parametrize("name", ["global-threshold", "sigma"])
@pytest.mark.parametrize("sparsity", [0.0, 0.37, 0.5, 1.0])
def test_equal_weights_are_taken_from_the_first_matrices(name, sparsity):
    view = View(a=torch.ones(5, 7), b=-torch.ones(4, 4), c=torch.zeros(3, 3))
    zeros = zeros_of(view, make(name, kind="allocation").rates(view, sparsity))
    total = round(sparsity * 60)
    assert sum(zeros.values()) == total
    assert zeros["c"] == min(9, total)
    assert zeros["a"] == min(35, total - zeros["c"])


@pytest.mark.parametrize("name", ["global-threshold", "sigma"])
def test_errors(name):
    allocation = make(name, kind="allocation")
    with pytest.raises(CheckFailed, match="b holds NaN weights"):
        allocation.rates(View(a=torch.ones(2, 2), b=torch.tensor([[1.0, float("nan")]])), 0.5)
    with pytest.raises(UsageError, match="between 0 and 1"):
        allocation.rates(random_view(), 1.5)
