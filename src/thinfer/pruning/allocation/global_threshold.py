"""One threshold on |w| for all matrices: each loses what lies below it (global magnitude pruning).

With method "magnitude" and its scope "layer" exactly the smallest weights of the model go. The rate of a matrix may be
anything up to 1: a model whose matrices differ much in scale loses some of them wholly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinfer.errors import CheckFailed
from thinfer.pruning.base import ModelView
from thinfer.pruning.masks import zero_count

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and width in bits of the digits of a float32 of at least 0, read as an integer (its sign bit is 0)."""


@dataclass(frozen=True, slots=True)
class GlobalThreshold:
    """Rates by one threshold on the magnitudes of all weights.

    Example:
        >>> GlobalThreshold().rates(view, 0.5)  # doctest: +SKIP
        {'model.layers.0.mlp.up_proj': 0.47, ...}
    """

    def rates(self, view: ModelView, sparsity: float) -> dict[str, float]:
        """The share of each matrix's weights below the threshold; their zeros add up to round(sparsity · weights)."""
        return rates_below(view, torch.abs, sparsity)


def rates_below(view: ModelView, score: Callable[[Tensor], Tensor], sparsity: float) -> dict[str, float]:
    """The share of each matrix whose scores lie below one threshold, chosen so that the zeros are exact in number.

    The threshold is found digit by digit, as in a radix sort: each matrix is read three times, and only one is held.
    Weights at the threshold are taken from the first matrices.

    Args:
        view: the model.
        score: scores of at least 0 of a float32 matrix, in its shape.
        sparsity: of all matrices together, 0 to 1.

    Raises:
        CheckFailed: a score is NaN.
        UsageError: a sparsity outside 0 to 1.
    """
    names = [name for block in view.blocks for name in block]
    sizes = dict.fromkeys(names, 0)
    below = dict.fromkeys(names, 0)
    at: dict[str, int] = {}
    prefix, zeros = 0, 0
    for shift, width in _DIGITS:
        counts: dict[str, Tensor] = {}
        for name in names:
            keys = _sortable(name, score(view.weight(name)))
            sizes[name] = keys.numel()
            digits = keys[keys >> (shift + width) == prefix] >> shift & (1 << width) - 1
            counts[name] = torch.bincount(digits, minlength=1 << width).cpu()
        zeros = zero_count(sum(sizes.values()), sparsity)
        total = torch.stack(list(counts.values())).sum(0).cumsum(0)
        digit = int(torch.searchsorted(total, zeros - sum(below.values())))
        for name in names:
            below[name] += int(counts[name][:digit].sum())
            at[name] = int(counts[name][digit])
        prefix = prefix << width | digit
    left = zeros - sum(below.values())
    for name in names:
        taken = min(at[name], left)
        below[name] += taken
        left -= taken
    return {name: below[name] / max(sizes[name], 1) for name in names}


def _sortable(name: str, scores: Tensor) -> Tensor:
    """The bits of the scores as integers: those of floats of at least 0 are ordered as the floats are."""
    if torch.isnan(scores).any():
        raise CheckFailed(f"{name} holds NaN weights; check the model, or load it with --dtype float32")
    return scores.float().reshape(-1).contiguous().view(torch.int32)


METHOD = GlobalThreshold
