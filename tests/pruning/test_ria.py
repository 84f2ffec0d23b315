"""RIA against its formula, weight by weight in Python."""

import pytest
import torch

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UsageError
from thinfer.pruning.base import Target, make
from thinfer.pruning.ria import Ria
from thinfer.pruning.statistics import InputStatistics

RANDOM = torch.Generator().manual_seed(9)
WEIGHT = torch.randn(6, 12, generator=RANDOM) * torch.logspace(-1, 1, 12)
TOKENS = torch.randn(30, 12, generator=RANDOM) * torch.logspace(1, -2, 12)


def observed(tokens=TOKENS):
    inputs = InputStatistics(tokens.shape[1], frozenset({"norm"}))
    inputs.add(tokens)
    return inputs


def scores_by_formula(power):
    w, x = WEIGHT.double().abs().tolist(), TOKENS.double().tolist()
    columns = [sum(row[j] for row in w) for j in range(12)]
    norms = [sum(token[j] ** 2 for token in x) ** 0.5 for j in range(12)]
    return [[(row[j] / columns[j] + row[j] / sum(row)) * norms[j] ** power for j in range(12)] for row in w]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_lowest_scores_of_the_matrix_go(power):
    pruned = Ria(power=power).prune(WEIGHT, observed(), Target(0.5))
    scores = scores_by_formula(power)
    ranked = sorted((scores[i][j], i, j) for i in range(6) for j in range(12))
    assert {(i, j) for i, j in (~pruned.mask).nonzero().tolist()} == {(i, j) for _, i, j in ranked[:36]}
    assert torch.equal(pruned.weight, WEIGHT * pruned.mask)


def test_rows_and_groups():
    scores = torch.tensor(scores_by_formula(0.5))
    rows = Ria(scope="row").prune(WEIGHT, observed(), Target(0.25))
    assert torch.equal(rows.mask, scores > scores.sort(dim=1).values[:, 2:3])
    groups = Ria().prune(WEIGHT, observed(), Target(0.5, SparsityPattern(2, 4)))
    by_group = scores.reshape(-1, 4)
    assert torch.equal(groups.mask.reshape(-1, 4), by_group > by_group.sort(dim=1).values[:, 1:2])


def test_rows_and_columns_of_zeros_count_nothing():
    weight = WEIGHT.clone()
    weight[2], weight[:, 5] = 0, 0
    pruned = Ria().prune(weight, observed(), Target(17 / 72))
    assert torch.equal(pruned.mask, weight != 0)


def test_a_matrix_without_inputs_is_pruned_by_magnitude():
    pruned = Ria().prune(WEIGHT, observed(torch.zeros(3, 12)), Target(0.5))
    assert WEIGHT.abs()[pruned.mask].min() > WEIGHT.abs()[~pruned.mask].max()
    assert "fallback" in pruned.notes


def test_options():
    assert make("ria", {"power": 0.25, "scope": "row"}) == Ria(0.25, "row")
    with pytest.raises(UsageError, match="power must be 0 or more"):
        Ria(power=-1)
