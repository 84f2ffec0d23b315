"""Values for a given mask that lower a layer's error ‖(W − V)X‖²: conjugate gradients, all rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

# A row whose squared gradient has fallen by this factor has converged; further steps would follow rounding errors.
_CONVERGED = 1e-10
# Added to the diagonal in the preconditioner: else weights of inputs that are nearly always 0 would move furthest.
_RIDGE = 0.01
# Curvature below this share of what the diagonal alone gives is rounding error: G is singular in that direction.
_FLAT = 1e-5


def row_errors(weight: Tensor, values: Tensor, gram: Tensor) -> Tensor:
    """Σ_t ((w − v) x_t)² of every row, [outputs], from the Gram matrix [inputs, inputs] of the inputs."""
    left = weight - values
    return (left @ gram).mul_(left).sum(1)


def fit_on_support(weight: Tensor, start: Tensor, mask: Tensor, gram: Tensor, steps: int) -> Tensor:
    """Values V, zero outside the mask, whose layer error tr((W − V) G (W − V)ᵀ) is at most that of the start.

    Conjugate gradients preconditioned by the diagonal of G. Few steps are enough, and as they stop early they hardly
    follow directions in which G, the Gram matrix of a short text, is nearly singular.

    Args:
        weight: dense matrix W, [outputs, inputs].
        start: where to start, [outputs, inputs], zero outside the mask.
        mask: True where a value may differ from zero, [outputs, inputs].
        gram: G, [inputs, inputs], symmetric and positive semidefinite.
        steps: steps to take.

    Example:
        >>> weight, mask = torch.tensor([[1.0, 1.0]]), torch.tensor([[True, False]])
        >>> fit_on_support(weight, weight * mask, mask, torch.tensor([[2.0, 1.0], [1.0, 2.0]]), steps=2).tolist()
        [[1.5, 0.0]]
    """
    diagonal = gram.diagonal() + _RIDGE * gram.diagonal().mean()
    inverse = torch.where(diagonal > 0, 1 / diagonal, 0.0)
    values = start.clone()
    residual = ((weight - values) @ gram).mul_(mask)
    direction = residual * inverse
    slope = (residual * direction).sum(1, keepdim=True)
    enough = slope * _CONVERGED
    for _ in range(steps):
        image = direction @ gram
        curvature = (direction * image).sum(1, keepdim=True)
        flat = _FLAT * (direction.square() @ diagonal).unsqueeze(1)
        length = torch.where((curvature > flat) & (slope > enough), slope / curvature, 0.0)
        values.addcmul_(direction, length)
        residual.addcmul_(image.mul_(mask), length, value=-1)
        scaled = residual * inverse
        slope_before, slope = slope, (residual * scaled).sum(1, keepdim=True)
        direction = scaled.addcmul_(direction, torch.where(slope_before > 0, slope / slope_before, 0.0))
    # Where G is singular, rounding can undo what a step has won.
    better = row_errors(weight, values, gram) < row_errors(weight, start, gram)
    return torch.where(better.unsqueeze(1), values, start)
