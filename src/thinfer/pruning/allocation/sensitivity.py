"""Sensitivity scan: measure what pruning each kind of matrix costs, then spend the zeros where they cost least.

Han et al. 2015 chose the thresholds of layers from such curves. The rises in loss of the kinds, each measured alone,
are taken to add up; the least sum is a convex problem. As the sum is only a model, the outcome is measured too, and
where one rate for all is better, that is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.allocation.budget import sizes
from thinfer.pruning.base import ModelView

Curve = tuple[tuple[float, float], ...]
"""(rate, rise of the mean negative log-likelihood in nats a token), by rising rate."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What was measured, for a plot or a report.

    Attributes:
        dense: loss of the dense model, nats a token.
        curves: by kind, such as "mlp.down_proj", or "mlp.down_proj, blocks 0-9" where the stack was cut into parts.
        chosen: rise with the rates that the curves suggest.
        uniform: rise with one rate for all.
    """

    dense: float
    curves: dict[str, Curve]
    chosen: float
    uniform: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Gives every kind of matrix the rate that measured curves suggest, all matrices of a kind the same.

    Attributes:
        probes: rates at which each kind is pruned alone, the others dense.
        parts: into how many runs of consecutive blocks the stack is cut; each is measured for itself, so the scan takes
            that many times as long.
        scans: what was measured, one entry a call of `rates`; not an option.

    Raises:
        UsageError: no probes, probes that do not lie between 0 and 1, or no parts.

    Example: ``Sensitivity().rates(view, 0.5)`` is ``{"model.layers.0.self_attn.q_proj": 0.62, ...}``.
    """

    probes: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    parts: int = 1
    scans: list[Scan] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.probes or not all(0 < probe < 1 for probe in self.probes):
            raise UsageError(f"sensitivity: probes are rates between 0 and 1, such as 0.3, 0.5, 0.7; not {self.probes}")
        if self.parts < 1:
            raise UsageError(f"sensitivity: parts must be at least 1, not {self.parts}")

    def rates(self, view: ModelView, sparsity: float) -> dict[str, float]:
        """A rate for every kind of matrix.

        Raises:
            CheckFailed: the loss of the dense model is NaN or infinite.
        """
        kinds = kinds_of(view.blocks, self.parts)
        uniform = {name: sparsity for block in view.blocks for name in block}
        if not 0 < sparsity < 1:
            return uniform
        dense = view.loss({})
        if not abs(dense) < float("inf"):
            raise CheckFailed("the loss of the dense model is not finite; check its weights, or load it as float32")
        curves = {
            kind: tuple((rate, view.loss(dict.fromkeys(names, rate)) - dense) for rate in sorted(self.probes))
            for kind, names in kinds.items()
        }
        count = sizes(view)
        totals = {kind: sum(count[name] for name in names) for kind, names in kinds.items()}
        by_kind = cheapest(curves, totals, sparsity)
        of = {name: kind for kind, names in kinds.items() for name in names}
        chosen = {name: by_kind[of[name]] for name in uniform}
        scan = Scan(dense, curves, view.loss(chosen) - dense, view.loss(uniform) - dense)
        self.scans.append(scan)
        return chosen if scan.chosen <= scan.uniform else uniform


def kinds_of(blocks: Sequence[Sequence[str]], parts: int = 1) -> dict[str, list[str]]:
    """Names of the matrices by kind: what is left of a name without the numbers of its block and its expert.

    Example:
        >>> kinds_of([["h.0.mlp.up", "h.0.experts.0.w"], ["h.1.mlp.up", "h.1.experts.3.w"]])
        {'mlp.up': ['h.0.mlp.up', 'h.1.mlp.up'], 'experts.w': ['h.0.experts.0.w', 'h.1.experts.3.w']}
    """
    parts = max(min(parts, len(blocks)), 1)
    bounds = [len(blocks) * part // parts for part in range(parts + 1)]
    kinds: dict[str, list[str]] = {}
    for first, stop in pairwise(bounds):
        label = f", blocks {first}-{stop - 1}" if parts > 1 else ""
        for block in blocks[first:stop]:
            for name in block:
                inside = re.sub(r"^.*?\.\d+\.", "", name)
                kind = re.sub(r"\.\d+(?=\.|$)|\[\d+\]", "", inside)
                kinds.setdefault(kind + label, []).append(name)
    return kinds


def cheapest(curves: dict[str, Curve], weights: dict[str, int], sparsity: float) -> dict[str, float]:
    """Rates by kind with the least sum of rises whose mean, weighted by the sizes, is the sparsity.

    Between the measured rates the lower convex hull of a curve is taken. No rate goes beyond the highest probe, as
    nothing is known there; where the sparsity does, it is the rate of all.

    Args:
        curves: a measured curve for every kind; that nothing is lost at rate 0 is understood.
        weights: number of weights of every kind.
        sparsity: from 0 to 1.

    Example:
        >>> cheapest({"a": ((0.5, 0.1),), "b": ((0.5, 0.3),)}, {"a": 1, "b": 1}, 0.25)
        {'a': 0.5, 'b': 0.0}
    """
    if sparsity >= min(curve[-1][0] for curve in curves.values()):
        return dict.fromkeys(curves, sparsity)
    pieces = []
    for kind, curve in curves.items():
        hull = _hull(curve)
        for (start, low), (stop, high) in pairwise(hull):
            pieces.append(((high - low) / ((stop - start) * weights[kind]), kind, stop - start))
    missing = sparsity * sum(weights.values())
    rates = dict.fromkeys(curves, 0.0)
    # The pieces of a convex curve come in their order, since their slopes rise.
    for _, kind, width in sorted(pieces, key=lambda piece: piece[0]):
        step = min(width, max(missing, 0.0) / weights[kind])
        rates[kind] += step
        missing -= step * weights[kind]
    return {kind: round(rate, 12) for kind, rate in rates.items()}


def _hull(curve: Curve) -> list[tuple[float, float]]:
    """Lower convex hull from (0, 0) through the points; a rise that is NaN or infinite counts as a very large one."""
    points = [(0.0, 0.0)]
    for rate, rise in curve:
        point = (rate, rise if abs(rise) < float("inf") else 1e6)
        while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], point):
            points.pop()
        points.append(point)
    return points


def _slope(start: tuple[float, float], stop: tuple[float, float]) -> float:
    return (stop[1] - start[1]) / (stop[0] - start[0])


METHOD = Sensitivity
