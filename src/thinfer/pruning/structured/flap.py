"""FLAP: cut what varies least, and put what it gave on average into a bias (https://arxiv.org/abs/2312.11983)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from thinfer.errors import UsageError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.statistics import InputStatistics
from thinfer.pruning.structured.base import Notes, Progress, Windows, require_uniform, run_windows
from thinfer.pruning.structured.budget import Scope
from thinfer.pruning.structured.groups import Family, linear_modules, weight_of
from thinfer.pruning.structured.method import StructuredMethod, Work
from thinfer.pruning.structured.surgery import Cut
from thinfer.pruning.structured.width import WIDTHS, Widths, find_widths, keep_best, parse_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Flap(StructuredMethod):
    """Fluctuation-based pruning: a column x_j of W counts var(x_j) · Σ_i W_ij², standardised in its layer.

    What is cut is replaced by its mean: the reader's bias becomes b + W_cut · E[x_cut], which is the least-squares
    choice. Where a configuration has no field for such a bias the mean is lost too, so there E[x_j²] takes the place of
    the variance.

    Attributes:
        parts: "heads", "neurons" or "heads+neurons".
        scope: "global" lets the scores decide how much heads and neurons lose; "layer" gives both the same share.
        bias: whether the means become biases.
        round_to: neurons are cut to a multiple of it.
        uniform: one width for all layers; a configuration of transformers holds no other.

    Example:
        >>> Flap().prune(model, windows, 0.2).notes["bias"]
        'self_attn.o_proj, mlp.down_proj'
    """

    parts: str = "heads+neurons"
    scope: Scope = "global"
    bias: bool = True
    round_to: int = 32
    uniform: bool = True

    def __post_init__(self) -> None:
        parse_parts(self.parts, WIDTHS)
        require_uniform(self.uniform)
        if self.scope not in ("layer", "global") or self.round_to < 1:
            raise UsageError(f"scope is layer or global, round_to 1 or more; not {self.scope!r} and {self.round_to}")

    def cut(self, work: Work) -> tuple[Cut, Notes]:
        """Fewer heads, fewer neurons, or both; CheckFailed when an input is NaN or infinite."""
        model, configuration = work.model, work.configuration
        widths = find_widths(model, work.layout, configuration, parse_parts(self.parts, WIDTHS), self.round_to)
        fields = {family.reader: configuration.bias(family) if self.bias else None for family in widths.families}
        statistics = read_inputs(model, widths.families, work.windows, work.progress)
        scores = {
            family.reader: torch.stack(
                [
                    unit_scores(family, weight, inputs, compensated=fields[family.reader] is not None)
                    for weight, inputs in zip(_weights(model, family), statistics[family.reader], strict=True)
                ]
            )
            for family in widths.families
        }
        kept = keep_best(model, widths, scores, work.sparsity, self.scope)
        counts = {reader: len(units[0]) for reader, units in kept.items()}
        changes = widths.changes(counts)
        biases = {}
        for family in widths.families:
            field = fields[family.reader]
            if field is not None and counts[family.reader] < family.units:
                changes |= field
                biases[family.reader] = [
                    lost_mean(family, weight, inputs, units)
                    for weight, inputs, units in zip(
                        _weights(model, family), statistics[family.reader], kept[family.reader], strict=True
                    )
                ]
        notes = widths.notes(counts) | _notes(widths, fields, biases, asked=self.bias)
        return Cut(changes, kept, biases=biases), notes


def read_inputs(
    model: PreTrainedModel,
    families: tuple[Family, ...],
    windows: Windows,
    progress: Progress | None = None,
) -> dict[str, list[InputStatistics]]:
    """Means and variances of what each reader reads in the dense model, by reader and layer."""
    found: dict[str, list[InputStatistics]] = {family.reader: [] for family in families}
    handles = []
    for block in find_stack(model).blocks:
        modules = linear_modules(block.module)
        for family in families:
            statistics = InputStatistics(family.columns.numel(), frozenset({"mean"}), model.device)
            found[family.reader].append(statistics)
            handles.append(modules[family.reader].register_forward_pre_hook(_count(statistics)))
    try:
        run_windows(model, windows, progress, "statistics")
    finally:
        for handle in handles:
            handle.remove()
    return found


def lost_mean(family: Family, weight: Tensor, inputs: InputStatistics, kept: Tensor) -> Tensor:
    """What the units that go add to the output on average, W_cut · E[x_cut], [outputs]."""
    going = torch.ones(family.units, dtype=torch.bool)
    going[kept] = False
    columns = family.columns[going].flatten().to(weight.device)
    return weight[:, columns].float() @ inputs.mean[columns]


def unit_scores(family: Family, weight: Tensor, inputs: InputStatistics, *, compensated: bool) -> Tensor:
    """Importance of a layer's units: the mean over a unit's columns, standardised, [units]."""
    harm = inputs.variance if compensated else inputs.variance + inputs.mean.square()
    score = harm.double() * weight.double().square().sum(0)
    score = score - score.mean()
    deviation = score.std(correction=0)
    if deviation > 0:
        score = score / deviation
    return score.cpu()[family.columns].mean(1)


def _count(statistics: InputStatistics) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        statistics.add(args[0])

    return hook


def _weights(model: PreTrainedModel, family: Family) -> list[Tensor]:
    """The reader's weight in each layer, [outputs, inputs]."""
    modules = (linear_modules(block.module)[family.reader] for block in find_stack(model).blocks)
    return [weight_of(module).detach() for module in modules]


def _notes(widths: Widths, fields: Mapping[str, object], biases: Mapping[str, object], *, asked: bool) -> Notes:
    notes: Notes = {"bias": ", ".join(biases) or "none"}
    without = [family.reader for family in widths.families if fields[family.reader] is None]
    if asked and without:
        notes["bias_not_held"] = (
            f"no field of the configuration gives {', '.join(without)} a bias, so what is cut there is lost with its "
            "mean; scored by E[x²]"
        )
    return notes


METHOD = Flap
