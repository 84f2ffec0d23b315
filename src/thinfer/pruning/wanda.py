"""Wanda: weights ranked by magnitude times the norm of their input (Sun et al. 2023, arXiv 2306.11695)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinfer.pruning.base import Need, Pruned, Target
from thinfer.pruning.magnitude import check_scope, masked, prune_unseen
from thinfer.pruning.masks import Scope, keep
from thinfer.pruning.statistics import InputStatistics


@dataclass(frozen=True, slots=True)
class Wanda:
    """Keeps the weights of greatest |w_ij|·‖x_j‖; the others become 0, and none changes.

    Attributes:
        scope: "row" compares the weights of one output, as published; "layer" those of the whole matrix.

    Raises:
        UsageError: another scope.

    Example:
        >>> import torch
        >>> inputs = InputStatistics(2, frozenset({"norm"}))
        >>> inputs.add(torch.tensor([[5.0, 1.0]]))
        >>> Wanda().prune(torch.tensor([[1.0, -2.0]]), inputs, Target(0.5)).weight.tolist()
        [[1.0, 0.0]]
    """

    scope: Scope = "row"

    def __post_init__(self) -> None:
        check_scope(self.scope)

    @property
    def needs(self) -> frozenset[Need]:
        """Norms of the inputs."""
        return frozenset({"norm"})

    def prune(self, weight: Tensor, inputs: InputStatistics, target: Target) -> Pruned:
        """Prune a float32 matrix [outputs, inputs]; by magnitude, and noted, where no input reached it."""
        unseen = prune_unseen(weight, inputs, target, self.scope)
        return unseen or masked(weight, keep(scores(weight, inputs), target, self.scope))


def scores(weight: Tensor, inputs: InputStatistics) -> Tensor:
    """Wanda's score |w_ij|·‖x_j‖ of every weight, [outputs, inputs]."""
    return weight.abs() * inputs.norm.to(weight.device)


METHOD = Wanda
