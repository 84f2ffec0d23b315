"""RIA: relative importance and activations (Zhang et al. 2024, "Plug-and-Play: An Efficient Post-training Pruning").

The paper's channel permutation for n:m is left out: its result keeps n of each m only in an order of the inputs that no
ordinary checkpoint can hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinfer.errors import UsageError
from thinfer.pruning.base import Need, Pruned, Target
from thinfer.pruning.magnitude import check_scope, masked, prune_unseen
from thinfer.pruning.masks import Scope, keep
from thinfer.pruning.statistics import InputStatistics


@dataclass(frozen=True, slots=True)
class Ria:
    """Keeps the weights of greatest (|w_ij| / Σ_i |w_ij| + |w_ij| / Σ_j |w_ij|)·‖x_j‖^power; none changes.

    A weight counts by its share of its column and of its row, so that no whole channel is lost.

    Attributes:
        power: exponent of the inputs' norm, 0 or more; 0.5 as published.
        scope: "layer" compares the weights of a whole matrix, as published; "row" those of one output.

    Raises:
        UsageError: another scope, or a negative power.

    Example:
        >>> inputs = InputStatistics(2, frozenset({"norm"}))
        >>> inputs.add(torch.tensor([[9.0, 1.0]]))
        >>> Ria().prune(torch.tensor([[1.0, -2.0]]), inputs, Target(0.5)).weight.tolist()
        [[1.0, 0.0]]
    """

    power: float = 0.5
    scope: Scope = "layer"

    def __post_init__(self) -> None:
        check_scope(self.scope)
        if not self.power >= 0:
            raise UsageError(f"power must be 0 or more, not {self.power}")

    @property
    def needs(self) -> frozenset[Need]:
        """Norms of the inputs."""
        return frozenset({"norm"})

    def prune(self, weight: Tensor, inputs: InputStatistics, target: Target) -> Pruned:
        """Prune a float32 matrix [outputs, inputs]; by magnitude, and noted, where no input reached it."""
        unseen = prune_unseen(weight, inputs, target, self.scope)
        if unseen is not None:
            return unseen
        size = weight.abs()
        tiny = torch.finfo(size.dtype).tiny  # a row or column of zeros: its weights count 0, not 0/0
        shares = size / size.sum(0).clamp_min(tiny) + size / size.sum(1, keepdim=True).clamp_min(tiny)
        return masked(weight, keep(shares * inputs.norm.to(weight.device) ** self.power, target, self.scope))


METHOD = Ria
