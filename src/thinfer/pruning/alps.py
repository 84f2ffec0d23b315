"""ALPS: the mask by ADMM, its values by conjugate gradients (Meng et al. 2024, arXiv 2406.07831)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinfer.errors import UsageError
from thinfer.pruning.base import Need, Pruned, Target
from thinfer.pruning.least_squares import fit_on_support, row_errors
from thinfer.pruning.magnitude import masked, prune_unseen
from thinfer.pruning.masks import keep
from thinfer.pruning.statistics import InputStatistics

_CHECK_EVERY = 3
_SETTLED = 0.0003
_LEAST_ITERATIONS = 30
_HIGHEST_RHO = 1e6
# Below this the penalty is far smaller than the dampening and ADMM no longer couples B to the mask.
_LOWEST_RHO = 1e-4


@dataclass(frozen=True, slots=True)
class Alps:
    """Minimises ‖(W − B)X‖² over the matrices B of the sparsity asked for, all weights of the matrix at once.

    ADMM splits B from a sparse copy D; the penalty ρ that holds them together grows until the mask of D stays. The
    values on that mask are then improved by conjugate gradients.

    Attributes:
        damping: share of the mean of the diagonal of XXᵀ that is added to the diagonal.
        rho: first ρ; a fifth of it is tried where the mask hardly moves, and so on.
        iterations: most ADMM iterations.
        cg_steps: steps of conjugate gradients.

    Raises:
        UsageError: a damping or rho that is not positive, or a negative number of iterations or steps.

    Example:
        >>> inputs = InputStatistics(2, frozenset({"gram"}))
        >>> inputs.add(torch.tensor([[5.0, 0.0], [0.0, 1.0]]))
        >>> Alps().prune(torch.tensor([[1.0, 2.0]]), inputs, Target(0.5)).mask.tolist()
        [[True, False]]
    """

    damping: float = 0.01
    rho: float = 0.1
    iterations: int = 300
    cg_steps: int = 10

    def __post_init__(self) -> None:
        if not (self.damping > 0 and self.rho > 0):
            raise UsageError(f"damping and rho must be above 0, not {self.damping} and {self.rho}")
        if self.iterations < 0 or self.cg_steps < 0:
            raise UsageError("iterations and cg_steps must be at least 0")

    @property
    def needs(self) -> frozenset[Need]:
        """The Gram matrix of the inputs."""
        return frozenset({"gram"})

    def prune(self, weight: Tensor, inputs: InputStatistics, target: Target) -> Pruned:
        """Prune a float32 matrix [outputs, inputs]; by magnitude, and noted, where no input reached it."""
        unseen = prune_unseen(weight, inputs, target, "layer")
        if unseen is not None:
            return unseen
        dense = keep(weight.abs(), target, "layer")
        if bool(dense.all()) or not bool(dense.any()):
            return masked(weight, dense)
        spectrum: _Spectrum = inputs.derive(f"alps {self.damping}", lambda: _Spectrum.of(inputs, self.damping))
        spectrum = spectrum.to(weight.device)
        scaled = weight * spectrum.scale
        found, iterations, rho = self._admm(scaled, spectrum, target)
        # Where inputs hardly correlate the mask that ADMM starts from is the best one, and it may have left it.
        fits = [self._fit(scaled, matrix, spectrum.gram, target) for matrix in (found, scaled)]
        mask, values = min(fits, key=lambda fit: float(row_errors(scaled, fit[1], spectrum.gram).sum()))
        return Pruned(values / spectrum.scale, mask, {"iterations": iterations, "rho": rho})

    def _fit(self, weight: Tensor, matrix: Tensor, gram: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """The mask of the greatest values of a matrix, and values on it that start from these."""
        mask = keep(matrix.abs(), target, "layer")
        return mask, fit_on_support(weight, torch.where(mask, matrix, 0.0), mask, gram, self.cg_steps)

    def _admm(self, weight: Tensor, spectrum: _Spectrum, target: Target) -> tuple[Tensor, int, float]:
        """B (dense, near its projection), the number of iterations, and the last ρ."""
        rho = self.rho
        goal = weight @ spectrum.gram
        inverse = spectrum.inverse(rho)
        first = keep(weight.abs(), target, "layer")
        kept = int(first.sum())
        support, moved = first, False
        b, d, v = weight, torch.where(first, weight, 0.0), torch.zeros_like(weight)
        for iteration in range(1, self.iterations + 1):
            b = (goal - v).add_(d, alpha=rho) @ inverse
            d = torch.add(b, v, alpha=1 / rho)
            new = keep(d.abs(), target, "layer")
            d.mul_(new)
            v.add_(b, alpha=rho).sub_(d, alpha=rho)
            if iteration % _CHECK_EVERY:
                continue
            changed = int((new ^ support).sum())
            support = new
            # As published: the more the mask moves, the faster ρ may grow; where it has settled, ADMM is done.
            if changed > 0.005 * kept:
                moved = True
                rho *= 1.3 if changed > 0.1 * kept else 1.2
            elif moved:
                if not changed or (iteration > _LEAST_ITERATIONS and changed < _SETTLED * kept):
                    return b, iteration, rho
                rho *= 1.1
            else:
                rho /= 5
                if rho < _LOWEST_RHO:
                    return b, iteration, rho
                support, d, v = first, torch.where(first, weight, 0.0), torch.zeros_like(weight)
            rho = min(rho, _HIGHEST_RHO)
            inverse = spectrum.inverse(rho)
        return b, self.iterations, rho


@dataclass(frozen=True, slots=True)
class _Spectrum:
    """XXᵀ with dampening, scaled to a diagonal of ones, and its eigenvectors: one for all matrices of an input."""

    scale: Tensor
    gram: Tensor
    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, inputs: InputStatistics, damping: float) -> _Spectrum:
        assert inputs.gram is not None  # noqa: S101 - `needs` asks for it
        gram = inputs.gram.double()
        # Relative to the mean, so that inputs of any magnitude stay inside float32.
        gram = gram / gram.diagonal().mean()
        gram.diagonal().add_(damping)
        scale = gram.diagonal().sqrt()
        gram = gram / scale / scale.unsqueeze(1)
        values, vectors = torch.linalg.eigh(gram)
        return cls(scale.float(), gram.float(), values.clamp_min(0).float(), vectors.float())

    def to(self, device: torch.device) -> _Spectrum:
        return _Spectrum(*(tensor.to(device) for tensor in (self.scale, self.gram, self.values, self.vectors)))

    def inverse(self, rho: float) -> Tensor:
        """(gram + ρ)⁻¹, [inputs, inputs]."""
        return (self.vectors / (self.values + rho)) @ self.vectors.T


METHOD = Alps
