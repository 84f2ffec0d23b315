"""DSnoT, dynamic sparse no training: grow and prune by the expected error (Zhang et al. 2023, arXiv 2310.08915)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinfer.errors import UsageError
from thinfer.pruning.base import Need, Pruned, Target
from thinfer.pruning.refine.start import refuse_quantised
from thinfer.pruning.statistics import InputStatistics
from thinfer.pruning.wanda import scores


@dataclass(frozen=True, slots=True)
class DSnoT:
    """Brings the expected error of every output, e = Σ_j (w_j − v_j)·E[x_j], towards zero by exchanging weights.

    In each cycle an output takes back the pruned weight that lowers |e| most, relative to the variance of its input,
    and gives up the kept weight of least Wanda score among those that lower |e| too (for n:m: of least score in the
    group of the weight taken back). It stops when e would change its sign, or, unlike the published code, when |e|
    would rise, as it can for n:m. Weights taken back have their dense value; no other value changes.

    Attributes:
        cycles: most exchanges of an output.
        threshold: an output whose |e| is at most this is left alone; in units of the layer's outputs.
        power: exponent of the variance.

    Raises:
        UsageError: a negative number.

    Example:
        >>> inputs = InputStatistics(3, frozenset({"mean"}))
        >>> inputs.add(torch.tensor([[1.0, 1.0, 1.0], [1.2, 1.2, 0.8]]))
        >>> weight = torch.tensor([[2.0, -3.0, 1.0]])
        >>> start = Pruned(torch.tensor([[0.0, -3.0, 0.0]]), torch.tensor([[False, True, False]]))
        >>> DSnoT().refine(weight, start, inputs, Target(2 / 3)).mask.tolist()
        [[False, True, False]]
    """

    cycles: int = 50
    threshold: float = 0.1
    power: float = 1.0

    def __post_init__(self) -> None:
        for name in ("cycles", "threshold", "power"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be at least 0, not {getattr(self, name)}")

    @property
    def needs(self) -> frozenset[Need]:
        """Means and variances of the inputs."""
        return frozenset({"mean"})

    def refine(self, weight: Tensor, pruned: Pruned, inputs: InputStatistics, target: Target) -> Pruned:
        """Refine the mask of a pruned float32 matrix [outputs, inputs]."""
        refuse_quantised(pruned)
        mean, variance = inputs.mean.to(weight.device), inputs.variance.to(weight.device)
        values, mask = pruned.weight.clone(), pruned.mask.clone()
        gain = weight * mean
        # An input that does not vary is the surest to count on; the bound keeps its merit finite.
        merit = gain / variance.clamp_min(1e-6 * float(variance.mean()) or 1.0) ** self.power
        score = scores(weight, inputs)
        error = ((weight - values) @ mean).unsqueeze(1)
        sign = error.sign()
        # What has been exchanged once stays, as published; a dense zero cannot be taken back: it would stay a zero.
        growable, prunable = ~mask & (gain != 0), mask.clone()
        rows = torch.arange(len(weight), device=weight.device)
        active = torch.ones_like(rows, dtype=torch.bool)
        count = 0
        for _ in range(self.cycles):
            grow_merit, grow = torch.where(growable, merit * sign, -math.inf).max(1)
            loss = values * mean
            if target.pattern.structured:
                allowed = prunable & _same_group(grow, weight.shape[1], target.pattern.m)
            else:
                allowed = prunable & (loss * sign <= 0)
            prune_score, prune = torch.where(allowed, score, math.inf).min(1)
            after = error[:, 0] - gain[rows, grow] + loss[rows, prune]
            active &= (error[:, 0].abs() > self.threshold) & (after.sign() == sign[:, 0])
            active &= (after.abs() < error[:, 0].abs()) & (grow_merit > 0) & (prune_score < math.inf)
            if not bool(active.any()):
                break
            index, grow, prune = rows[active], grow[active], prune[active]
            values[index, grow] = weight[index, grow]
            values[index, prune] = 0.0
            mask[index, grow] = True
            mask[index, prune] = False
            growable[index, grow] = False
            prunable[index, prune] = False
            error[index, 0] = after[active]
            count += len(index)
        return Pruned(values, mask, pruned.notes | {"exchanges": count})


def _same_group(column: Tensor, columns: int, m: int) -> Tensor:
    """Whether a column lies in the n:m group of the row's chosen column, [outputs, inputs]."""
    return torch.arange(columns, device=column.device) // m == (column // m).unsqueeze(1)


METHOD = DSnoT
