"""Sums of a matrix's inputs, against float64 sums over all tokens at once."""

import pytest
import torch

from thinfer.errors import CheckFailed
from thinfer.pruning.statistics import InputStatistics


@pytest.mark.parametrize("width", [5, 400, 800])
def test_sums_over_several_batches(width):
    x = torch.randn(3, 7, width, generator=torch.Generator().manual_seed(0)) + 0.5
    statistics = InputStatistics(width, frozenset({"gram"}))
    for batch in x:
        statistics.add(batch)
        statistics.gram  # noqa: B018 - mirrored between batches too
    flat = x.reshape(-1, width).double()
    assert statistics.rows == 21
    torch.testing.assert_close(statistics.gram.double(), flat.T @ flat, rtol=1e-5, atol=1e-4)
    assert torch.equal(statistics.gram, statistics.gram.T)
    torch.testing.assert_close(statistics.norm.double(), flat.norm(dim=0))
    torch.testing.assert_close(statistics.mean.double(), flat.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(statistics.variance.double(), flat.var(0, correction=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needs", [{"mean"}, {"mean", "gram"}])
def test_a_large_mean_does_not_spoil_the_variance(needs):
    """In float32 the square of 1e5 has no digit left for a variance of 1."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(9, 50, 4, generator=generator) * torch.tensor([1.0, 0.1, 3.0, 0.0])
    x = x + torch.tensor([1e5, -3e4, 0.0, 7e4]) + torch.arange(9.0)[:, None, None]
    statistics = InputStatistics(4, frozenset(needs))
    for batch in (x[:1], x[1:2, :3], x[1:2, 3:], x[:0], x[2:]):
        statistics.add(batch)
    expected = x.double().reshape(-1, 4).var(0, correction=0)
    torch.testing.assert_close(statistics.variance.double(), expected, rtol=1e-3, atol=0)


def test_without_gram_the_norms_are_the_same():
    x = torch.randn(11, 6, generator=torch.Generator().manual_seed(1))
    statistics = InputStatistics(6, frozenset({"norm"}))
    statistics.add(x)
    assert statistics.gram is None
    torch.testing.assert_close(statistics.norm, x.norm(dim=0))
    assert not statistics.value_sum.any()


def test_what_is_derived_is_computed_once_until_tokens_are_added():
    statistics = InputStatistics(2, frozenset({"norm"}))
    calls = []
    for _ in range(2):
        assert statistics.derive("count", lambda: calls.append(1) or len(calls)) == 1
    statistics.add(torch.ones(1, 2))
    assert statistics.derive("count", lambda: calls.append(1) or len(calls)) == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("need", ["norm", "gram"])
def test_input_that_is_not_finite_is_an_error(bad, need):
    statistics = InputStatistics(2, frozenset({need}))
    with pytest.raises(CheckFailed, match="NaN or infinite"):
        statistics.add(torch.tensor([[1.0, bad]]))
