"""DSnoT against a loop over outputs written from the published rule."""

import pytest
import torch

from pruning.layers import layer, layer_error, observed
from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UsageError
from thinfer.pruning.base import Pruned, Target, make
from thinfer.pruning.refine.dsnot import DSnoT
from thinfer.pruning.statistics import InputStatistics

HALF, TWO_OF_FOUR = Target(0.5), Target(0.5, SparsityPattern(2, 4))


def one_by_one(weight, mask, x, cycles=50, threshold=0.1, m=0):
    """The mask of one output; weights [inputs], inputs x [tokens, inputs]."""
    mean, variance, norm = x.mean(0), x.var(0, correction=0), x.norm(dim=0)
    mask, kept = mask.tolist(), mask.tolist()
    gain = (weight * mean).tolist()
    merit = (weight * mean / variance).tolist()
    score = (weight.abs() * norm).tolist()
    pruned_once = {j for j, keep in enumerate(mask) if not keep}
    error = sum(gain[j] for j in pruned_once)
    sign = 1 if error > 0 else -1
    used = set()
    for _ in range(cycles):
        if abs(error) <= threshold:
            break
        grow = max((j for j in pruned_once - used), key=lambda j: sign * merit[j])
        if m:
            group = range(grow // m * m, grow // m * m + m)
            choice = [j for j in group if kept[j] and j not in used]
        else:
            choice = [j for j in range(len(mask)) if kept[j] and j not in used and sign * gain[j] <= 0]
        if not choice or sign * merit[grow] <= 0:
            break
        prune = min(choice, key=lambda j: score[j])
        after = error - gain[grow] + gain[prune]
        if after * sign <= 0 or abs(after) >= abs(error):
            break
        mask[grow], mask[prune], error = True, False, after
        used |= {grow, prune}
    return torch.tensor(mask)


@pytest.mark.parametrize("target", [HALF, TWO_OF_FOUR, Target(0.7)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_masks_are_those_of_the_plain_rule(target, seed):
    weight, x = layer(96, 40, seed=seed)
    start = make("wanda").prune(weight, observed(x), target)
    refined = DSnoT(threshold=0.02).refine(weight, start, observed(x), target)
    assert refined.notes["exchanges"] > 10
    for row in range(len(weight)):
        expected = one_by_one(weight[row].double(), start.mask[row], x.double(), threshold=0.02, m=target.pattern.m)
        assert torch.equal(refined.mask[row], expected)
    assert torch.equal(refined.weight, weight * refined.mask)


@pytest.mark.parametrize("target", [HALF, TWO_OF_FOUR, Target(0.7)], ids=str)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_expected_errors_fall_and_no_count_changes(method, target):
    weight, x = layer(192, 64, seed=2)
    statistics = observed(x)
    start = make(method).prune(weight, statistics, target)
    before = start.weight.clone()
    refined = DSnoT().refine(weight, start, statistics, target)
    old, new = (((weight - matrix) @ x.mean(0)).abs() for matrix in (start.weight, refined.weight))
    assert (new <= old + 1e-6).all()
    assert torch.equal(refined.mask.sum(1), start.mask.sum(1))
    assert torch.equal(refined.weight != 0, refined.mask)
    if target.pattern.structured:
        assert (refined.mask.reshape(-1, 4).sum(1) == 2).all()
    assert torch.equal(start.weight, before)


def test_it_helps_wanda():
    weight, x = layer(384, 64, tokens=2048, seed=1)
    statistics = observed(x)
    for target in (Target(0.5), Target(0.6), Target(0.7)):
        start = make("wanda").prune(weight, statistics, target)
        refined = DSnoT().refine(weight, start, statistics, target)
        assert layer_error(weight, refined.weight, x) < layer_error(weight, start.weight, x)


def test_small_errors_are_left_alone():
    weight, x = layer(96, 16)
    start = make("wanda").prune(weight, observed(x), HALF)
    refined = DSnoT(threshold=1e3).refine(weight, start, observed(x), HALF)
    assert torch.equal(refined.mask, start.mask)
    assert refined.notes["exchanges"] == 0


@pytest.mark.parametrize("tokens", [0, 1])
def test_without_variance_all_stays_finite(tokens):
    weight, x = layer(32, 16)
    statistics = observed(x[:tokens] * 10)
    start = make("wanda").prune(weight, statistics, HALF)
    refined = DSnoT().refine(weight, start, statistics, HALF)
    assert torch.isfinite(refined.weight).all()
    assert torch.equal(refined.mask.sum(1), start.mask.sum(1))
    assert (refined.notes["exchanges"] > 0) == (tokens == 1)


def test_quantised_values_are_refused():
    weight, _ = layer(16, 8)
    quantised = Pruned(weight, torch.ones_like(weight, dtype=torch.bool), {"bits": 4})
    with pytest.raises(UsageError, match="quantisation"):
        DSnoT().refine(weight, quantised, InputStatistics(16, frozenset({"mean"})), HALF)


def test_a_negative_option_is_refused():
    with pytest.raises(UsageError, match="cycles"):
        DSnoT(cycles=-1)
