"""What is recorded of the inputs of a matrix while a text runs through its block."""

from __future__ import annotations

import torch
from torch import Tensor

from thinfer.errors import CheckFailed
from thinfer.pruning.base import Need


class InputStatistics:
    """Sums over the tokens t of a matrix's inputs x[t, i]; float32, on the device of the inputs.

    Attributes:
        rows: tokens seen.
        square_sum: Σ_t x[t, i]², [inputs].
        value_sum: Σ_t x[t, i], [inputs]; zeros unless "mean" or "gram" was asked for.
        gram: Σ_t x[t, i] x[t, j], [inputs, inputs]; None unless asked for.

    Raises:
        CheckFailed: an input is NaN or infinite.

    Example:
        >>> statistics = InputStatistics(2, frozenset({"norm"}))
        >>> statistics.add(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        >>> statistics.norm.tolist()
        [5.0, 1.0]
    """

    def __init__(self, inputs: int, needs: frozenset[Need], device: torch.device | str = "cpu") -> None:
        self.rows = 0
        self.square_sum = torch.zeros(inputs, device=device)
        self.value_sum = torch.zeros(inputs, device=device)
        self.gram = torch.zeros(inputs, inputs, device=device) if "gram" in needs else None
        self._mean = bool(needs & {"mean", "gram"})

    def add(self, x: Tensor) -> None:
        """Count inputs [..., inputs]."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.rows += len(x)
        if self.gram is None:
            self.square_sum += x.square().sum(0)
        else:
            self.gram.addmm_(x.T, x)
            self.square_sum = self.gram.diagonal().clone()
        if self._mean:
            self.value_sum += x.sum(0)
        if not torch.isfinite(self.square_sum).all():
            raise CheckFailed(
                "an input of a layer is NaN or infinite on the calibration text; "
                "check the model's weights, or load it with --dtype float32"
            )

    @property
    def norm(self) -> Tensor:
        """Euclidean norm of each input over all tokens, [inputs]."""
        return self.square_sum.sqrt()

    @property
    def mean(self) -> Tensor:
        """Mean of each input, [inputs]."""
        return self.value_sum / max(self.rows, 1)

    @property
    def variance(self) -> Tensor:
        """Variance of each input (of the population), [inputs]."""
        return (self.square_sum / max(self.rows, 1) - self.mean.square()).clamp_min(0)
