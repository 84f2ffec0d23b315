"""What a model's configuration can say: smaller models are built on the meta device, without memory, and compared.

A cut is worth nothing if transformers builds other shapes from the saved config.json. Which field holds a width is not
known by name; the fields that could are changed, and the one that gives exactly the shapes of the cut is the one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import CRITICAL
from typing import TYPE_CHECKING, Any

import torch

from thinfer.errors import UnsupportedError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.structured.groups import Family, Layout, linear_modules, output_dim

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Changes = dict[str, Any]
"""Fields of a configuration and their new values."""

Shapes = dict[str, tuple[int, ...]]
"""Shape of each tensor of a model."""


class Configuration:
    """The configuration of a model, asked which cuts it can hold.

    Example:
        >>> configuration = Configuration(model, find_groups(model))
        >>> configuration.heads(layout.families[0], 2)
        {'num_attention_heads': 6, 'num_key_value_heads': 2, 'head_dim': 64}
    """

    def __init__(self, model: PreTrainedModel, layout: Layout) -> None:
        self._model = model
        self._layout = layout
        self._fields: dict[str, Any] = model.config.to_dict()
        self._known: dict[str, Changes | None] = {}
        block = find_stack(model).blocks[0].module
        self._dims = {name: output_dim(module) for name, module in linear_modules(block).items()}
        # One layer is enough to see a width, and quick to build; models that cannot be built so are built in full.
        real = shapes_of(model)
        self._short = self.layers([0])
        first = f"{layout.stack}.0."
        expected = {n: s for n, s in real.items() if n.startswith(first) or not n.startswith(f"{layout.stack}.")}
        self._shapes = expected
        if self.built(self._short) != expected:
            self._short, self._shapes = {}, real
            if self.built({}) != real:
                raise UnsupportedError(
                    f"{type(model).__name__}: its configuration does not build the shapes it has, so no smaller model "
                    "could be saved"
                )

    def built(self, changes: Changes) -> Shapes | None:
        """Shapes of the model that the changed configuration builds; None where it builds none."""
        try:
            with _quiet(), torch.device("meta"):
                return shapes_of(type(self._model)(self.changed(changes)))
        except Exception:
            # A field of another meaning was tried: whatever it breaks, it is not the one.
            return None

    def changed(self, changes: Changes) -> PreTrainedConfig:
        """The configuration with these fields changed, as it would be read from config.json."""
        config = type(self._model.config).from_dict({**self._fields, **changes})
        config._attn_implementation = self._model.config._attn_implementation
        return config

    def heads(self, family: Family, kept: int) -> Changes | None:
        """Fields for `kept` of the units of a family of heads, with the size of a head as it is; None: no fields do."""
        return self._remember(f"{family.reader} {kept}", self._head_fields(family, kept), self._narrowed(family, kept))

    def neurons(self, family: Family, kept: int) -> Changes | None:
        """Fields for `kept` neurons; None: no fields do."""
        tried = self._width_fields(family.units, kept)
        return self._remember(f"{family.reader} {kept}", tried, self._narrowed(family, kept))

    def kept(self, family: Family, kept: int) -> Changes | None:
        """Fields for `kept` units of a family; None: no fields do."""
        return self.heads(family, kept) if family.kind == "heads" else self.neurons(family, kept)

    def bias(self, family: Family) -> Changes | None:
        """Fields by which a family's reader has a bias (others may get one with it); None: no fields do."""
        name = f"{self._layout.stack}.0.{family.reader}.bias"
        if name in self._shapes:
            return {}
        for key, value in self._fields.items():
            if value is False and "bias" in key:
                shapes = self.built({**self._short, key: True})
                if shapes is not None and name in shapes and self._only_biases(shapes):
                    return {key: True}
        return None

    def channels(self, width: int) -> tuple[Changes, dict[str, list[int]]] | None:
        """Fields for a residual stream of another width, and the dimensions of each tensor that are it.

        None: no fields do, or something else changes with it.
        """
        hidden = int(self._model.config.hidden_size)
        for changes in [{**self._head_size(), **self._field("hidden_size", width)}, *self._width_fields(hidden, width)]:
            shapes = self.built({**self._short, **changes})
            dims = None if shapes is None else self._stream(shapes, hidden, width)
            if dims is not None:
                return changes, self._all_layers(dims)
        return None

    def layers(self, kept: Sequence[int]) -> Changes:
        """Fields for these layers alone: their number, and of every list with an entry a layer, theirs."""
        lists = {
            key: [value[index] for index in kept]
            for key, value in self._fields.items()
            if isinstance(value, list) and len(value) == self._layout.layers and "token" not in key
        }
        return {**lists, **self._field("num_hidden_layers", len(kept))}

    def _remember(self, key: str, tried: Iterator[Changes], wanted: Shapes) -> Changes | None:
        if key not in self._known:
            held = (changes for changes in tried if self.built({**self._short, **changes}) == wanted)
            self._known[key] = next(held, None)
        return self._known[key]

    def _narrowed(self, family: Family, kept: int) -> Shapes:
        """The shapes with `kept` units of a family in every layer."""
        cut, stack = family.units - kept, f"{self._layout.stack}."
        wanted = dict(self._shapes)
        for name in self._shapes:
            for module, dim, each in [
                *((producer, self._dims[producer], rows.shape[1]) for producer, rows in family.rows.items()),
                (family.reader, 1 - self._dims[family.reader], family.columns.shape[1]),
            ]:
                if name.startswith(stack) and name.endswith(f".{module}.weight"):
                    shape = list(wanted[name])
                    shape[dim] -= cut * each
                    wanted[name] = tuple(shape)
                elif module != family.reader and name.startswith(stack) and name.endswith(f".{module}.bias"):
                    wanted[name] = (wanted[name][0] - cut * each,)
        return wanted

    def _head_fields(self, family: Family, kept: int) -> Iterator[Changes]:
        counts = {
            key: value * kept // family.units
            for key, value in self._fields.items()
            if "head" in key and isinstance(value, int) and value > 1 and value * kept % family.units == 0
        }
        counts |= self._field("num_attention_heads", int(self._model.config.num_attention_heads) * kept // family.units)
        counts.pop("head_dim", None)
        yield {**counts, **self._head_size()}
        yield counts

    def _width_fields(self, old: int, new: int) -> Iterator[Changes]:
        yield from ({key: new} for key, value in self._fields.items() if value == old and type(value) is int)
        yield from ({key: new} for key, value in self._fields.items() if value is None)

    def _head_size(self) -> Changes:
        config = self._model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return {"head_dim": int(size)}

    def _field(self, name: str, value: int) -> Changes:
        return {self._model.config.attribute_map.get(name, name): value}

    def _only_biases(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return all(self._shapes.get(name, shape) == shape for name, shape in shapes.items()) and all(
            name.endswith(".bias") for name in shapes.keys() - self._shapes.keys()
        )

    def _stream(self, shapes: Shapes, old: int, new: int) -> dict[str, list[int]] | None:
        """Dimensions that went from `old` to `new`; None where units changed with them, or something else did."""
        if shapes.keys() != self._shapes.keys():
            return None
        dims: dict[str, list[int]] = {}
        for name, shape in shapes.items():
            before = self._shapes[name]
            changed = [dim for dim, (a, b) in enumerate(zip(before, shape, strict=True)) if a != b]
            if any((before[dim], shape[dim]) != (old, new) for dim in changed):
                return None
            if changed:
                dims[name] = changed
        prefix = f"{self._layout.stack}.0."
        for family in self._layout.families:
            inner = [(name, self._dims[name]) for name in family.rows]
            inner.append((family.reader, 1 - self._dims[family.reader]))
            if any(dim in dims.get(f"{prefix}{name}.weight", []) for name, dim in inner):
                return None
            if self._dims[family.reader] not in dims.get(f"{prefix}{family.reader}.weight", []):
                return None
        return dims

    def _all_layers(self, dims: Mapping[str, list[int]]) -> dict[str, list[int]]:
        prefix = f"{self._layout.stack}.0."
        every = {name: found for name, found in dims.items() if not name.startswith(f"{self._layout.stack}.")}
        for name, found in dims.items():
            if name.startswith(prefix):
                for layer in range(self._layout.layers):
                    every[f"{self._layout.stack}.{layer}.{name.removeprefix(prefix)}"] = found
        return every


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of transformers: a configuration that is only tried is of no interest to anyone."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def shapes_of(model: PreTrainedModel) -> Shapes:
    """Shapes of all tensors of a model that are saved."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
