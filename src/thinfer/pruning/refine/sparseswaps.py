"""SparseSwaps: kept weights exchanged for pruned ones while that lowers the error (Zimmer et al. 2025, 2512.10922).

With r = w − v the difference of a row from the dense one and c = G r, giving up the kept weight p and taking back the
pruned weight u with the value x changes the row's error rᵀ G r by exactly

    Δ_pu = a_p + b_u − 2 v_p x G_pu,   a_p = 2 v_p c_p + v_p² G_pp,   b_u = −2 x c_u + x² G_uu.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UsageError
from thinfer.pruning.base import Need, Pruned, Target
from thinfer.pruning.least_squares import fit_on_support, row_errors
from thinfer.pruning.refine.start import refuse_quantised
from thinfer.pruning.statistics import InputStatistics

# Elements of one chunk's temporaries: a few megabytes, which stay in the cache.
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class SparseSwaps:
    """Takes, in every row at once, swap after swap until none is left that lowers the row's error.

    A row, and an n:m group, keeps as many weights as before, and no row's error rises.

    Attributes:
        swaps: most swaps of a row.
        candidates: a step takes the best swap that involves one of so many weights that are best to take back alone, or
            to give up alone. Only where there is none are all pairs of the row compared, so the result is the same
            kind of optimum for any number; 0 always compares all pairs.
        tolerance: a swap must lower the error of its row by more than this share of it.
        reconstruct: whether weights get new values: least squares before and after the swaps, and a weight taken back
            gets the value that is best for its row. None: only where the pruned matrix already has other values than
            the dense one, as SparseGPT's has; without new values a mask is refined as published.
        cg_steps: steps of conjugate gradients for the least squares.

    Raises:
        UsageError: a negative number.

    Example:
        >>> inputs = InputStatistics(2, frozenset({"gram"}))
        >>> inputs.add(torch.tensor([[5.0, 0.0], [0.0, 1.0]]))
        >>> weight = torch.tensor([[1.0, 2.0]])
        >>> start = Pruned(torch.tensor([[0.0, 2.0]]), torch.tensor([[False, True]]))
        >>> SparseSwaps().refine(weight, start, inputs, Target(0.5)).weight.tolist()
        [[1.0, 0.0]]
    """

    swaps: int = 100
    candidates: int = 8
    tolerance: float = 1e-5
    reconstruct: bool | None = None
    cg_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("swaps", "candidates", "tolerance", "cg_steps"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be at least 0, not {getattr(self, name)}")

    @property
    def needs(self) -> frozenset[Need]:
        """The Gram matrix of the inputs."""
        return frozenset({"gram"})

    def refine(self, weight: Tensor, pruned: Pruned, inputs: InputStatistics, target: Target) -> Pruned:
        """Refine the mask (and, where it says so, the values) of a pruned float32 matrix [outputs, inputs]."""
        refuse_quantised(pruned)
        assert inputs.gram is not None  # noqa: S101 - `needs` asks for it
        gram = inputs.gram.to(weight.device)
        mean = float(gram.diagonal().mean())
        if mean == 0:
            return Pruned(pruned.weight, pruned.mask, pruned.notes | {"swaps": 0})
        # Relative to the mean, so that squares of inputs of any magnitude stay inside float32.
        gram = gram / mean
        mask = pruned.mask.clone()
        reconstruct = self.reconstruct
        if reconstruct is None:
            reconstruct = not torch.equal(pruned.weight, torch.where(mask, weight, 0.0))
        values = pruned.weight.clone()
        if reconstruct:
            values = fit_on_support(weight, values, mask, gram, self.cg_steps)
        rows = _Rows(weight, values, mask, gram, target.pattern, reconstruct)
        count = rows.swap(self.swaps, self.candidates, self.tolerance)
        if reconstruct:
            values = fit_on_support(weight, values, mask, gram, self.cg_steps)
        before = float(row_errors(weight, pruned.weight, gram).sum())
        after = float(row_errors(weight, values, gram).sum())
        notes: dict[str, float | int | str] = {
            "swaps": count,
            "swaps_error_ratio": after / before if before > 0 else 1.0,
        }
        return Pruned(values, mask, pruned.notes | notes)


@dataclass(slots=True)
class _Rows:
    """The rows of a matrix while weights are swapped; `values` and `mask` are changed in place."""

    weight: Tensor
    values: Tensor
    mask: Tensor
    gram: Tensor
    pattern: SparsityPattern
    reconstruct: bool
    pull: Tensor = field(init=False)
    """c = G (w − v) of every row, [outputs, inputs]."""
    errors: Tensor = field(init=False)
    diagonal: Tensor = field(init=False)

    def __post_init__(self) -> None:
        left = self.weight - self.values
        self.pull = left @ self.gram
        self.errors = (left * self.pull).sum(1)
        self.diagonal = self.gram.diagonal()

    def swap(self, most: int, candidates: int, tolerance: float) -> int:
        """Swap until no row has a swap left; returns how many there were."""
        active = torch.arange(len(self.weight), device=self.weight.device)
        count = 0
        for _ in range(most):
            if not len(active):
                break
            delta, give, take = self._search(active, candidates)
            good = delta < -tolerance * self.errors[active]
            if candidates and not self.pattern.structured and not bool(good.all()):
                missed = (~good).nonzero().squeeze(1)
                delta[missed], give[missed], take[missed] = self._search(active[missed], 0)
                good = delta < -tolerance * self.errors[active]
            active = active[good]
            self._apply(active, give[good], take[good])
            count += len(active)
        return count

    def _search(self, rows: Tensor, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
        """Best Δ of each of these rows, and the columns to give up and to take back; Δ is inf where there is none."""
        columns = self.weight.shape[1]
        find: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
        if self.pattern.structured:
            find, width = self._in_groups, columns * self.pattern.m
        elif candidates and 2 * candidates < columns:
            find, width = (lambda part: self._among(part, candidates)), columns * candidates
        else:
            find, width = self._everywhere, columns * columns
        parts = [find(part) for part in torch.split(rows, max(_CHUNK // width, 1))]
        delta, give, take = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return delta, give, take

    def _alone(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """a, b (inf where a weight cannot be given up or taken back), −2v, and the values x to take back."""
        v, c, mask = self.values[rows], self.pull[rows], self.mask[rows]
        a = torch.where(mask, v * (2 * c + v * self.diagonal), math.inf)
        x = self._value(c, self.diagonal) if self.reconstruct else self.weight[rows]
        # A weight taken back as zero would add a zero to the budget.
        b = torch.where(mask | (x == 0), math.inf, x * (x * self.diagonal - 2 * c))
        return a, b, -2 * v, x

    def _everywhere(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, v, x = self._alone(rows)
        # [rows, give, take]; a and b are infinite where a pair is impossible, so no gathering is needed.
        delta = (self.gram * v.unsqueeze(2)).mul_(x.unsqueeze(1)).add_(b.unsqueeze(1)).add_(a.unsqueeze(2))
        best, index = delta.flatten(1).min(1)
        return best, index // self.gram.shape[0], index % self.gram.shape[0]

    def _among(self, rows: Tensor, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
        a, b, v, x = self._alone(rows)
        take, give = (score.topk(candidates, largest=False).indices for score in (b, a))
        by_take = self._partners(take, b, x, a, v)
        by_give = self._partners(give, a, v, b, x)
        first = by_take[0] <= by_give[0]
        return (
            torch.where(first, by_take[0], by_give[0]),
            torch.where(first, by_take[2], by_give[1]),
            torch.where(first, by_take[1], by_give[2]),
        )

    def _partners(
        self, chosen: Tensor, cost: Tensor, factor: Tensor, other_cost: Tensor, other_factor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Best Δ that involves one of the chosen columns [rows, k], that column, and its partner."""
        delta = self.gram[chosen].mul_(other_factor.unsqueeze(1)).mul_(factor.gather(1, chosen).unsqueeze(2))
        best, partner = delta.add_(other_cost.unsqueeze(1)).min(2)
        best, index = (best + cost.gather(1, chosen)).min(1, keepdim=True)
        return best.squeeze(1), chosen.gather(1, index).squeeze(1), partner.gather(1, index).squeeze(1)

    def _in_groups(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self.pattern.m
        a, b, v, x = (tensor.reshape(len(rows), -1, m) for tensor in self._alone(rows))
        groups = len(self.gram) // m
        blocks = self.gram.reshape(groups, m, groups, m).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        delta = (blocks * v.unsqueeze(3)).mul_(x.unsqueeze(2)).add_(b.unsqueeze(2)).add_(a.unsqueeze(3))
        best, index = delta.flatten(1).min(1)
        start = index // (m * m) * m
        return best, start + index % (m * m) // m, start + index % m

    def _apply(self, rows: Tensor, give: Tensor, take: Tensor) -> None:
        v, g = self.values[rows, give], self.gram[give, take]
        pull = self.pull[rows, take] + v * g
        x = self._value(pull, self.diagonal[take]) if self.reconstruct else self.weight[rows, take]
        # The value is now best with the other weight gone, so the change is the one searched for or a lower one.
        change = v * (2 * self.pull[rows, give] + v * self.diagonal[give]) + x * (x * self.diagonal[take] - 2 * pull)
        self.errors[rows] = (self.errors[rows] + change).clamp_min_(0)
        self.pull[rows] += v.unsqueeze(1) * self.gram[give] - x.unsqueeze(1) * self.gram[take]
        self.values[rows, give] = 0.0
        self.values[rows, take] = x
        self.mask[rows, give] = False
        self.mask[rows, take] = True

    @staticmethod
    def _value(pull: Tensor, diagonal: Tensor) -> Tensor:
        """The value that lowers a row's error most, the others as they are: c_u / G_uu."""
        return torch.where(diagonal > 0, pull / diagonal, 0.0)


METHOD = SparseSwaps
