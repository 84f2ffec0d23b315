"""Thresholds q·σ: each matrix loses |w| < q·σ, with σ of its own weights and one q (Han et al. 2015).

With method "magnitude" and its scope "layer" exactly those weights go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinfer.pruning.allocation.global_threshold import rates_below
from thinfer.pruning.base import ModelView


@dataclass(frozen=True, slots=True)
class Sigma:
    """Rates by q·σ, with the q that gives the sparsity asked for.

    Example:
        >>> Sigma().rates(view, 0.5)  # doctest: +SKIP
        {'model.layers.0.mlp.up_proj': 0.51, ...}
    """

    def rates(self, view: ModelView, sparsity: float) -> dict[str, float]:
        """The share of each matrix's weights below q·σ; their zeros add up to round(sparsity · weights)."""
        return rates_below(view, _deviations, sparsity)


def _deviations(weight: Tensor) -> Tensor:
    """|w| / σ; σ is that of all weights of the matrix. Of a constant matrix the weights go last, unless they are 0."""
    return weight.abs() / weight.std(correction=0).clamp_min(torch.finfo(weight.dtype).tiny)


METHOD = Sigma
