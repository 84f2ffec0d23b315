"""Magnitude pruning: the weights of least absolute value go (Han et al. 2015, "Learning both Weights and Connections").

With `allocation` "global-threshold" or "sigma" and scope "layer" it is pruning by one threshold, or by q·σ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from thinfer.errors import UsageError
from thinfer.pruning.base import Need, Pruned, Target
from thinfer.pruning.masks import Scope, keep
from thinfer.pruning.statistics import InputStatistics


@dataclass(frozen=True, slots=True)
class Magnitude:
    """Keeps the weights of greatest |w|.

    Attributes:
        scope: "layer" compares the weights of a whole matrix, as published; "row" those of one output.

    Raises:
        UsageError: another scope.

    Example:
        >>> Magnitude().prune(torch.tensor([[1.0, -2.0]]), InputStatistics(2, frozenset()), Target(0.5)).weight.tolist()
        [[0.0, -2.0]]
    """

    scope: Scope = "layer"

    def __post_init__(self) -> None:
        check_scope(self.scope)

    @property
    def needs(self) -> frozenset[Need]:
        """Nothing."""
        return frozenset()

    def prune(self, weight: Tensor, inputs: InputStatistics, target: Target) -> Pruned:
        """Prune a float32 matrix [outputs, inputs]; the inputs do not matter."""
        return masked(weight, keep(weight.abs(), target, self.scope))


def prune_unseen(weight: Tensor, inputs: InputStatistics, target: Target, scope: Scope) -> Pruned | None:
    """The matrix pruned by magnitude, with a note, where no input reached it; None where one did.

    A matrix without inputs (an expert that the calibration text never chose) has nothing that could rank its weights:
    every score that uses the inputs is 0, and the zeros would fall on the first columns.
    """
    if inputs.rows and bool(inputs.square_sum.any()):
        return None
    pruned = Magnitude(scope).prune(weight, inputs, target)
    pruned.notes["fallback"] = "magnitude: no input but zeros reached this matrix on the calibration text"
    return pruned


def masked(weight: Tensor, kept: Tensor) -> Pruned:
    """A copy of the matrix with the other weights set to zero, and the mask."""
    return Pruned(torch.where(kept, weight, 0.0), kept)


def check_scope(scope: str) -> None:
    """UsageError unless it is one of Scope."""
    if scope not in get_args(Scope):
        raise UsageError(f"scope is {scope!r}; choose one of {', '.join(get_args(Scope))}")


METHOD = Magnitude
