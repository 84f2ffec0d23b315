"""SparseGPT: input after input is pruned, and those that follow make up for it (Frantar, Alistarh 2023, 2301.00774).

The layer error is tr(E G Eᵀ), where E are the weights minus the pruned ones and G is the Gram matrix of the inputs. The
paper works with the Cholesky factor of G⁻¹. Here G = R Rᵀ is factored with R upper triangular, which is the same
arithmetic (R⁻¹ is the paper's factor) without an inverse: the error is ‖E R‖², column j of which is
E_j R_jj + Σ_{i<j} E_i R_ij, so the best value of a weight, once the inputs before it are settled, is
w_j + Σ_{i<j} E_i C_ij with C = R / diag(R), and to prune it then costs its square times R_jj².
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.base import Need, Pruned, Target
from thinfer.pruning.magnitude import prune_unseen
from thinfer.pruning.masks import check_fits, keep_highest, keep_n_of_m, zero_count
from thinfer.pruning.quantization import Grid
from thinfer.pruning.statistics import InputStatistics

_STRONGEST_DAMPING = 1e3
_LEAST_PIVOT = 1e-6
"""Squared pivots below this share of the mean of the diagonal are rounding errors of float32."""
_DEAD = 1e-8
"""On the diagonal of an input that was always 0: to prune its weights costs nearly nothing, so they go first."""


@dataclass(frozen=True, slots=True)
class SparseGpt:
    """Prunes and, with `bits`, quantises the inputs of a matrix in turn; the later weights compensate for each.

    Attributes:
        block: inputs whose mask is chosen at once, over all rows (n:m chooses m at a time).
        damping: share of the mean of the Gram matrix's diagonal that is added to the diagonal; ten times as much, again
            and again, while the matrix is not positive definite. The report holds what was used.
        bits: 0 keeps floating point; 2 to 8 round the kept weights to that many bits as they are settled, so that the
            later ones compensate for this too. The mask is that of bits = 0.
        symmetric: as many levels above 0 as below it.
        group: inputs that share a scale; 0 for a scale for each output.

    Raises:
        UsageError: an option out of its range.

    Example:
        >>> inputs = InputStatistics(2, frozenset({"gram"}))
        >>> inputs.add(torch.tensor([[1.0, 1.0]]))
        >>> pruned = SparseGpt(damping=1e-4).prune(torch.tensor([[1.0, 2.0]]), inputs, Target(0.5))
        >>> [round(w, 2) for w in pruned.weight[0].tolist()]
        [0.0, 3.0]
    """

    block: int = 128
    damping: float = 0.01
    bits: int = 0
    symmetric: bool = False
    group: int = 0

    def __post_init__(self) -> None:
        if self.block < 1:
            raise UsageError(f"block must be at least 1, not {self.block}")
        if not 0 <= self.damping <= _STRONGEST_DAMPING:
            raise UsageError(f"damping must lie between 0 and {_STRONGEST_DAMPING:g}, not {self.damping}")
        if self.bits and not 2 <= self.bits <= 8:
            raise UsageError(f"bits must be 0 (floating point) or 2 to 8, not {self.bits}")
        if self.group < 0:
            raise UsageError(f"group must be 0 or more, not {self.group}")
        if not self.bits and (self.group or self.symmetric):
            raise UsageError("group and symmetric belong to quantisation: give bits as well, such as bits=4")

    @property
    def needs(self) -> frozenset[Need]:
        """The Gram matrix of the inputs."""
        return frozenset({"gram"})

    def prune(self, weight: Tensor, inputs: InputStatistics, target: Target) -> Pruned:
        """Prune a float32 matrix [outputs, inputs].

        A matrix that no input reached is pruned by magnitude (and not quantised), and the report says so. Weights of an
        input that was always 0 are pruned first; those that need not go keep their values.

        Raises:
            CheckFailed: the weights or the Gram matrix hold NaN or infinities.
            UsageError: the number of inputs is no multiple of m, or of the group.
        """
        check_fits(weight.shape[1], target.pattern)  # here: the sweep sees a block of the inputs at a time
        unseen = prune_unseen(weight, inputs, target, "layer")
        if unseen is not None:
            return unseen
        name = f"sparsegpt {self.damping}"
        factor: _Factor = inputs.derive(name, lambda: _factor(_gram(inputs), self.damping))
        pruned = _sweep(weight, factor, target, self.block)
        if self.bits:
            # Levels that end where the dense weights end would clip those that grow to compensate; so the pruned ones
            # say how far the levels reach, and their mask stays.
            grid = Grid.fit(pruned.weight, self.bits, self.symmetric, self.group)
            pruned = _sweep(weight, factor, target, self.block, pruned.mask, grid)
            pruned.notes["bits"] = self.bits
            pruned.notes["kept_but_rounded_to_zero"] = int((pruned.mask & (pruned.weight == 0)).sum())
        pruned.notes["damping"] = factor.damping
        return pruned


@dataclass(frozen=True, slots=True)
class _Factor:
    """R of G = R Rᵀ: `coupling` is R / diag(R) [inputs, inputs], `cost` is diag(R)² [inputs], G's mean diagonal 1."""

    coupling: Tensor
    cost: Tensor
    damping: float


