"""OWL: blocks with more outliers are pruned less (Yin et al. 2023, arXiv 2310.05175)."""

from __future__ import annotations

from dataclasses import dataclass

from thinfer.errors import UsageError
from thinfer.pruning.allocation.budget import shifted, sizes
from thinfer.pruning.base import ModelView
from thinfer.pruning.wanda import scores


@dataclass(frozen=True, slots=True)
class Owl:
    """Gives every block a rate within ±λ of the sparsity, by its share of outlying weights.

    A weight is an outlier where its Wanda score |w|·‖x‖ exceeds `outlier` times the mean score of its block. The rates
    are shifted together so that the mean over all weights is the sparsity asked for.

    Attributes:
        strength: λ; the rates of the blocks spread over 2λ.
        outlier: how many times the mean makes an outlier (M of the paper).

    Raises:
        UsageError: λ outside 0 to 1, or a multiple that is not positive.

    Example: ``Owl().rates(view, 0.7)`` is ``{"model.layers.0.self_attn.q_proj": 0.66, ...}``.
    """

    strength: float = 0.08
    outlier: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1 or self.outlier <= 0:
            raise UsageError("owl: strength must lie between 0 and 1, and outlier must be above 0")

    def rates(self, view: ModelView, sparsity: float) -> dict[str, float]:
        """A rate for every block, the same for all of its matrices."""
        shares = [self._outliers(view, block) for block in view.blocks]
        low, high = min(shares, default=0.0), max(shares, default=0.0)
        width = high - low
        rates: dict[str, float] = {}
        for block, share in zip(view.blocks, shares, strict=True):
            position = (share - low) / width if width > 0 else 0.0
            rates |= dict.fromkeys(block, sparsity - 2 * self.strength * position)
        return shifted(rates, sizes(view), sparsity)

    def _outliers(self, view: ModelView, block: list[str]) -> float:
        """The block's share of outliers, 0 to 1."""
        # Twice through the block, so that the scores of only one matrix are held.
        total, count, outliers = 0.0, 0, 0
        for name in block:
            score = scores(view.weight(name), view.inputs(name))
            total, count = total + float(score.double().sum()), count + score.numel()
        for name in block:
            score = scores(view.weight(name), view.inputs(name))
            outliers += int((score > self.outlier * total / max(count, 1)).sum())
        return outliers / max(count, 1)


METHOD = Owl
