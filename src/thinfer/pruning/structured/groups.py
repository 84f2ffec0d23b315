"""Which rows and columns of a block's matrices belong together, found by marking values and following gradients.

Every linear module of a block gets a mark in place of its output. What reaches the input of another linear module then
depends on the marks alone, through whatever lies between: an activation and a product, or attention. The gradient of
one input column with respect to the marks is zero but for the rows it depends on. Columns that share a row belong to
one unit: a neuron where a unit has one column, a head (with grouped queries: the heads of one key and value) where it
has more. Nothing is known of names or of the order of a fused matrix. The groups are LLM-Pruner's
(https://arxiv.org/abs/2305.11627).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from thinfer.errors import UnsupportedError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.structured.base import evaluating, random_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["heads", "neurons"]

COPIES, POSITIONS = 16, 4  # windows marked at a time, one column each; positions, so that attention has a choice
SEED = 0


@dataclass(frozen=True, slots=True)
class Family:
    """Units of a block that can be cut one by one.

    Attributes:
        kind: "heads" or "neurons".
        reader: name, within the block, of the linear module that reads the units.
        columns: its input columns, [units, columns of a unit].
        rows: by name of a module that feeds it, the output rows, [units, rows of a unit].
    """

    kind: Kind
    reader: str
    columns: Tensor
    rows: Mapping[str, Tensor]

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """The stack of decoder blocks of a model, and the families that all its blocks have.

    Attributes:
        stack: name of the list of blocks.
        layers: how many blocks.
        families: what can be cut in each of them.
        skipped: by name of a linear module, why what it reads cannot be cut.
    """

    stack: str
    layers: int
    families: tuple[Family, ...]
    skipped: Mapping[str, str]

    def of_kind(self, kind: Kind) -> list[Family]:
        """Families of a kind.

        Raises:
            UnsupportedError: there is none; the message says why, as far as it is known.
        """
        found = [family for family in self.families if family.kind == kind]
        if not found:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
            raise UnsupportedError(
                f"no {kind} that can be cut were found in {self.stack}.0 ({why or 'no linear module reads any'}); "
                "cut other parts, as layers"
            )
        return found


def linear_modules(block: nn.Module) -> dict[str, nn.Module]:
    """The linear modules of a block by name: Linear, and Conv1D, whose weight is transposed."""
    from transformers.pytorch_utils import Conv1D

    return {name: module for name, module in block.named_modules() if isinstance(module, (nn.Linear, Conv1D))}


def output_dim(module: nn.Module) -> int:
    """Which dimension of a linear module's weight counts its outputs: 0 for Linear, 1 for Conv1D."""
    return 0 if isinstance(module, nn.Linear) else 1


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear module as [outputs, inputs], a view."""
    weight = cast(Tensor, module.weight)
    return weight if output_dim(module) == 0 else weight.T


def find_groups(model: PreTrainedModel) -> Layout:
    """Find what can be cut in the blocks of a model.

    Every column of the first block is followed; the other blocks are held against what was found there.

    Raises:
        UnsupportedError: the model has no stack of blocks, or its blocks differ.

    Example:
        >>> layout = find_groups(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M"))
        >>> [(family.kind, family.units) for family in layout.families]
        [('heads', 3), ('neurons', 1536)]
    """
    stack = find_stack(model)
    traces = _trace(model, [block.module for block in stack.blocks])
    families, skipped = [], dict(traces[0].missing)
    for reader in traces[0].inputs:
        found = _family(traces[0], reader)
        if isinstance(found, Family):
            families.append(found)
        elif found:
            skipped[reader] = found
    for index, trace in enumerate(traces):
        for family in families:
            if not _agrees(trace, family):
                raise UnsupportedError(
                    f"{stack.name}.{index}.{family.reader} is not built as the one of {stack.name}.0; "
                    "a stack whose blocks differ cannot be cut to one width"
                )
    return Layout(stack.name, len(stack.blocks), tuple(families), skipped)


@dataclass(slots=True)
class _Trace:
    """One block in one marked run: what every linear module read, what it gave (the marks), what the block gave."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    marks: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor | None = None
    missing: dict[str, str] = field(default_factory=dict)

    def support(self, reader: str, cotangent: Tensor) -> dict[str, Tensor]:
        """Rows of each module that some columns of `reader` depend on.

        Args:
            reader: name of a linear module.
            cotangent: weights of the columns, [copies, columns].

        Returns:
            By module, bool [copies, rows]; without those that nothing depends on.
        """
        x = self.inputs[reader]
        names = [name for name in self.marks if name != reader]
        # Each position counts by another weight, so that nothing cancels: the weights of a softmax add up to 1.
        weights = torch.linspace(1, 2, x.reshape(COPIES, -1, x.shape[-1]).shape[1], device=x.device)
        outer = cotangent[:, None, :] * weights[:, None]
        found = _gradients(x, [self.marks[name] for name in names], outer.reshape(x.shape).to(x.dtype))
        supports = {
            name: (gradient.reshape(COPIES, -1, gradient.shape[-1]) != 0).any(1)
            for name, gradient in zip(names, found, strict=True)
            if gradient is not None
        }
        return {name: support for name, support in supports.items() if support.any()}

    def other_ways(self, reader: str, producers: Sequence[str]) -> list[str]:
        """What besides `reader` depends on these modules: names of modules, and "the block's output"."""
        ends = {name: x for name, x in self.inputs.items() if name != reader}
        if self.output is not None:
            ends["the block's output"] = self.output
        marks = [self.marks[name] for name in producers]
        generator = torch.Generator().manual_seed(SEED)
        ways = []
        for name, end in ends.items():
            weights = torch.rand(end.shape, generator=generator).to(end)
            if any(
                gradient is not None and bool((gradient != 0).any()) for gradient in _gradients(end, marks, weights)
            ):
                ways.append(name)
        return ways


def _gradients(end: Tensor, marks: list[Tensor], weights: Tensor) -> list[Tensor | None]:
    if not end.requires_grad or not marks:
        return [None] * len(marks)
    return list(torch.autograd.grad(end, marks, weights, retain_graph=True, allow_unused=True))


def _trace(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> list[_Trace]:
    """Run the model once with every linear module of its blocks giving a mark in place of its output."""
    generator = torch.Generator().manual_seed(SEED)
    traces = [_Trace() for _ in blocks]
    handles = []
    for trace, block in zip(traces, blocks, strict=True):
        for name, module in linear_modules(block).items():
            trace.missing[name] = "it is not reached by every token"
            handles.append(module.register_forward_hook(_marker(trace, name, generator)))
        handles.append(block.register_forward_hook(_end(trace)))
    trained = [p for p in model.parameters() if p.requires_grad]
    ids = random_tokens(model, COPIES, POSITIONS, generator)
    try:
        model.requires_grad_(False)
        with evaluating(model), torch.enable_grad():
            model.base_model(input_ids=ids, use_cache=False)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for handle in handles:
            handle.remove()
    return traces


def _marker(trace: _Trace, name: str, generator: torch.Generator) -> Callable[..., Tensor]:
    def mark(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows = output.numel() // output.shape[-1]
        if name in trace.marks or rows != COPIES * POSITIONS:
            trace.inputs.pop(name, None)
            trace.missing[name] = "it is not run once for every token"
            return output
        # Small and positive: no ReLU is shut, no softmax is a choice of one, so every dependence has a gradient.
        values = 0.05 + 0.2 * torch.rand(output.shape, generator=generator)
        trace.marks[name] = values.to(output).requires_grad_()
        trace.inputs[name] = args[0]
        trace.missing.pop(name)
        return trace.marks[name].clone()  # some blocks add to it in place

    return mark


def _end(trace: _Trace) -> Callable[..., None]:
    def end(_module: nn.Module, _args: tuple[object, ...], output: object) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        trace.output = first if isinstance(first, Tensor) else None

    return end


def _family(trace: _Trace, reader: str) -> Family | str:
    """The units that a linear module reads; or why they cannot be cut, "" where it reads the residual stream."""
    columns = trace.inputs[reader].shape[-1]
    parts: list[dict[str, Tensor]] = []
    for start in range(0, columns, COPIES):
        chosen = torch.arange(start, min(start + COPIES, columns))
        cotangent = torch.zeros(COPIES, columns, device=trace.inputs[reader].device)
        cotangent[torch.arange(len(chosen)), chosen] = 1
        part = {name: support[: len(chosen)].cpu() for name, support in trace.support(reader, cotangent).items()}
        if not part or all(bool(support.all()) for support in part.values()):
            return ""
        parts.append(part)
    producers = sorted({name for part in parts for name in part})
    units = _components(parts, producers, {name: trace.marks[name].shape[-1] for name in producers})
    ways = trace.other_ways(reader, producers)
    if ways:
        return f"what it reads also reaches {', '.join(ways)}"
    try:
        stacked = {name: torch.tensor([unit[name] for unit in units]) for name in ("", *producers)}
    except ValueError:
        return "the units it reads are not all of one size"
    by_columns = stacked.pop("")
    return Family("heads" if by_columns.shape[1] > 1 else "neurons", reader, by_columns, stacked)


def _components(
    parts: Sequence[Mapping[str, Tensor]], producers: Sequence[str], rows: Mapping[str, int]
) -> list[dict[str, list[int]]]:
    """Sets of columns, with their rows by module, so that no row belongs to two; the columns are under ""."""
    offsets, nodes = {}, 0
    for name in producers:
        offsets[name] = nodes
        nodes += rows[name]
    parent = list(range(nodes))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    first_rows: list[int | None] = []
    for part in parts:
        for index in range(len(next(iter(part.values())))):
            touched = [offsets[name] + row for name, support in part.items() for row in _indices(support[index])]
            first_rows.append(touched[0] if touched else None)
            for row in touched[1:]:
                parent[root(row)] = root(touched[0])
    units: dict[int, dict[str, list[int]]] = {}
    for column, first in enumerate(first_rows):
        # A column that depends on nothing is a unit of its own; its size then differs, and the family is refused.
        key = root(first) if first is not None else -1 - column
        units.setdefault(key, {"": [], **{name: [] for name in producers}})[""].append(column)
    for name in producers:
        for row in range(rows[name]):
            unit = units.get(root(offsets[name] + row))
            if unit is not None:
                unit[name].append(row)
    return sorted(units.values(), key=lambda unit: unit[""][0])


def _indices(support: Tensor) -> list[int]:
    indices: list[int] = support.nonzero().flatten().tolist()
    return indices


def _agrees(trace: _Trace, family: Family) -> bool:
    """Whether random sets of the units depend on their own rows in this block, and on no others."""
    x = trace.inputs.get(family.reader)
    if x is None or x.shape[-1] != family.columns.numel():
        return False
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.rand(COPIES, family.units, generator=generator) < 0.5
    cotangent = torch.zeros(COPIES, x.shape[-1])
    cotangent[:, family.columns] = chosen[:, :, None].expand(-1, -1, family.columns.shape[1]).float()
    supports = trace.support(family.reader, cotangent.to(x.device))
    if set(supports) != set(family.rows) or trace.other_ways(family.reader, list(family.rows)):
        return False
    for name, rows in family.rows.items():
        support = supports[name].cpu()
        if int(rows.max()) >= support.shape[1]:
            return False
        expected = torch.zeros_like(support)
        expected[:, rows] = chosen[:, :, None].expand(-1, -1, rows.shape[1])
        if not torch.equal(support, expected):
            return False
    return True
