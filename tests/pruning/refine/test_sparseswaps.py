"""SparseSwaps against all swaps tried one by one, each error computed anew from the inputs."""

import pytest
import torch

from pruning.layers import layer, layer_error, observed, row_errors
from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UsageError
from thinfer.pruning.base import Pruned, Target, make
from thinfer.pruning.refine.sparseswaps import SparseSwaps
from thinfer.pruning.statistics import InputStatistics

HALF, TWO_OF_FOUR, FOUR_OF_EIGHT = Target(0.5), Target(0.5, SparsityPattern(2, 4)), Target(0.5, SparsityPattern(4, 8))


def best_swap(weight, mask, x, m=0):
    """Least error of one row after one swap (inf without any), and the mask that has it."""
    best, found = float("inf"), None
    for give in mask.nonzero().flatten().tolist():
        for take in (~mask).nonzero().flatten().tolist():
            if m and give // m != take // m:
                continue
            swapped = mask.clone()
            swapped[give], swapped[take] = False, True
            error = float(row_errors(weight[None], (weight * swapped)[None], x))
            if error < best:
                best, found = error, swapped
    return best, found


@pytest.mark.parametrize("target", [HALF, TWO_OF_FOUR, FOUR_OF_EIGHT, Target(0.8)], ids=str)
def test_one_step_is_the_best_swap_of_every_row(target):
    weight, x = layer(24, 6, tokens=200)
    start = make("wanda").prune(weight, observed(x), target)
    refined = SparseSwaps(swaps=1, candidates=0).refine(weight, start, observed(x), target)
    for row in range(len(weight)):
        error, mask = best_swap(weight[row], start.mask[row], x, target.pattern.m)
        if error < float(row_errors(weight, start.weight, x)[row]):
            assert torch.equal(refined.mask[row], mask)
        else:
            assert torch.equal(refined.mask[row], start.mask[row])
    assert torch.equal(refined.weight, weight * refined.mask)


@pytest.mark.parametrize("candidates", [0, 2, 8])
@pytest.mark.parametrize("target", [HALF, TWO_OF_FOUR, Target(0.7)], ids=str)
def test_in_the_end_no_swap_helps(target, candidates):
    weight, x = layer(24, 6, tokens=200, seed=1)
    start = make("magnitude", {"scope": "row"}).prune(weight, observed(x), target)
    refined = SparseSwaps(candidates=candidates).refine(weight, start, observed(x), target)
    assert refined.notes["swaps"] > len(weight)
    errors = row_errors(weight, refined.weight, x)
    for row in range(len(weight)):
        assert best_swap(weight[row], refined.mask[row], x, target.pattern.m)[0] >= float(errors[row]) * (1 - 2e-5)


@pytest.mark.parametrize("target", [HALF, TWO_OF_FOUR, Target(0.7)], ids=str)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria", "sparsegpt", "alps"])
def test_no_rows_error_rises_and_no_count_changes(method, target):
    weight, x = layer(96, 64, seed=2)
    statistics = observed(x)
    start = make(method).prune(weight, statistics, target)
    before = start.weight.clone(), start.mask.clone()
    refined = SparseSwaps().refine(weight, start, statistics, target)
    old, new = row_errors(weight, start.weight, x), row_errors(weight, refined.weight, x)
    assert (new <= old * (1 + 1e-5)).all()
    assert refined.notes["swaps_error_ratio"] == pytest.approx(float(new.sum() / old.sum()), rel=1e-3)
    assert torch.equal(refined.mask.sum(1), start.mask.sum(1))
    assert torch.equal(refined.weight != 0, refined.mask)
    if target.pattern.structured:
        assert (refined.mask.reshape(-1, 4).sum(1) == 2).all()
    assert torch.equal(start.weight, before[0])
    assert torch.equal(start.mask, before[1])


def test_it_helps_as_much_as_published():
    weight, x = layer(192, 64, tokens=2048, seed=3)
    statistics = observed(x)
    errors = {}
    for method in ("wanda", "sparsegpt", "alps"):
        start = make(method).prune(weight, statistics, HALF)
        refined = SparseSwaps().refine(weight, start, statistics, HALF)
        errors[method] = layer_error(weight, refined.weight, x) / layer_error(weight, start.weight, x)
    assert errors["wanda"] < 0.65
    assert errors["sparsegpt"] < 0.85
    assert errors["alps"] <= 1


