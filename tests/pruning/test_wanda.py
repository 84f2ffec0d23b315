"""Wanda against a sort of each row by |w|·‖x‖, computed from the inputs themselves."""

import numpy as np
import pytest
import torch

from thinfer.core.pattern import SparsityPattern
from thinfer.pruning.base import Target
from thinfer.pruning.statistics import InputStatistics
from thinfer.pruning.wanda import Wanda

RANDOM = torch.Generator().manual_seed(5)
WEIGHT = torch.randn(7, 24, generator=RANDOM)
TOKENS = torch.randn(50, 24, generator=RANDOM) * torch.logspace(-2, 2, 24)


def observed(tokens):
    inputs = InputStatistics(tokens.shape[1], frozenset({"norm"}))
    for part in tokens.split(17):
        inputs.add(part)
    return inputs


def test_each_row_loses_its_lowest():
    pruned = Wanda().prune(WEIGHT, observed(TOKENS), Target(0.5))
    norm = np.linalg.norm(TOKENS.numpy().astype(np.float64), axis=0)
    expected = WEIGHT.numpy().copy()
    for row in expected:
        row[np.argsort(np.abs(row) * norm, kind="stable")[:12]] = 0
    np.testing.assert_array_equal(pruned.weight.numpy(), expected)
    np.testing.assert_array_equal(pruned.mask.numpy(), expected != 0)
    assert not pruned.notes


def test_n_of_m_keeps_the_highest_scores_of_each_group():
    pruned = Wanda().prune(WEIGHT, observed(TOKENS), Target(0.625, SparsityPattern(3, 8)))
    norm = np.linalg.norm(TOKENS.numpy().astype(np.float64), axis=0)
    scores = (np.abs(WEIGHT.numpy()) * norm).reshape(-1, 8)
    best = np.argsort(scores, axis=1)[:, 5:]
    expected = np.zeros(scores.shape, bool)
    np.put_along_axis(expected, best, True, axis=1)
    np.testing.assert_array_equal(pruned.mask.numpy().reshape(-1, 8), expected)


def test_the_whole_matrix_may_compete():
    pruned = Wanda(scope="layer").prune(WEIGHT, observed(TOKENS), Target(0.3))
    scores = WEIGHT.numpy().__abs__() * np.linalg.norm(TOKENS.numpy().astype(np.float64), axis=0)
    assert scores[pruned.mask.numpy()].min() >= scores[~pruned.mask.numpy()].max()
    assert int((~pruned.mask).sum()) == round(0.3 * WEIGHT.numel())


def test_no_sparsity_changes_nothing_and_full_sparsity_leaves_nothing():
    assert torch.equal(Wanda().prune(WEIGHT, observed(TOKENS), Target(0.0)).weight, WEIGHT)
    assert not Wanda().prune(WEIGHT, observed(TOKENS), Target(1.0)).weight.any()


@pytest.mark.parametrize("tokens", [torch.zeros(0, 24), torch.zeros(9, 24)])
def test_a_matrix_without_inputs_is_pruned_by_magnitude(tokens):
    """Failure 26: with scores of 0 the first columns of an unrouted expert would go, whatever they hold."""
    pruned = Wanda().prune(WEIGHT, observed(tokens), Target(0.5))
    assert "magnitude" in pruned.notes["fallback"]
    size = WEIGHT.abs()
    for row in range(7):
        assert size[row][pruned.mask[row]].min() >= size[row][~pruned.mask[row]].max()


def test_inputs_that_were_always_zero_lose_their_weights_first():
    tokens = TOKENS.clone()
    tokens[:, 3] = 0
    assert not Wanda().prune(WEIGHT, observed(tokens), Target(0.1)).mask[:, 3].any()
