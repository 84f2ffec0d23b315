"""Magnitude pruning against a plain sort."""

import numpy as np
import pytest
import torch

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.base import Target, make
from thinfer.pruning.magnitude import Magnitude
from thinfer.pruning.statistics import InputStatistics

WEIGHT = torch.randn(11, 16, generator=torch.Generator().manual_seed(3))


def prune(target, weight=WEIGHT, **options):
    return Magnitude(**options).prune(weight, InputStatistics(weight.shape[1], frozenset()), target)


def test_the_smallest_of_the_matrix_go():
    pruned = prune(Target(0.4))
    size = np.abs(WEIGHT.numpy())
    limit = np.sort(size, axis=None)[round(0.4 * size.size)]
    np.testing.assert_array_equal(pruned.weight.numpy(), np.where(size >= limit, WEIGHT.numpy(), 0))
    np.testing.assert_array_equal(pruned.mask.numpy(), size >= limit)


def test_the_smallest_of_each_row_go():
    pruned = prune(Target(0.5), scope="row")
    size = np.abs(WEIGHT.numpy())
    limits = np.sort(size, axis=1)[:, 8:9]
    np.testing.assert_array_equal(pruned.mask.numpy(), size >= limits)


def test_n_of_m():
    pruned = prune(Target(0.75, SparsityPattern(1, 4)))
    groups = pruned.weight.reshape(-1, 4)
    assert torch.equal((groups != 0).sum(1), torch.ones(44, dtype=torch.int64))
    assert torch.equal(groups.abs().amax(1), WEIGHT.abs().reshape(-1, 4).amax(1))


def test_no_sparsity_changes_nothing_and_full_sparsity_leaves_nothing():
    assert torch.equal(prune(Target(0.0)).weight, WEIGHT)
    assert not prune(Target(1.0)).weight.any()


def test_the_matrix_itself_is_left_as_it_is():
    before = WEIGHT.clone()
    prune(Target(0.5)).weight.add_(1)
    prune(Target(0.0)).weight.add_(1)
    assert torch.equal(WEIGHT, before)


def test_errors():
    with pytest.raises(UsageError, match="choose one of row, layer"):
        make("magnitude", {"scope": "model"})
    with pytest.raises(CheckFailed, match="NaN"):
        prune(Target(0.5), torch.full((2, 2), float("nan")))
