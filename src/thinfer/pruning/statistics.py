"""What is recorded of the inputs of a matrix while a text runs through its block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinfer.errors import CheckFailed
from thinfer.pruning.base import Need

_STRIP = 384
"""Rows of the Gram matrix summed at a time: small strips skip more of its lower half, large ones multiply faster."""


class InputStatistics:
    """Sums over the tokens t of a matrix's inputs x[t, i]; float32, on the device of the inputs.

    Matrices with the same input share one object, and with it what `derive` keeps.

    Attributes:
        rows: tokens seen.
        value_sum: Σ_t x[t, i], [inputs]; zeros unless "mean" or "gram" was asked for.

    Raises:
        CheckFailed: an input is NaN or infinite, or the square of one exceeds float32.

    Example:
        >>> statistics = InputStatistics(2, frozenset({"norm"}))
        >>> statistics.add(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        >>> statistics.norm.tolist()
        [5.0, 1.0]
    """

    def __init__(self, inputs: int, needs: frozenset[Need], device: torch.device | str = "cpu") -> None:
        self.rows = 0
        # Added up in float64, as long texts lose digits in float32.
        self._square_sum = torch.zeros(inputs, device=device, dtype=torch.float64)
        self.value_sum = torch.zeros(inputs, device=device)
        self._gram = torch.zeros(inputs, inputs, device=device) if "gram" in needs else None
        self._mirrored = True
        self._mean = bool(needs & {"mean", "gram"})
        # Σ_t (x − mean)² by Chan's update: the difference of two large sums has no correct digit where a mean is large.
        # Small vectors, so in float64.
        self._spread = torch.zeros(inputs, device=device, dtype=torch.float64) if "mean" in needs else None
        self._centre = torch.zeros(inputs, device=device, dtype=torch.float64)
        self._derived: dict[str, Any] = {}

    def add(self, x: Tensor) -> None:
        """Count inputs [..., inputs]."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        if self._spread is not None and len(x):
            self._spread += self._around_mean(x)
        self.rows += len(x)
        self._derived.clear()
        self._square_sum += torch.linalg.vector_norm(x, dim=0, dtype=torch.float64).square_()
        if self._gram is not None:
            # Only what lies on and right of the diagonal strips is summed; `gram` mirrors it.
            for start in range(0, len(self._gram), _STRIP):
                stop = start + _STRIP
                self._gram[start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:])
            self._mirrored = False
        if self._mean:
            self.value_sum += x.sum(0)
        if not torch.isfinite(self.square_sum).all():
            raise CheckFailed(
                "an input of a layer is NaN or infinite on the calibration text; "
                "check the model's weights, or load it with --dtype float32"
            )

    def derive(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make()` computes from these sums, computed once for all matrices that share them.

        Example: ``inputs.derive("cholesky 0.01", lambda: factor(inputs.gram))``.
        """
        if name not in self._derived:
            self._derived[name] = make()
        return self._derived[name]

    @property
    def gram(self) -> Tensor | None:
        """Σ_t x[t, i] x[t, j], [inputs, inputs], exactly symmetric; None unless asked for. Not to be written to."""
        if self._gram is not None and not self._mirrored:
            for start in range(0, len(self._gram), _STRIP):
                stop = start + _STRIP
                square = self._gram[start:stop, start:stop]
                square.copy_(square.triu() + square.triu(1).T)
                self._gram[stop:, start:stop] = self._gram[start:stop, stop:].T
            self._mirrored = True
        return self._gram

    @property
    def square_sum(self) -> Tensor:
        """Σ_t x[t, i]², [inputs]."""
        return self._square_sum.float()

    @property
    def norm(self) -> Tensor:
        """Euclidean norm of each input over all tokens, [inputs]."""
        return self._square_sum.sqrt().float()

    @property
    def mean(self) -> Tensor:
        """Mean of each input, [inputs]."""
        return self.value_sum / max(self.rows, 1)

    @property
    def variance(self) -> Tensor:
        """Variance of each input (of the population), [inputs].

        Where "mean" was not asked for it comes from the sums, and has few correct digits where the mean is large.
        """
        if self._spread is None:
            return (self.square_sum / max(self.rows, 1) - self.mean.square()).clamp_min(0)
        return (self._spread / max(self.rows, 1)).float()

    def _around_mean(self, x: Tensor) -> Tensor:
        """What a batch adds to Σ (x − mean)² of all rows, [inputs]; moves the mean."""
        centre = x.mean(0)
        offset = centre.double() - self._centre
        share = len(x) / (self.rows + len(x))
        self._centre += share * offset
        return (x - centre).square_().sum(0).double() + offset.square() * (share * self.rows)
