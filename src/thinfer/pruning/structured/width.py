"""What the methods that cut widths share: parts, shares, one width for all layers, and the cut that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from thinfer.errors import UnsupportedError, UsageError
from thinfer.pruning.structured.budget import Choice, Scope, kept_units
from thinfer.pruning.structured.configuration import Changes, Configuration
from thinfer.pruning.structured.groups import Family, Kind, Layout
from thinfer.pruning.structured.surgery import block_parameters, unit_cost

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WIDTHS: tuple[Kind, ...] = ("heads", "neurons")
_UNITS = {"heads": "groups of heads", "neurons": "neurons"}


def parse_parts(parts: str, known: Sequence[str]) -> tuple[str, ...]:
    """``"heads+neurons"`` as a tuple.

    Raises:
        UsageError: a part that is not known, or none.
    """
    found = tuple(part.strip() for part in parts.split("+"))
    if not set(found) <= set(known) or len(set(found)) < len(found):
        raise UsageError(f"parts is {parts!r}; join some of {', '.join(known)} with +, as heads+neurons")
    return found


@dataclass(frozen=True, slots=True)
class Widths:
    """The families that are to be cut, and what their configuration allows."""

    families: tuple[Family, ...]
    choices: Mapping[str, Choice]
    configuration: Configuration

    def changes(self, kept: Mapping[str, int]) -> Changes:
        """Fields of the configuration for these widths, by a family's reader."""
        changes: Changes = {}
        for family in self.families:
            if kept[family.reader] < family.units:
                changes |= self.configuration.kept(family, kept[family.reader]) or {}
        return changes

    def notes(self, kept: Mapping[str, int]) -> dict[str, float | int | str]:
        """For the report: the width of each family, and where only some can be had, which."""
        notes: dict[str, float | int | str] = {}
        for family in self.families:
            allowed = self.choices[family.reader].allowed
            text = f"{kept[family.reader]} of {family.units} {_UNITS[family.kind]}"
            if family.kind == "heads" and len(allowed) < family.units:
                text += f"; the configuration holds {', '.join(map(str, allowed))}"
            notes[family.reader] = text
        return notes


def find_widths(
    model: PreTrainedModel, layout: Layout, configuration: Configuration, parts: Sequence[str], round_to: int
) -> Widths:
    """Families of these kinds, with the widths that their configuration can hold.

    Args:
        model: whose blocks are cut.
        layout: its families.
        configuration: its configuration.
        parts: "heads", "neurons" or both.
        round_to: neurons are cut to a multiple of it.

    Raises:
        UnsupportedError: the model has no such family, or its configuration holds no smaller width of it.
        UsageError: round_to is no smaller than the width.
    """
    families = tuple(family for kind in WIDTHS if kind in parts for family in layout.of_kind(kind))
    choices = {}
    for family in families:
        allowed = _allowed(family, configuration, round_to)
        if not allowed:
            raise UnsupportedError(_not_held(model, layout, family, configuration))
        choices[family.reader] = Choice(family.units, unit_cost(model, family), [*allowed, family.units])
    return Widths(families, choices, configuration)


def _allowed(family: Family, configuration: Configuration, round_to: int) -> list[int]:
    """Widths below the whole that can be had."""
    if family.kind == "heads":
        return [kept for kept in range(1, family.units) if configuration.kept(family, kept) is not None]
    widths = list(range(round_to, family.units, round_to))
    if not widths:
        raise UsageError(
            f"{family.reader} reads {family.units} neurons, so no multiple of round_to {round_to} is below; "
            "give a smaller round_to"
        )
    return widths if configuration.kept(family, widths[0]) is not None else []


def _not_held(model: PreTrainedModel, layout: Layout, family: Family, configuration: Configuration) -> str:
    others = [
        kind
        for kind in WIDTHS
        if any(other.kind == kind and _allowed(other, configuration, 1) for other in layout.families)
    ]
    if family.kind == "neurons":
        found, why = f"{family.units} neurons were", ""
    elif family.units == 1:
        found, why = "one group of heads was", ": they all share one key and value"
    else:
        found, why = f"{family.units} groups of heads were", " with the size of a head as it is"
    return (
        f"{type(model).__name__}: {found} found in {layout.stack}.0.{family.reader}, but no field of its configuration "
        f"holds fewer{why}; cut {' or '.join([*others, 'layers'])}"
    )


def keep_best(
    model: PreTrainedModel, widths: Widths, scores: Mapping[str, Tensor], sparsity: float, scope: Scope
) -> dict[str, list[Tensor]]:
    """Units that stay in each layer by family, the most important ones; of equal ones the first.

    Args:
        model: before it is cut.
        widths: the families.
        scores: importance by family, [layers, units].
        sparsity: fraction of the blocks' parameters that shall go.
        scope: as for `kept_units`.
    """
    layers = len(next(iter(scores.values())))
    counts = kept_units(widths.choices, scores, scope, round(sparsity * block_parameters(model) / layers))
    return {
        reader: [row.sort().values for row in score.argsort(dim=1, descending=True, stable=True)[:, : counts[reader]]]
        for reader, score in scores.items()
    }
