"""Masks hold exactly the zeros asked for, ties included: the lower index goes first."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.base import Target
from thinfer.pruning.masks import keep, keep_highest, keep_n_of_m, zero_count


def scores_of(draw, rows, columns):
    """Few different values, so that there are many ties."""
    values = draw(st.lists(st.integers(0, 3), min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float32).reshape(rows, columns)


def lowest_by_sort(row, zeros):
    """Columns that a stable sort puts first."""
    return set(sorted(range(len(row)), key=lambda column: (row[column], column))[:zeros])


@st.composite
def matrices(draw):
    return scores_of(draw, draw(st.integers(1, 7)), draw(st.integers(1, 9)))


@settings(max_examples=150, deadline=None)
@given(matrices(), st.floats(0, 1))
def test_the_whole_matrix_loses_the_lowest_and_exactly_as_many_as_asked(scores, sparsity):
    kept = keep(scores, Target(sparsity), "layer")
    flat = scores.reshape(-1).tolist()
    pruned = {i for i, k in enumerate(kept.reshape(-1).tolist()) if not k}
    assert pruned == lowest_by_sort(flat, round(sparsity * len(flat)))


@settings(max_examples=150, deadline=None)
@given(matrices(), st.floats(0, 1))
def test_rows_lose_their_lowest_and_differ_by_one_at_most(scores, sparsity):
    kept = keep(scores, Target(sparsity), "row")
    zeros = (~kept).sum(1).tolist()
    assert sum(zeros) == round(sparsity * scores.numel())
    assert max(zeros) - min(zeros) <= 1
    for row, mask, count in zip(scores.tolist(), kept.tolist(), zeros, strict=True):
        assert {i for i, k in enumerate(mask) if not k} == lowest_by_sort(row, count)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_n_of_m_keeps_the_n_highest_of_each_group(data):
    m = data.draw(st.integers(2, 6))
    n = data.draw(st.integers(1, m - 1))
    scores = scores_of(data.draw, data.draw(st.integers(1, 4)), m * data.draw(st.integers(1, 3)))
    kept = keep(scores, Target(0.123, SparsityPattern(n, m)))
    for group, mask in zip(scores.reshape(-1, m).tolist(), kept.reshape(-1, m).tolist(), strict=True):
        assert {i for i, k in enumerate(mask) if not k} == lowest_by_sort(group, m - n)


@pytest.mark.parametrize("scope", ["row", "layer"])
@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.33, 0.5, 0.999, 1.0])
def test_a_constant_matrix_has_the_planned_zeros(scope, sparsity):
    """Failure 19: `<=` on ties pruned everything, and int() instead of rounding missed the ratio."""
    kept = keep(torch.ones(37, 23), Target(sparsity), scope)
    assert int((~kept).sum()) == round(sparsity * 37 * 23)


def test_remaining_zeros_are_spread_over_the_rows():
    zeros = (~keep(torch.rand(8, 10, generator=torch.Generator().manual_seed(0)), Target(0.25), "row")).sum(1)
    assert zeros.tolist() == [2, 3, 2, 3, 2, 3, 2, 3]


def test_inputs_that_are_no_multiple_of_m_are_refused():
    with pytest.raises(UsageError, match=r"2:4: a matrix has 6 inputs, no multiple of 4"):
        keep_n_of_m(torch.ones(2, 6), SparsityPattern(2, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("zeros", [0, 1])
def test_scores_must_be_finite(bad, zeros):
    with pytest.raises(CheckFailed, match="NaN or infinite"):
        keep_highest(torch.tensor([[1.0, bad]]), zeros)


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, float("nan")])
def test_sparsity_lies_between_0_and_1(sparsity):
    with pytest.raises(UsageError, match="between 0 and 1"):
        zero_count(10, sparsity)


def test_the_scores_are_left_as_they_are():
    scores = torch.rand(5, 8)
    before = scores.clone()
    keep(scores, Target(0.5)), keep(scores, Target(0.5), "layer"), keep(scores, Target(0.5, SparsityPattern(2, 4)))
    assert torch.equal(scores, before)
