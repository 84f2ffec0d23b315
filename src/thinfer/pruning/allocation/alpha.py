"""AlphaPruning: blocks whose weights have a heavier-tailed spectrum are pruned less (Lu et al. 2024, arXiv 2410.10912).

The empirical spectral density of a trained matrix, the density of the eigenvalues λ of WᵀW, has a tail λ^−α. A small α
marks strong correlations, learnt from the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from thinfer.errors import UsageError
from thinfer.pruning.allocation.budget import scaled, sizes
from thinfer.pruning.base import ModelView

Tail = Literal["peak", "median"]
_BINS = 100
# Eigenvalues below this share of the greatest are rounding errors of a matrix of lower rank.
_RANK = 1e-10


@dataclass(frozen=True, slots=True)
class Alpha:
    """Gives every block a rate that rises linearly with the mean α of its matrices.

    From the block of least α to that of greatest, rates run from 1 − ε to 1 + ε times one factor, chosen so that the
    mean over all weights is the sparsity asked for; none exceeds 1.

    Attributes:
        epsilon: ε.
        tail: where the tail begins: "peak", of the eigenvalues from 0.95 to 1.5 times the peak of the density over log
            λ, the one with the best fit by Kolmogorov–Smirnov distance; or "median".

    Raises:
        UsageError: ε not from 0 to below 1, or another tail.

    Example: ``Alpha().rates(view, 0.5)`` is ``{"model.layers.0.self_attn.q_proj": 0.43, ...}``.
    """

    epsilon: float = 0.3
    tail: Tail = "peak"

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise UsageError(f"alpha: epsilon must be at least 0 and below 1, not {self.epsilon}")
        if self.tail not in get_args(Tail):
            raise UsageError(f"alpha: tail is {self.tail!r}; choose one of {', '.join(get_args(Tail))}")

    def rates(self, view: ModelView, sparsity: float) -> dict[str, float]:
        """A rate for every block, the same for all of its matrices."""
        alphas = [self._mean(view, block) for block in view.blocks]
        known = [alpha for alpha in alphas if alpha is not None]
        low, high = min(known, default=0.0), max(known, default=0.0)
        rates: dict[str, float] = {}
        for block, alpha in zip(view.blocks, alphas, strict=True):
            position = (alpha - low) / (high - low) if alpha is not None and high > low else 0.5
            rates |= dict.fromkeys(block, 1 + self.epsilon * (2 * position - 1))
        return scaled(rates, sizes(view), sparsity)

    def _mean(self, view: ModelView, block: list[str]) -> float | None:
        alphas = [tail_exponent(view.weight(name), self.tail) for name in block]
        known = [alpha for alpha in alphas if alpha is not None]
        return sum(known) / len(known) if known else None


def tail_exponent(weight: Tensor, tail: Tail = "peak") -> float | None:
    """Hill's estimate of α, 1 + n / Σ ln(λ_i / λ_min), over the n eigenvalues λ ≥ λ_min of WᵀW; see `Alpha.tail`.

    None for a matrix whose spectrum has no tail: zero, of rank 1, or with all eigenvalues alike.

    Example:
        >>> round(tail_exponent(torch.diag(torch.tensor([1.0, 2.0, 4.0, 8.0])), "median"), 3)
        2.443
    """
    weight = weight.double()
    narrow = weight if weight.shape[0] <= weight.shape[1] else weight.T
    values = torch.linalg.eigvalsh(narrow @ narrow.T)
    values = values[values > max(float(values[-1]) * _RANK, 0.0)] if len(values) else values
    if len(values) < 2:
        return None
    logs = values.log()
    fits = [_fit(logs[start:]) for start in _starts(logs, tail)]
    distance, alpha = min(fits)
    return alpha if distance < 1 else None


def _starts(logs: Tensor, tail: Tail) -> list[int]:
    """Where among the rising ln λ the tail may begin."""
    last = len(logs) - 2
    if tail == "median":
        return [min(len(logs) // 2, last)]
    low, high = float(logs[0]), float(logs[-1])
    # The peak is the lower edge of the fullest bin, as published.
    peak = low + (high - low) / _BINS * int(torch.histc(logs, _BINS, low, high).argmax())
    inside = (logs >= peak + torch.tensor(0.95).log()) & (logs <= peak + torch.tensor(1.5).log())
    starts = inside.nonzero().squeeze(1).tolist()
    return [start for start in starts if start <= last] or [min(int((logs < peak).sum()), last)]


def _fit(logs: Tensor) -> tuple[float, float]:
    """Kolmogorov–Smirnov distance of a power law from these rising ln λ, and its α; 1 where there is none."""
    excess = logs - logs[0]
    n = len(logs)
    total = float(excess.sum())
    # Eigenvalues that are alike but for rounding are no tail.
    if total <= 1e-9 * n:
        return 1.0, 0.0
    alpha = 1 + n / total
    steps = torch.arange(n, dtype=logs.dtype, device=logs.device) / n
    return float((1 - (-(alpha - 1) * excess).exp() - steps).abs().max()), alpha


METHOD = Alpha
