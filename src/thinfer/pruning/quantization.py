"""The levels that a quantised weight can take: integers of a few bits, a scale and a zero for each row or group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinfer.errors import UsageError


@dataclass(frozen=True, slots=True)
class Grid:
    """Equally spaced levels for each output and each group of inputs; 0 is always one of them.

    Attributes:
        scale: distance of levels, [groups, outputs].
        zero: the integer that stands for 0, [groups, outputs].
        low: least integer.
        high: greatest integer.
        group: inputs that share a scale.

    Example:
        >>> grid = Grid.fit(torch.tensor([[-7.0, 2.2]]), bits=4, symmetric=True, group=0)
        >>> grid.nearest(torch.tensor([2.2]), column=1).tolist()
        [2.0]
    """

    scale: Tensor
    zero: Tensor
    low: int
    high: int
    group: int

    @classmethod
    def fit(cls, weight: Tensor, bits: int, symmetric: bool, group: int) -> Grid:
        """Levels that reach from the least to the greatest weight of each row, or of each `group` inputs of it.

        Args:
            weight: [outputs, inputs], float32.
            bits: 2 to 8.
            symmetric: as many levels above 0 as below it; otherwise the levels cover no more than the weights (and 0).
            group: inputs that share a scale; 0 for all inputs.

        Raises:
            UsageError: the inputs are no multiple of `group`.
        """
        outputs, inputs = weight.shape
        group = group or inputs
        if inputs % group:
            raise UsageError(f"group {group}: a matrix has {inputs} inputs, no multiple of it; choose another group")
        groups = weight.reshape(outputs, -1, group)
        if symmetric:
            high = 2 ** (bits - 1) - 1
            scale = groups.abs().amax(2) / high
            low = -high
        else:
            low, high = 0, 2**bits - 1
            scale = (groups.amax(2).clamp_min(0) - groups.amin(2).clamp_max(0)) / high
        scale = torch.where(scale > 0, scale, 1.0).T.contiguous()
        zero = torch.zeros_like(scale) if symmetric else (-groups.amin(2).clamp_max(0).T / scale).round()
        return cls(scale, zero, low, high, group)

    def nearest(self, values: Tensor, column: int) -> Tensor:
        """The levels nearest to the values [outputs] of one input."""
        scale, zero = self.scale[column // self.group], self.zero[column // self.group]
        return ((values / scale).round().add_(zero).clamp_(self.low, self.high) - zero) * scale
