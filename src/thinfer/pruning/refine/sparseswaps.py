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
# Added to the diagonal of the Gram matrix, whose mean is 1, before a value is divided by it.
_RIDGE = 0.01


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
            gets the value that is best for its row by itself. None: only where the pruned matrix already has other
            values than the dense one, as SparseGPT's has; without new values a mask is refined as published.
        damping: for new values, the share of the mean of the diagonal of XXᵀ that is added to the diagonal.
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
    damping: float = 0.01
    cg_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("swaps", "candidates", "tolerance", "damping", "cg_steps"):
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
        values, used = pruned.weight.clone(), gram
        if reconstruct:
            # New values would follow what is accidental in a short text, so these are fitted with dampening.
            used = gram.clone()
            used.diagonal().add_(self.damping)
            values = fit_on_support(weight, values, mask, used, self.cg_steps)
        rows = _Rows(weight, values, mask, used, target.pattern, reconstruct)
        count = rows.swap(self.swaps, self.candidates, self.tolerance)
        if reconstruct:
            values = fit_on_support(weight, values, mask, used, self.cg_steps)
        before, after = (row_errors(weight, matrix, gram) for matrix in (pruned.weight, values))
        worse = (after > before).unsqueeze(1)
        values, mask = torch.where(worse, pruned.weight, values), torch.where(worse, pruned.mask, mask)
        total = float(before.sum())
        ratio = float(torch.minimum(before, after).sum()) / total if total > 0 else 1.0
        return Pruned(values, mask, pruned.notes | {"swaps": count, "swaps_error_ratio": ratio})


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
    correlation: Tensor = field(init=False)
    """Highest |G_ij| / √(G_ii G_jj) of every input with another one, [inputs]."""

    def __post_init__(self) -> None:
        left = self.weight - self.values
        self.pull = left @ self.gram
        self.errors = (left * self.pull).sum(1)
        self.diagonal = self.gram.diagonal()
        scale = torch.where(self.diagonal > 0, self.diagonal.rsqrt(), 0.0)
        self.correlation = (self.gram * scale).abs_().mul_(scale.unsqueeze(1)).fill_diagonal_(0).amax(1)

    def swap(self, most: int, candidates: int, tolerance: float) -> int:
        """Swap until no row has a swap left; returns how many there were."""
        active = torch.arange(len(self.weight), device=self.weight.device)
        count = 0
        for _ in range(most):
            if not len(active):
                break
            delta, give, take = self._search(active, candidates, tolerance)
            good = delta < -tolerance * self.errors[active]
            if candidates and not self.pattern.structured and not bool(good.all()):
                missed = (~good).nonzero().squeeze(1)
                delta[missed], give[missed], take[missed] = self._search(active[missed], 0, tolerance)
                good = delta < -tolerance * self.errors[active]
            active = active[good]
            self._apply(active, give[good], take[good], delta[good])
            count += len(active)
        return count

    def _search(self, rows: Tensor, candidates: int, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
        """Best Δ of each of these rows, and the columns to give up and to take back; Δ is inf where there is none."""
        columns = self.weight.shape[1]
        find: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
        if self.pattern.structured:
            find, width = self._in_groups, columns * self.pattern.m
        elif candidates and 2 * candidates < columns:
            find, width = (lambda part: self._among(part, candidates)), columns * candidates
        else:
            find, width = (lambda part: self._everywhere(part, -tolerance * self.errors)), columns
        parts = [find(part) for part in torch.split(rows, max(_CHUNK // width, 1))]
        delta, give, take = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return delta, give, take

    def _alone(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """a, b (inf where a weight cannot be given up or taken back), −2 v, and the values x to take back."""
        v, c, mask = self.values[rows], self.pull[rows], self.mask[rows]
        a = torch.where(mask, v * (2 * c + v * self.diagonal), math.inf)
        x = self._value(c, self.diagonal) if self.reconstruct else self.weight[rows]
        # A weight taken back as zero would add a zero to the budget.
        b = torch.where(mask | (x == 0), math.inf, x * (x * self.diagonal - 2 * c))
        return a, b, -2 * v, x

    def _everywhere(self, rows: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best of all pairs of one row after another, without looking at those that cannot be below the limit.

        With α = v √G_pp, β = x √G_uu and a correlation of at most ρ_p and of at most ρ_u between the two inputs,
        2 v x G_pu ≤ ρ_p α² + ρ_u β², so Δ_pu ≥ (a_p − ρ_p α²) + (b_u − ρ_u β²).
        """
        a, b, v2, x = self._alone(rows)
        bound = self.correlation * self.diagonal
        give_least, take_least = a - bound * (v2 / 2).square(), b - bound * x.square()
        # The pair that is best without its interaction is a first guess.
        give, take = a.argmin(1), b.argmin(1)
        at = torch.arange(len(rows), device=rows.device)
        best = a[at, give] + b[at, take] + v2[at, give] * x[at, take] * self.gram[give, take]
        limit = torch.minimum(best, limits[rows]).unsqueeze(1)
        gives = give_least + take_least.amin(1, keepdim=True) <= limit
        takes = take_least + give_least.amin(1, keepdim=True) <= limit
        for row in range(len(rows)):
            p, u = gives[row].nonzero().squeeze(1), takes[row].nonzero().squeeze(1)
            if not (len(p) and len(u)):
                continue
            delta = self.gram[p][:, u].mul_(v2[row, p].unsqueeze(1)).mul_(x[row, u])
            delta.add_(a[row, p].unsqueeze(1)).add_(b[row, u])
            least, index = delta.flatten().min(0)
            if least < best[row]:
                best[row], give[row], take[row] = least, p[index // len(u)], u[index % len(u)]
        return best, give, take

    def _among(self, rows: Tensor, candidates: int) -> tuple[Tensor, Tensor, Tensor]:
        """The best of the pairs that hold one of the weights best to take back, or to give up, alone."""
        a, b, v2, x = self._alone(rows)
        take, give = (score.topk(candidates, largest=False).indices for score in (b, a))
        by_take = self._partners(take, b, x, a, v2)
        by_give = self._partners(give, a, v2, b, x)
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
        """The best of the pairs inside a group of n:m."""
        m = self.pattern.m
        a, b, v2, x = (tensor.reshape(len(rows), -1, m) for tensor in self._alone(rows))
        groups = len(self.gram) // m
        blocks = self.gram.reshape(groups, m, groups, m).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        delta = (blocks * v2.unsqueeze(3)).mul_(x.unsqueeze(2)).add_(b.unsqueeze(2)).add_(a.unsqueeze(3))
        best, index = delta.flatten(1).min(1)
        start = index // (m * m) * m
        return best, start + index % (m * m) // m, start + index % m

    def _apply(self, rows: Tensor, give: Tensor, take: Tensor, delta: Tensor) -> None:
        v, c = self.values[rows, give], self.pull[rows, take]
        x = self._value(c, self.diagonal[take]) if self.reconstruct else self.weight[rows, take]
        self.pull[rows] += v.unsqueeze(1) * self.gram[give] - x.unsqueeze(1) * self.gram[take]
        self.values[rows, give] = 0.0
        self.values[rows, take] = x
        self.mask[rows, give] = False
        self.mask[rows, take] = True
        self.errors[rows] = (self.errors[rows] + delta).clamp_min_(0)

    @staticmethod
    def _value(pull: Tensor, diagonal: Tensor) -> Tensor:
        """The value c_u / G_uu that lowers a row's error most, damped where an input is nearly always 0."""
        return pull / (diagonal + _RIDGE)


METHOD = SparseSwaps