def _gram(inputs: InputStatistics) -> Tensor:
    if inputs.gram is None:
        raise ValueError("SparseGPT was given statistics without the Gram matrix that it needs")
    return inputs.gram


def _factor(gram: Tensor, damping: float) -> _Factor:
    """The damped factor; more damping than asked for where the Gram matrix is not positive definite without."""
    # float64: the sum of large diagonals may exceed float32.
    diagonal = gram.diagonal().double()
    mean = float(diagonal.mean())
    live = gram.diagonal() > 0
    while damping <= _STRONGEST_DAMPING and math.isfinite(mean):
        # torch factors as L Lᵀ with L lower; R is L of the matrix with its inputs in reverse order, turned back.
        damped = gram.flip(0, 1).div_(mean)
        damped.diagonal().copy_(torch.where(live, diagonal / mean + damping, _DEAD).flip(0))
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped  # at most two matrices of this size besides the Gram matrix are held
        upper = lower.flip(0, 1)
        del lower
        pivots = upper.diagonal().clone()
        if not failed and bool((pivots[live].square() > _LEAST_PIVOT).all()):
            return _Factor(upper.div_(pivots), pivots.square(), damping)
        damping = max(damping * 10, 1e-4)
    raise CheckFailed(
        "the Gram matrix of a layer's inputs is not positive definite under any damping; "
        "load the model with --dtype float32, or choose another method, such as wanda"
    )


def _sweep(
    weight: Tensor, factor: _Factor, target: Target, block: int, mask: Tensor | None = None, grid: Grid | None = None
) -> Pruned:
    """All inputs in turn, with this mask if there is one; rounded to the levels of a grid, if there is one."""
    # Everything is held transposed, [inputs, outputs], so that an input is contiguous.
    inputs, outputs = weight.T.shape
    pattern = target.pattern
    if pattern.structured:
        block = max(block - block % pattern.m, pattern.m)
    dense = weight.T.contiguous()
    values, errors = torch.empty_like(dense), torch.empty_like(dense)
    kept = torch.empty_like(dense, dtype=torch.bool) if mask is None else mask.T.contiguous()
    coupling = factor.coupling.to(weight.device)
    cost = factor.cost.to(weight.device)[:, None]
    for start in range(0, inputs, block):
        stop = min(start + block, inputs)
        # What the blocks before demand of this one; within it, each chunk adds what the chunks before it demand.
        demanded = torch.addmm(dense[start:stop], coupling[:start, start:stop].T, errors[:start])
        chunk = pattern.m or block
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            part = slice(first, last)
            wanted = demanded[first - start : last - start]
            if first > start:
                wanted = torch.addmm(wanted, coupling[start:first, part].T, errors[start:first])
            if mask is None:
                scores = _best(dense[part], wanted, coupling[part, part]).square_().mul_(cost[part])
                kept[part] = _choose(scores.T, pattern, _zeros_between(first, last, outputs, target.sparsity)).T
            for column in range(first, last):
                best = torch.addmv(wanted[column - first], errors[first:column].T, coupling[first:column, column])
                if grid is not None:
                    best = grid.nearest(best, column)
                torch.mul(best, kept[column], out=values[column])
                torch.sub(dense[column], values[column], out=errors[column])
    final = kept.T.contiguous()
    # where, not the products above: those leave negative zeros.
    return Pruned(torch.where(final, values.T, 0.0), final)


def _best(dense: Tensor, wanted: Tensor, coupling: Tensor) -> Tensor:
    """The best weights of a chunk [chunk, outputs] were none of it pruned: E C = −(wanted − dense) solved for E."""
    change: Tensor = torch.linalg.solve_triangular(coupling.T, wanted - dense, upper=False, unitriangular=True)
    return dense + change


def _choose(scores: Tensor, pattern: SparsityPattern, zeros: int) -> Tensor:
    """The mask of a chunk, [outputs, chunk]."""
    if pattern.structured:
        return keep_n_of_m(scores, pattern)
    return keep_highest(scores.reshape(1, -1), zeros).reshape(scores.shape)


def _zeros_between(first: int, last: int, outputs: int, sparsity: float) -> int:
    """Zeros of the inputs first to last − 1, so that those of all chunks add up to the exact number."""
    return zero_count(last * outputs, sparsity) - zero_count(first * outputs, sparsity)


METHOD = SparseGpt
