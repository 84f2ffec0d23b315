"""Least squares on a mask: exact in enough steps, and no row ever gets worse."""

import pytest
import torch

from pruning.layers import layer, row_errors
from thinfer.pruning import least_squares
from thinfer.pruning.least_squares import fit_on_support


def start(seed=0):
    weight, x = layer(48, 20, tokens=300, seed=seed)
    mask = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return weight, x, mask


def test_enough_steps_solve_the_normal_equations():
    weight, x, mask = start()
    values = fit_on_support(weight, weight * mask, mask, x.T @ x, steps=300)
    assert not values[~mask].any()
    for row, kept, value in zip(weight.double(), mask, values.double(), strict=True):
        best = torch.linalg.lstsq(x.double()[:, kept], x.double() @ row).solution
        torch.testing.assert_close(value[kept], best, rtol=5e-3, atol=1e-4)


def test_every_step_helps_every_row():
    weight, x, mask = start(1)
    errors = [
        row_errors(weight, fit_on_support(weight, weight * mask, mask, x.T @ x, steps), x) for steps in (0, 1, 3, 9, 27)
    ]
    for more, fewer in zip(errors[1:], errors, strict=False):
        assert (more <= fewer * (1 + 1e-5)).all()
    assert errors[-1].sum() < 0.9 * errors[0].sum()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_singular_gram_matrix_makes_nothing_worse(rank):
    weight, x, mask = start(2)
    x = x[:rank]
    values = fit_on_support(weight, weight * mask, mask, x.T @ x, steps=100)
    assert torch.isfinite(values).all()
    assert values.abs().max() < 10 * weight.abs().max()
    assert (row_errors(weight, values, x) <= row_errors(weight, weight * mask, x) * (1 + 1e-5)).all()


def test_errors_come_from_the_gram_matrix():
    weight, x, mask = start(3)
    found = least_squares.row_errors(weight, weight * mask, x.T @ x)
    torch.testing.assert_close(found.double(), row_errors(weight, weight * mask, x), rtol=1e-4, atol=1e-6)