def test_new_values_only_where_there_are_some_or_they_are_asked_for():
    weight, x = layer(96, 32, seed=4)
    statistics = observed(x)
    start = make("wanda").prune(weight, statistics, HALF)
    masked = SparseSwaps().refine(weight, start, statistics, HALF)
    assert torch.equal(masked.weight, weight * masked.mask)
    fitted = SparseSwaps(reconstruct=True).refine(weight, start, statistics, HALF)
    assert layer_error(weight, fitted.weight, x) < 0.9 * layer_error(weight, masked.weight, x)
    compensated = make("sparsegpt").prune(weight, statistics, HALF)
    kept = SparseSwaps(reconstruct=False).refine(weight, compensated, statistics, HALF)
    assert layer_error(weight, kept.weight, x) < layer_error(weight, compensated.weight, x)
    assert ((kept.weight == compensated.weight) | (kept.weight == weight))[kept.mask].all()


@pytest.mark.parametrize("reconstruct", [None, True])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_inputs_of_low_rank_and_of_any_magnitude(rank, scale, reconstruct):
    weight, x = layer(32, 16, seed=5)
    x = x[:rank] * scale
    if rank:
        x[:, 3] = 0
    statistics = observed(x)
    for target in (HALF, TWO_OF_FOUR):
        start = make("wanda").prune(weight, statistics, target)
        refined = SparseSwaps(reconstruct=reconstruct).refine(weight, start, statistics, target)
        assert torch.isfinite(refined.weight).all()
        assert refined.weight.abs().max() < 100 * weight.abs().max()
        assert torch.equal(refined.mask.sum(1), start.mask.sum(1))
        bound = row_errors(weight, start.weight, x) * (1 + 1e-5) + 1e-12 * (1 if rank == 0 else scale) ** 2
        assert (row_errors(weight, refined.weight, x) <= bound).all()


def test_an_unseen_matrix_stays_as_it_is():
    weight, _ = layer(16, 8)
    empty = InputStatistics(16, frozenset({"gram"}))
    start = make("magnitude").prune(weight, empty, HALF)
    refined = SparseSwaps().refine(weight, start, empty, HALF)
    assert torch.equal(refined.weight, start.weight)
    assert refined.notes["swaps"] == 0


def test_a_dense_zero_is_never_taken_back():
    weight, x = layer(32, 8, seed=6)
    weight[:, ::4] = 0
    start = make("wanda").prune(weight, observed(x), HALF)
    refined = SparseSwaps().refine(weight, start, observed(x), HALF)
    assert int((refined.weight == 0).sum()) == weight.numel() // 2


@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_nothing_to_swap(sparsity):
    weight, x = layer(32, 8)
    start = make("wanda").prune(weight, observed(x), Target(sparsity))
    refined = SparseSwaps().refine(weight, start, observed(x), Target(sparsity))
    assert torch.equal(refined.weight, start.weight)


def test_quantised_values_are_refused():
    weight, x = layer(16, 8)
    quantised = Pruned(weight, torch.ones_like(weight, dtype=torch.bool), {"bits": 4})
    with pytest.raises(UsageError, match="quantisation"):
        SparseSwaps().refine(weight, quantised, observed(x), HALF)


def test_a_negative_option_is_refused():
    with pytest.raises(UsageError, match="candidates"):
        SparseSwaps(candidates=-1)


@pytest.mark.parametrize("candidates", [0, 1])
def test_a_dense_zero_is_not_taken_back_even_where_giving_up_alone_helps(candidates):
    t = torch.linspace(-1, 1, 50)[:, None]
    # The dense outputs cancel, so without the second weight the first does harm.
    x, weight = torch.cat([t, -t, 0.1 * t**2], 1), torch.tensor([[1.0, 1.0, 0.0]])
    mask = torch.tensor([[True, False, False]])
    refined = SparseSwaps(candidates=candidates).refine(weight, Pruned(weight * mask, mask), observed(x), Target(2 / 3))
    assert int((refined.weight != 0).sum()) == 1
