"""LLM-Pruner: groups of weights go by what a loss says of them (https://arxiv.org/abs/2305.11627)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from thinfer.errors import UnsupportedError, UsageError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.structured.base import Notes, require_uniform, token_ids
from thinfer.pruning.structured.budget import Scope
from thinfer.pruning.structured.groups import Family, linear_modules, output_dim
from thinfer.pruning.structured.importance import Importance, Salience
from thinfer.pruning.structured.method import StructuredMethod, Work
from thinfer.pruning.structured.shortgpt import layers_to_keep
from thinfer.pruning.structured.surgery import Cut
from thinfer.pruning.structured.width import WIDTHS, find_widths, keep_best, parse_parts

PARTS = (*WIDTHS, "channels", "layers")


@dataclass(frozen=True, slots=True)
class LLMPruner(StructuredMethod):
    """Cuts heads (whole key-value groups), FFN neurons, channels of the residual stream, or layers.

    The importance of a unit is the sum over all its members, the rows and columns found by `find_groups`.

    Attributes:
        importance: "vector" |Σ w·g| of each row or column, "element1" Σ|w·g|, "element2" Σ|w²F|, "mix" Σ|w·g − ½w²F|
            with g the mean gradient and F the mean squared gradient of a sample; "l1" Σ|w|, "l2" Σw², "random".
        parts: "heads", "neurons" or "heads+neurons"; "channels"; "layers".
        scope: "layer" gives heads and neurons the same share; "global" lets importance per parameter decide how much
            each loses.
        samples: windows that gradients are taken of.
        tokens: of each window, its first tokens that are used.
        protect_first: with "layers": first layers that stay; None: an eighth of them.
        protect_last: with "layers": last layers that stay; None: a sixteenth of them.
        round_to: neurons and channels are cut to a multiple of it.
        seed: for "random".
        uniform: one width for all layers; a configuration of transformers holds no other.

    Example:
        >>> LLMPruner(parts="neurons", round_to=64).prune(model, windows, 0.2).kept.keys()
        dict_keys(['mlp.down_proj'])
    """

    importance: Importance = "element1"
    parts: str = "heads+neurons"
    scope: Scope = "layer"
    samples: int = 10
    tokens: int = 64
    protect_first: int | None = None
    protect_last: int | None = None
    round_to: int = 32
    seed: int = 0
    uniform: bool = True

    def __post_init__(self) -> None:
        parts = parse_parts(self.parts, PARTS)
        require_uniform(self.uniform)
        if len(parts) > 1 and not set(parts) <= set(WIDTHS):
            raise UsageError(f"parts is {self.parts!r}; channels and layers are cut alone")
        for name, value, known in (
            ("importance", self.importance, get_args(Importance)),
            ("scope", self.scope, get_args(Scope)),
        ):
            if value not in known:
                raise UsageError(f"{name} is {value!r}; choose one of {', '.join(known)}")
        for name, least in (("samples", 1), ("tokens", 2), ("round_to", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if parts != ("layers",) and (self.protect_first or self.protect_last):
            raise UsageError(
                "protect_first and protect_last need parts=layers: a configuration of transformers has one width for "
                "all layers, so when widths are cut every layer loses the same"
            )

    def cut(self, work: Work) -> tuple[Cut, Notes]:
        """Fewer heads or neurons, a narrower residual stream, or fewer layers.

        Raises:
            UsageError: a sparsity that cannot be met; windows of several lengths.
            UnsupportedError: the parts are not found, or the configuration holds no smaller width of them.
            CheckFailed: the loss or a gradient is NaN, infinite or zero.
        """
        run = _Run(self, work)
        cut = {"channels": run.channels, "layers": run.layers}.get(self.parts, run.widths)()
        return cut, run.notes


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: what it works on, and the cut of each kind of part."""

    options: LLMPruner
    work: Work
    notes: Notes = field(default_factory=dict)

    def widths(self) -> Cut:
        """Fewer heads, fewer neurons, or both."""
        options = self.options
        parts = parse_parts(options.parts, WIDTHS)
        widths = find_widths(self.work.model, self.work.layout, self.work.configuration, parts, options.round_to)
        members = {family.reader: self._members(family) for family in widths.families}
        salience = self._salience([name for layers in members.values() for layer in layers for name, _, _ in layer])
        scores = {
            reader: torch.stack([_sum_of_members(salience, layer) for layer in layers])
            / (widths.choices[reader].cost if options.scope == "global" else 1)
            for reader, layers in members.items()
        }
        kept = keep_best(self.work.model, widths, scores, self.work.sparsity, options.scope)
        counts = {reader: len(units[0]) for reader, units in kept.items()}
        self.notes.update(widths.notes(counts))
        return Cut(widths.changes(counts), kept)

    def channels(self) -> Cut:
        """A narrower residual stream."""
        model, sparsity = self.work.model, self.work.sparsity
        hidden = int(model.config.hidden_size)
        step = self.options.round_to
        wanted = hidden * (1 - sparsity)
        for width in sorted(range(step, hidden, step), key=lambda width: abs(width - wanted)):
            held = self.work.configuration.channels(width)
            if held is not None:
                changes, dims = held
                break
        else:
            raise UnsupportedError(
                f"{type(model).__name__}: no field of its configuration holds a residual stream narrower than "
                f"{hidden}, in multiples of round_to {step}, with heads and neurons as they are; cut other parts"
            )
        if abs(width - wanted) > abs(hidden - wanted):
            raise UsageError(
                f"the nearest width of the residual stream is {width} of {hidden}, too far from sparsity {sparsity}; "
                "ask for more sparsity, or give a smaller round_to"
            )
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        counted = {name: found for name, found in dims.items() if name in parameters}
        salience = self._salience(list(counted))
        score = torch.stack([salience.along(name, dim) for name, found in counted.items() for dim in found]).sum(0)
        kept = score.argsort(descending=True, stable=True)[:width].sort().values
        return Cut(changes, channels=kept, channel_dims=dims)

    def layers(self) -> Cut:
        """Fewer layers: the importance of a layer is that of all its matrices."""
        matrices = [
            [f"{m.name}.weight" for m in block.matrices if m.expert is None]
            for block in find_stack(self.work.model).blocks
        ]
        salience = self._salience([name for names in matrices for name in names])
        importance = torch.stack(
            [torch.stack([salience.along(name, 0).sum() for name in names]).sum() for names in matrices]
        )
        count = self.work.layout.layers
        first, last = self.options.protect_first, self.options.protect_last
        # The paper leaves out the first 4 and the last 2 of 32.
        first, last = count // 8 if first is None else first, count // 16 if last is None else last
        kept = layers_to_keep(importance, self.work.sparsity, first, last)
        return Cut(self.work.configuration.layers(kept), layers=kept)

    def _salience(self, names: list[str]) -> Salience:
        options = self.options
        ids = token_ids(self.work.windows)[: options.samples, : options.tokens]
        if options.importance not in ("l1", "l2", "random"):
            self.notes.update({"gradient_samples": ids.shape[0], "gradient_tokens": ids.shape[1]})
        return Salience(
            self.work.model,
            list(dict.fromkeys(names)),
            options.importance,
            ids,
            seed=options.seed,
            progress=self.work.progress,
        )

    def _members(self, family: Family) -> list[list[tuple[str, int, Tensor]]]:
        """In each layer, the parameters of a family: name, dimension, and its indices of each unit [units, of each]."""
        found = []
        for block in find_stack(self.work.model).blocks:
            modules = linear_modules(block.module)
            found.append(
                [
                    *(
                        (f"{block.name}.{name}.weight", output_dim(modules[name]), rows)
                        for name, rows in family.rows.items()
                    ),
                    (f"{block.name}.{family.reader}.weight", 1 - output_dim(modules[family.reader]), family.columns),
                ]
            )
        return found


def _sum_of_members(salience: Salience, members: list[tuple[str, int, Tensor]]) -> Tensor:
    """Importance of a layer's units, [units]."""
    return torch.stack([salience.along(name, dim)[indices].sum(1) for name, dim, indices in members]).sum(0)


METHOD = LLMPruner
