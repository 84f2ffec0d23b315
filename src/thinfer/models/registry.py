"""Finds the architecture of a checkpoint among the files of this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol, cast

import thinfer.models
from thinfer.core.config import ModelConfig
from thinfer.core.graph import Graph
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models.blocks import WeightSpec


class Architecture(Protocol):
    """What a file of this folder offers to be an architecture; HF_TYPES marks it as one.

    `INTERLEAVED_GGUF` says that GGUF files hold the rows of query and key heads with their two halves interleaved.
    """

    __name__: str
    HF_TYPES: tuple[str, ...]
    GGUF_ARCHS: tuple[str, ...]
    INTERLEAVED_GGUF: bool

    def config_from_hf(self, values: Mapping[str, Any], /) -> ModelConfig:
        """The configuration of a config.json."""
        ...

    def config_from_gguf(self, checkpoint: Checkpoint, /) -> ModelConfig:
        """The configuration of a GGUF file."""
        ...

    def weights(self, config: ModelConfig, /) -> Iterator[WeightSpec]:
        """All weights, with names and shapes."""
        ...

    def build(self, config: ModelConfig, /) -> Graph:
        """The graph of one step."""
        ...


@cache
def architectures() -> Mapping[str, Architecture]:
    """All architectures by file name."""
    names = [module.name for module in pkgutil.iter_modules(thinfer.models.__path__)]
    modules = {name: importlib.import_module(f"thinfer.models.{name}") for name in names}
    found = {name: cast(Architecture, module) for name, module in modules.items() if hasattr(module, "HF_TYPES")}
    return MappingProxyType(found)


def find_architecture(checkpoint: Checkpoint) -> Architecture:
    """The architecture that a checkpoint names; UnsupportedError lists the alternatives."""
    if checkpoint.kind == "gguf":
        word, wanted = "GGUF architecture", checkpoint.metadata.get("general.architecture")
        offered = {name: module for module in architectures().values() for name in module.GGUF_ARCHS}
    else:
        word, wanted = "model_type", checkpoint.metadata.get("model_type")
        offered = {name: module for module in architectures().values() for name in module.HF_TYPES}
    if not isinstance(wanted, str) or wanted not in offered:
        raise UnsupportedError(f"{word} {wanted!r} is not supported; supported: {', '.join(sorted(offered))}")
    return offered[wanted]
