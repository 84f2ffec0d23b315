"""How many units of each family stay: one width for all layers, as near to the parameters asked for as can be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinfer.errors import UsageError

Scope = Literal["layer", "global"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A family as the budget sees it: its units in a layer, the parameters of one, and how many units may stay."""

    units: int
    cost: int
    allowed: Sequence[int]


def kept_units(
    choices: Mapping[str, Choice], scores: Mapping[str, Tensor], scope: Scope, parameters: int
) -> dict[str, int]:
    """Units of each family that stay in every layer.

    Args:
        choices: the families.
        scores: importance of each unit by family, [layers, units]; only "global" compares them.
        scope: "layer" takes the same share of every family; "global" takes the units that come last by importance,
            wherever they are, and then spreads each family's loss evenly over the layers.
        parameters: how many parameters a layer shall lose.

    Returns:
        The allowed widths nearest to those shares. The family with the cheapest unit makes up for the rounding of the
        others, which lose no more than their share where that can be: a model does not survive it that 20 % of three
        key-value groups are rounded to one.

    Raises:
        UsageError: the families together are too small, or nothing would be cut.

    Example:
        >>> heads, neurons = Choice(8, 4096, range(1, 9)), Choice(256, 192, range(1, 257))
        >>> kept_units({"heads": heads, "neurons": neurons}, {}, "layer", 16384)
        {'heads': 7, 'neurons': 192}
    """
    # Every family keeps its smallest width at least, so that much of it is not there to be cut.
    most = sum((choice.units - min(choice.allowed)) * choice.cost for choice in choices.values())
    if parameters > most:
        whole = sum(choice.units * choice.cost for choice in choices.values())
        raise UsageError(
            f"{parameters:,} parameters a layer shall go, but of the {whole:,} of these parts at most {most:,} can; "
            "ask for less sparsity, or cut more parts"
        )
    shares = _even_shares(choices, parameters) if scope == "layer" else _global_shares(choices, scores, parameters)
    fine = min(choices, key=lambda name: (choices[name].cost, -choices[name].units))
    coarse = [name for name in choices if name != fine]
    ranked: list[tuple[tuple[float, bool, float], dict[str, int]]] = []
    for widths in itertools.product(*(_near(choices[name], shares[name]) for name in coarse)):
        kept = dict(zip(coarse, widths, strict=True))
        rest = parameters - sum((choices[name].units - width) * choices[name].cost for name, width in kept.items())
        wanted = choices[fine].units - rest / choices[fine].cost
        kept[fine] = min(choices[fine].allowed, key=lambda width: abs(width - wanted))
        gone = sum((choices[name].units - kept[name]) * choices[name].cost for name in choices)
        # Within one step of the fine family the budget is met; among those widths the shares decide.
        off = abs(choices[fine].units - kept[fine] - rest / choices[fine].cost) * choices[fine].cost
        step = _step(choices[fine]) * choices[fine].cost
        missed = 0.0 if off <= step / 2 + 1e-9 else abs(gone - parameters) / parameters
        beyond = any(choices[name].units - kept[name] > shares[name] + 1e-9 for name in coarse)
        distance = sum(abs(choices[name].units - kept[name] - shares[name]) / choices[name].units for name in choices)
        ranked.append(((round(missed, 9), beyond, distance), kept))
    best = min(ranked, key=lambda found: found[0])[1]
    kept = {name: best[name] for name in choices}
    if all(kept[name] == choices[name].units for name in choices):
        raise UsageError(
            f"{parameters:,} parameters a layer shall go, which is less than half of the smallest step, so nothing "
            "would be cut; ask for more sparsity, or give a smaller round_to to cut neurons"
        )
    return kept


def _step(choice: Choice) -> int:
    """Units between two allowed widths, where there are most of them."""
    widths = sorted(choice.allowed)
    return min((b - a for a, b in itertools.pairwise(widths)), default=choice.units)


def _even_shares(choices: Mapping[str, Choice], parameters: int) -> dict[str, float]:
    share = parameters / sum(choice.units * choice.cost for choice in choices.values())
    return {name: share * choice.units for name, choice in choices.items()}


def _global_shares(choices: Mapping[str, Choice], scores: Mapping[str, Tensor], parameters: int) -> dict[str, float]:
    """Units a layer, by family, among those that come last, wherever they are, until the budget is spent."""
    names = list(choices)
    flat = torch.cat([scores[name].flatten().double().cpu() for name in names])
    family = torch.cat([torch.full((scores[name].numel(),), index) for index, name in enumerate(names)])
    layers = len(scores[names[0]])
    order = flat.argsort(stable=True)
    costs = torch.tensor([choices[name].cost for name in names])[family[order]]
    # The last unit goes if more than half of it is inside the budget.
    going = order[(costs.cumsum(0) - costs / 2) <= parameters * layers]
    return {name: float((family[going] == index).sum()) / layers for index, name in enumerate(names)}


def _near(choice: Choice, share: float) -> list[int]:
    """Allowed widths to try for a family that loses about `share` units: the nearest, few enough to try them all."""
    return sorted(choice.allowed, key=lambda width: (abs(choice.units - width - share), width))[:64]
