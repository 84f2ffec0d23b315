"""Which weights are kept, given a score for each: exact numbers of zeros, and one rule for ties."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.base import Target

Scope = Literal["row", "layer"]
"""What competes: the weights of one row (an output), or those of the whole matrix."""


def keep(scores: Tensor, target: Target, scope: Scope = "row") -> Tensor:
    """Mask [outputs, inputs] of the weights to keep: those of the highest scores, as many as the target says.

    Of equal scores the one of the lower index is pruned first (a lower column; in a whole matrix, a lower row first).

    Args:
        scores: [outputs, inputs].
        target: n:m keeps n of each m in a row, whatever the sparsity and the scope are; without a pattern there are
            exactly round(sparsity · size) zeros.
        scope: "row" prunes all rows alike; rows that must have one zero more are spread evenly.

    Raises:
        CheckFailed: a score is NaN or infinite.
        UsageError: a sparsity outside 0 to 1, or inputs that are no multiple of m.

    Example:
        >>> keep(torch.tensor([[3.0, 1.0, 1.0, 2.0]]), Target(0.25)).tolist()
        [[True, False, True, True]]
    """
    rows, columns = scores.shape
    if target.pattern.structured:
        return keep_n_of_m(scores, target.pattern)
    total = zero_count(scores.numel(), target.sparsity)
    if scope == "layer":
        return keep_highest(scores.reshape(1, -1), total).reshape(rows, columns)
    steps = torch.arange(rows + 1, device=scores.device) * total // max(rows, 1)
    counts = steps.diff()
    kept = torch.empty_like(scores, dtype=torch.bool)
    for count in sorted(set(counts.tolist())):
        group = counts == count
        kept[group] = keep_highest(scores[group], count)
    return kept


def keep_n_of_m(scores: Tensor, pattern: SparsityPattern) -> Tensor:
    """Mask of the n highest of each m scores in a row; of equal scores the one of the lower index is pruned first.

    Raises:
        CheckFailed: a score is NaN or infinite.
        UsageError: the number of inputs is no multiple of m.
    """
    rows, columns = scores.shape
    check_fits(columns, pattern)
    groups = scores.reshape(-1, pattern.m)
    return keep_highest(groups, pattern.m - pattern.n).reshape(rows, columns)


def keep_highest(scores: Tensor, zeros: int) -> Tensor:
    """Mask of all but the `zeros` lowest scores of each row; of equal scores the lower column is pruned first.

    Raises:
        CheckFailed: a score is NaN or infinite.
    """
    if not torch.isfinite(scores).all():
        raise CheckFailed(
            "a weight, or the score of a weight, is NaN or infinite; "
            "check the model's weights, or load it with --dtype float32"
        )
    if zeros == 0 or scores.numel() == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    # Not a sort: a selection is several times quicker, and ties, which it leaves open, are settled here.
    threshold = scores.kthvalue(zeros, dim=1, keepdim=True).values
    kept = scores > threshold
    spare = scores.shape[1] - zeros - kept.sum(dim=1, keepdim=True)
    if spare.any():
        ties = scores == threshold
        kept |= ties & (ties.flip(1).cumsum(1, dtype=torch.int32).flip(1) <= spare)
    return kept


def check_fits(inputs: int, pattern: SparsityPattern) -> None:
    """UsageError where a matrix with so many inputs cannot follow the pattern."""
    if pattern.structured and inputs % pattern.m:
        raise UsageError(
            f"pattern {pattern}: a matrix has {inputs} inputs, no multiple of {pattern.m}; "
            "choose another pattern, or leave this matrix out"
        )


def zero_count(size: int, sparsity: float) -> int:
    """The number of zeros that a sparsity from 0 to 1 means among `size` weights: the nearest integer.

    Raises:
        UsageError: a sparsity outside 0 to 1.
    """
    if not 0 <= sparsity <= 1:
        raise UsageError(f"sparsity must lie between 0 and 1, not {sparsity}")
    return round(sparsity * size)
