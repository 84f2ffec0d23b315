"""AlphaPruning's tail exponents against a loop over singular values, and on spectra whose exponent is known."""

import math

import numpy as np
import pytest
import torch

from pruning.allocation.views import View, random_view
from thinfer.errors import UsageError
from thinfer.pruning.allocation.alpha import Alpha, tail_exponent
from thinfer.pruning.allocation.uniform import Uniform


def with_spectrum(eigenvalues, rows=None, seed=0):
    """A matrix whose WᵀW has these eigenvalues."""
    random = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    left = torch.linalg.qr(torch.randn(rows or n, n, generator=random, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64)).Q
    return (left * torch.as_tensor(eigenvalues).sqrt() @ right.T).float()


def power_law(alpha, count=400):
    """Evenly spread quantiles of the density λ^−α from 1 on."""
    return (1 - (np.arange(count) + 0.5) / count) ** (-1 / (alpha - 1))


@pytest.mark.parametrize("alpha", [1.8, 2.5, 4.0])
@pytest.mark.parametrize("tail", ["peak", "median"])
def test_the_exponent_of_a_power_law_is_found(alpha, tail):
    assert tail_exponent(with_spectrum(power_law(alpha)), tail) == pytest.approx(alpha, rel=0.06)


def by_loop(weight, tail):
    values = np.sort(np.linalg.svd(weight.double().numpy(), compute_uv=False) ** 2)
    logs = np.log(values)
    if tail == "median":
        starts = [len(values) // 2]
    else:
        counts, edges = np.histogram(np.log10(values), bins=100)
        peak = 10 ** edges[np.argmax(counts)]
        starts = [i for i in range(len(values) - 1) if 0.95 * peak <= values[i] <= 1.5 * peak]
    best = (math.inf, math.nan)
    for start in starts:
        n = len(values) - start
        alpha = 1 + n / sum(logs[i] - logs[start] for i in range(start, len(values)))
        steps = [abs(1 - (values[start + i] / values[start]) ** (1 - alpha) - i / n) for i in range(n)]
        best = min(best, (max(steps), alpha))
    return best[1]


@pytest.mark.parametrize("tail", ["peak", "median"])
@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (64, 64)])
def test_exponents_are_those_of_a_loop_over_singular_values(shape, tail):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[:8] *= 4
    assert tail_exponent(weight, tail) == pytest.approx(by_loop(weight, tail), rel=1e-6)


@pytest.mark.parametrize("weight", [torch.zeros(8, 12), torch.eye(8), torch.ones(8, 12), torch.ones(1, 5)], ids=repr)
@pytest.mark.parametrize("tail", ["peak", "median"])
def test_a_spectrum_without_a_tail_has_no_exponent(weight, tail):
    assert tail_exponent(weight, tail) is None


def test_rates_are_linear_in_the_mean_exponent_of_a_block():
    alphas = [2.0, 3.0, 4.0]
    view = View(
        [
            {
                f"layers.{block}.q": with_spectrum(power_law(alpha - 0.5, 100), seed=block),
                f"layers.{block}.down": with_spectrum(power_law(alpha + 0.5, 100), rows=150 + 50 * block, seed=block),
            }
            for block, alpha in enumerate(alphas)
        ]
    )
    found = [np.mean([tail_exponent(view.weight(name)) for name in block]) for block in view.blocks]
    rates = Alpha(epsilon=0.3).rates(view, 0.5)
    assert view.mean(rates) == pytest.approx(0.5, abs=1e-9)
    low, middle, high = (rates[block[0]] for block in view.blocks)
    assert high / low == pytest.approx(1.3 / 0.7)
    assert (middle - low) / (high - low) == pytest.approx((found[1] - found[0]) / (found[2] - found[0]))
    assert rates["layers.1.q"] == rates["layers.1.down"]


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 1.0])
def test_no_rate_exceeds_1_and_the_mean_is_met(sparsity):
    view = random_view(blocks=5)
    rates = Alpha(epsilon=0.5).rates(view, sparsity)
    assert all(0 <= rate <= 1 for rate in rates.values())
    assert view.mean(rates) == pytest.approx(sparsity, abs=1e-9)


def test_blocks_without_an_exponent_lie_in_the_middle_and_alike_blocks_share_equally():
    view = View([{"a.0.q": torch.zeros(4, 8)}, {"a.1.q": torch.eye(4)}])
    assert Alpha().rates(view, 0.4) == pytest.approx(Uniform().rates(view, 0.4), abs=1e-9)
    spectra = [with_spectrum(power_law(alpha, 64)) for alpha in (2.0, 4.0)]
    view = View([{"a.0.q": spectra[0]}, {"a.1.q": torch.zeros(64, 64)}, {"a.2.q": spectra[1]}])
    rates = Alpha().rates(view, 0.4)
    assert rates["a.1.q"] == pytest.approx((rates["a.0.q"] + rates["a.2.q"]) / 2)
    assert rates["a.0.q"] < rates["a.1.q"]


@pytest.mark.parametrize("options", [{"epsilon": 1.0}, {"epsilon": -0.1}, {"tail": "mode"}])
def test_options_out_of_range(options):
    with pytest.raises(UsageError):
        Alpha(**options)
