"""ALPS against SparseGPT, exact least squares, and a plain float64 ADMM written from the paper's equations."""

import numpy as np
import pytest
import torch

from pruning.layers import layer, layer_error, observed
from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UsageError
from thinfer.pruning.alps import Alps
from thinfer.pruning.base import Target, make
from thinfer.pruning.statistics import InputStatistics

TARGETS = [
    Target(0.3),
    Target(0.5),
    Target(0.7),
    Target(0.5, SparsityPattern(2, 4)),
    Target(0.25, SparsityPattern(6, 8)),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("inputs", "outputs", "seed"), [(96, 64, 0), (96, 160, 1), (192, 48, 2)])
def test_error_is_at_most_that_of_sparsegpt(target, inputs, outputs, seed):
    weight, x = layer(inputs, outputs, seed=seed)
    statistics = observed(x)
    errors = {
        name: layer_error(weight, make(name).prune(weight, statistics, target).weight, x)
        for name in ("wanda", "sparsegpt", "alps")
    }
    assert errors["alps"] < errors["sparsegpt"] < errors["wanda"]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_budget_and_pattern_are_exact(target):
    weight, x = layer(96, 33)
    pruned = Alps().prune(weight, observed(x), target)
    assert torch.equal(pruned.weight != 0, pruned.mask)
    if target.pattern.structured:
        assert (pruned.mask.reshape(-1, target.pattern.m).sum(1) == target.pattern.n).all()
    else:
        assert int((~pruned.mask).sum()) == round(target.sparsity * weight.numel())


def test_sparsity_of_none_and_of_all():
    weight, x = layer(16, 8)
    assert torch.equal(Alps().prune(weight, observed(x), Target(0.0)).weight, weight)
    assert not Alps().prune(weight, observed(x), Target(1.0)).weight.any()


def test_values_are_the_least_squares_of_their_mask():
    weight, x = layer(64, 24)
    pruned = Alps(damping=1e-6, cg_steps=200).prune(weight, observed(x), Target(0.5))
    for row, mask, values in zip(weight.double(), pruned.mask, pruned.weight.double(), strict=True):
        best = torch.linalg.lstsq(x.double()[:, mask], x.double() @ row).solution
        torch.testing.assert_close(values[mask], best, rtol=1e-2, atol=1e-4)


def test_few_steps_come_close_to_the_best_values():
    weight, x = layer(96, 48)
    few, many = (
        layer_error(weight, Alps(cg_steps=steps).prune(weight, observed(x), Target(0.5)).weight, x)
        for steps in (10, 300)
    )
    assert few == pytest.approx(many, rel=0.01)


def plain_admm(weight, x, zeros):
    """Masks and errors by the equations of the paper, with explicit inverses and a sort, in float64."""
    w = weight.double().numpy().T
    gram = x.double().numpy().T @ x.double().numpy()
    gram += 0.01 * np.trace(gram) / len(gram) * np.eye(len(gram))
    scale = np.sqrt(np.diag(gram))
    gram, w = gram / np.outer(scale, scale), w * scale[:, None]

    def project(matrix):
        order = np.argsort(np.abs(matrix), axis=None)
        result = matrix.copy()
        result.reshape(-1)[order[:zeros]] = 0
        return result

    rho, grown = 0.1, False
    d, v = project(w), np.zeros_like(w)
    support, kept = d != 0, w.size - zeros
    for iteration in range(1, 301):
        b = np.linalg.inv(gram + rho * np.eye(len(gram))) @ (gram @ w - v + rho * d)
        d = project(b + v / rho)
        v += rho * (b - d)
        if iteration % 3 == 0:
            change = ((d != 0) != support).sum()
            support = d != 0
            if change > 0.005 * kept:
                grown = True
                rho *= 1.3 if change > 0.1 * kept else 1.2
            else:
                assert grown, "the first rho was too large"
                if change == 0 or (iteration > 30 and change < 0.0003 * kept):
                    break
                rho *= 1.1
    return torch.from_numpy(project(b).T != 0), iteration


@pytest.mark.parametrize("seed", [0, 1])
def test_masks_are_those_of_a_plain_admm(seed):
    weight, x = layer(64, 48, seed=seed)
    target = Target(0.6)
    pruned = Alps().prune(weight, observed(x), target)
    mask, iterations = plain_admm(weight, x, round(0.6 * weight.numel()))
    assert pruned.notes["iterations"] == iterations
    assert int((mask != pruned.mask).sum()) <= 2


def test_inputs_without_correlation_leave_the_weights_as_they_are():
    weight, _ = layer(16, 12)
    x = torch.diag(torch.arange(1.0, 17.0))
    pruned = Alps(damping=1e-5).prune(weight, observed(x), Target(0.5))
    torch.testing.assert_close(pruned.weight, weight * pruned.mask, rtol=1e-4, atol=1e-6)
    # Scores are then |w|·‖x‖ over the whole matrix.
    assert torch.equal(pruned.mask, make("wanda", {"scope": "layer"}).prune(weight, observed(x), Target(0.5)).mask)


@pytest.mark.parametrize("target", [Target(0.5), Target(0.5, SparsityPattern(2, 4))], ids=str)
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("rank", [1, 3])
def test_inputs_of_low_rank_and_of_any_magnitude(rank, scale, target):
    weight, x = layer(32, 16)
    x = x[:rank] * scale
    x[:, 5] = 0
    pruned = Alps().prune(weight, observed(x), target)
    assert torch.isfinite(pruned.weight).all()
    assert int((pruned.weight == 0).sum()) == weight.numel() // 2
    wanda = make("wanda").prune(weight, observed(x), target)
    assert layer_error(weight, pruned.weight, x) < layer_error(weight, wanda.weight, x)


def test_without_inputs_magnitude_decides_and_it_is_noted():
    weight, _ = layer(16, 8)
    pruned = Alps().prune(weight, InputStatistics(16, frozenset({"gram"})), Target(0.5))
    assert pruned.notes["fallback"].startswith("magnitude")
    assert pruned.weight[pruned.mask].abs().min() > weight[~pruned.mask].abs().max()


def test_a_constant_matrix_gets_exactly_its_zeros():
    _, x = layer(16, 8)
    pruned = Alps().prune(torch.full((8, 16), 0.5), observed(x), Target(0.3))
    assert int((~pruned.mask).sum()) == round(0.3 * 128)


def test_matrices_of_one_input_share_the_eigenvectors(monkeypatch):
    weight, x = layer(32, 16)
    calls, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(matrix.dtype) or eigh(matrix))
    statistics = observed(x)
    for part in weight.split(8):
        Alps().prune(part, statistics, Target(0.5))
    assert calls == [torch.float64]


@pytest.mark.parametrize("options", [{"damping": 0.0}, {"rho": -1.0}, {"iterations": -1}])
def test_options_out_of_range(options):
    with pytest.raises(UsageError):
        Alps(**options)
