"""Cut a model: smaller matrices in a model built from a smaller configuration, checked against the masked model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinfer.errors import CheckFailed, UnsupportedError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.structured.base import StructuredResult, evaluating, random_tokens
from thinfer.pruning.structured.configuration import Changes, Configuration, shapes_of
from thinfer.pruning.structured.groups import Family, Layout, linear_modules, output_dim, weight_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """What stays of a model, and what is added.

    Attributes:
        changes: of the configuration; they give exactly the shapes of the cut.
        units: by a family's reader, the units that stay in each layer, in order.
        layers: layers that stay; None: all.
        channels: channels of the residual stream that stay; None: all.
        channel_dims: by tensor, its dimensions that are the residual stream.
        biases: by a family's reader, what is added to its bias in each layer, [outputs].
    """

    changes: Changes
    units: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    layers: Sequence[int] | None = None
    channels: Tensor | None = None
    channel_dims: Mapping[str, Sequence[int]] = field(default_factory=dict)
    biases: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def apply(model: PreTrainedModel, layout: Layout, configuration: Configuration, cut: Cut) -> StructuredResult:
    """Cut a model in place; its class, its ties and its number type stay.

    The cut model must give the logits that the whole model gives with the inputs of the cut columns set to zero and the
    cut layers passed by. (Cut channels have no such twin: the norms count channels.) Until that is checked the model is
    left as it is, so both are in memory, tensors that are not cut once.

    Raises:
        UnsupportedError: the changed configuration builds other shapes, or something in the blocks depends on what was
            cut without being a unit.
        CheckFailed: the logits are NaN or infinite.

    Example:
        >>> cut = Cut(configuration.layers([0, 1, 2, 4]), layers=[0, 1, 2, 4])
        >>> apply(model, layout, configuration, cut).sparsity
        0.2
    """
    before, size = shapes_of(model), block_parameters(model)
    state = _cut_state(model, layout, cut)
    fresh = _build(model, configuration, cut, state)
    found = _logits(fresh)
    if not torch.isfinite(found).all():
        raise CheckFailed("the cut model gives logits that are NaN or infinite; check the model, or load it in float32")
    if cut.channels is None:
        with _masked(model, layout, cut):
            expected = _logits(model)
        tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
        if (found - expected).abs().max() > tolerance * expected.abs().max().clamp_min(1e-6):
            raise UnsupportedError(
                f"the cut {type(model).__name__} does not give the logits of the whole one with the same parts masked: "
                "something in its blocks depends on what was cut; cut other parts, as neurons or layers"
            )
    _become(model, fresh)
    kept = {reader: [units.tolist() for units in layers] for reader, layers in cut.units.items()}
    if cut.layers is not None:
        kept["layers"] = [list(cut.layers)]
    if cut.channels is not None:
        kept["channels"] = [cut.channels.tolist()]
    return StructuredResult(1 - block_parameters(model) / size, before, shapes_of(model), kept)


def unit_cost(model: PreTrainedModel, family: Family) -> int:
    """Parameters of a layer that one unit of a family takes, biases counted."""
    modules = linear_modules(find_stack(model).blocks[0].module)
    cost = family.columns.shape[1] * weight_of(modules[family.reader]).shape[0]
    for name, rows in family.rows.items():
        cost += rows.shape[1] * (weight_of(modules[name]).shape[1] + (modules[name].bias is not None))
    return cost


def block_parameters(model: PreTrainedModel) -> int:
    """Parameters of all blocks together."""
    return sum(p.numel() for block in find_stack(model).blocks for p in block.module.parameters())


def _cut_state(model: PreTrainedModel, layout: Layout, cut: Cut) -> dict[str, Tensor]:
    """All saved tensors of the cut model; those that nothing is cut of are the model's own."""
    selections = _selections(model, layout, cut)
    names = _new_names(layout, cut.layers)
    done: dict[int, Tensor] = {}  # by tied parameter: what is one stays one
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if names(name) is None:
            continue
        if id(tensor) not in done:
            data = tensor.detach()
            for dim, index in selections.get(name, ()):
                data = data.index_select(dim, index.to(data.device))
            trainable = isinstance(tensor, nn.Parameter)
            done[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if trainable else data
        state[str(names(name))] = done[id(tensor)]
    for reader, added in cut.biases.items():
        for layer, bias in enumerate(added):
            name = f"{layout.stack}.{layer}.{reader}.bias"
            old = state.get(name)
            total = bias.float() if old is None else bias.to(old.device).float() + old.detach().float()
            state[name] = nn.Parameter(total.to(model.device, model.dtype))
    return state


def _selections(model: PreTrainedModel, layout: Layout, cut: Cut) -> dict[str, list[tuple[int, Tensor]]]:
    """By tensor, the dimensions to shorten and the indices that stay."""
    selections: dict[str, list[tuple[int, Tensor]]] = {}
    families = {family.reader: family for family in layout.families}
    modules = linear_modules(find_stack(model).blocks[0].module)
    for reader, layers in cut.units.items():
        family = families[reader]
        for layer, units in enumerate(layers):
            prefix = f"{layout.stack}.{layer}"
            columns = _remaining(family.columns, units, family.columns.numel())
            selections.setdefault(f"{prefix}.{reader}.weight", []).append((1 - output_dim(modules[reader]), columns))
            for producer, rows in family.rows.items():
                dim = output_dim(modules[producer])
                index = _remaining(rows, units, weight_of(modules[producer]).shape[0])
                selections.setdefault(f"{prefix}.{producer}.weight", []).append((dim, index))
                selections.setdefault(f"{prefix}.{producer}.bias", []).append((0, index))
    if cut.channels is not None:
        for name, dims in cut.channel_dims.items():
            selections.setdefault(name, []).extend((dim, cut.channels) for dim in dims)
    return selections


def _remaining(members: Tensor, units: Tensor, size: int) -> Tensor:
    """Indices below `size` but for those of the units that go; members [units, of each]."""
    stays = torch.ones(size, dtype=torch.bool)
    stays[members] = False
    stays[members[units]] = True
    return stays.nonzero().flatten()


def _new_names(layout: Layout, layers: Sequence[int] | None) -> Callable[[str], str | None]:
    """Names of tensors with the layers numbered anew; None for a tensor of a layer that goes."""
    prefix = f"{layout.stack}."
    numbers = {old: new for new, old in enumerate(range(layout.layers) if layers is None else layers)}

    def rename(name: str) -> str | None:
        if not name.startswith(prefix):
            return name
        number, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{numbers[int(number)]}.{rest}" if int(number) in numbers else None

    return rename


def _build(model: PreTrainedModel, configuration: Configuration, cut: Cut, state: dict[str, Tensor]) -> PreTrainedModel:
    """The model that the changed configuration builds, as from_pretrained would, with these tensors."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    # Buffers are not saved but computed, so they alone are made for real.
    with init_empty_weights(include_buffers=False):
        fresh: PreTrainedModel = type(model)(configuration.changed(cut.changes))
    shapes = shapes_of(fresh)
    if cut.biases:
        for name in shapes.keys() - state.keys():
            if name.endswith(".bias"):  # the field that gives the reader a bias gives it to its neighbours
                state[name] = nn.Parameter(torch.zeros(shapes[name], dtype=model.dtype, device=model.device))
    if shapes != {name: tuple(tensor.shape) for name, tensor in state.items()}:
        raise UnsupportedError(f"the configuration of {type(model).__name__} cannot hold this cut; cut other parts")
    fresh.load_state_dict(state, strict=True, assign=True)
    fresh.tie_weights()
    nn.Module.to(fresh, model.device)
    fresh.train(model.training)
    return fresh


def _become(model: PreTrainedModel, fresh: PreTrainedModel) -> None:
    """Give a model the modules, the configuration and all else of another of its class."""
    own = vars(model)
    kept: dict[str, Any] = {name: own[name] for name in ("generation_config", "name_or_path") if name in own}
    own.update(vars(fresh))
    own.update(kept)


def _logits(model: PreTrainedModel) -> Tensor:
    """Logits of a few random tokens, float32, [tokens, vocabulary]."""
    ids = random_tokens(model, 1, CHECKED_TOKENS, torch.Generator().manual_seed(0))
    with evaluating(model), torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0].float()


@contextmanager
def _masked(model: PreTrainedModel, layout: Layout, cut: Cut) -> Iterator[None]:
    """The model with zeros for what is cut, the biases added, and the layers that go passed by."""
    families = {family.reader: family for family in layout.families}
    handles = []
    for layer, block in enumerate(find_stack(model).blocks):
        modules = linear_modules(block.module)
        for reader, kept in cut.units.items():
            columns = _remaining(families[reader].columns, kept[layer], families[reader].columns.numel())
            handles.append(modules[reader].register_forward_pre_hook(_keep_columns(columns)))
        for reader, added in cut.biases.items():
            handles.append(modules[reader].register_forward_hook(_add(added[layer])))
        if cut.layers is not None and layer not in cut.layers:
            handles.append(block.module.register_forward_hook(_pass_by, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep_columns(columns: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        mask = torch.zeros(args[0].shape[-1]).index_fill(0, columns, 1).to(args[0])
        return (args[0] * mask, *args[1:])

    return hook


def _add(bias: Tensor) -> Callable[..., Tensor]:
    def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return output + bias.to(output)

    return hook


def _pass_by(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden
