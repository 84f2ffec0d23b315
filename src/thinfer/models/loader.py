"""Turns a checkpoint into a Model: configuration, graph, and weights in the engine's own order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thinfer.core.config import ModelConfig
from thinfer.core.graph import Graph
from thinfer.errors import CheckpointError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.formats.tensor import require_supported
from thinfer.models import gguf_config
from thinfer.models.blocks import GGUF_EMBEDDING, WeightSpec
from thinfer.models.hf_config import token_ids
from thinfer.models.registry import Architecture, find_architecture


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where one weight lies in its checkpoint.

    `row_index` is None, or for each index of the weight's first axis the stored one: `stored[row_index]` is in the
    engine's order (q|k|v, rotate-half rope). `type` and `shape` are as in TensorInfo.
    """

    checkpoint: Checkpoint
    stored_name: str
    type: str
    shape: tuple[int, ...]
    row_index: NDArray[np.int32] | None

    @property
    def raw(self) -> NDArray[np.uint8]:
        """Stored bytes, read-only [rows, row_bytes] in stored order; a 1-D weight is one row."""
        return self.checkpoint.raw(self.stored_name)

    def float32(self) -> NDArray[np.float32]:
        """Decoded values of the weight's shape, in the engine's order."""
        values = self.checkpoint.decode(self.stored_name)
        return values if self.row_index is None else values[self.row_index]

    def release(self) -> None:
        """Let the system drop the source's pages; they are read again when needed."""
        self.checkpoint.release(self.stored_name)


class Weights:
    """Weights of a model by their Hugging Face names; a tied head is the embedding."""

    def __init__(self, sources: Mapping[str, WeightSource]) -> None:
        self._sources = dict(sources)
        first: dict[int, str] = {}
        for name, source in self._sources.items():
            first.setdefault(id(source), name)
        self._own = tuple(first.values())

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    @property
    def names(self) -> tuple[str, ...]:
        """All names; a tied head is not among them, though `source` knows it."""
        return self._own

    def source(self, name: str) -> WeightSource:
        """Where a weight lies; CheckpointError when the model has no such weight."""
        source = self._sources.get(name)
        if source is None:
            raise CheckpointError(f"the model has no weight {name}")
        return source

    def float32(self, name: str) -> NDArray[np.float32]:
        """The decoded weight, in the engine's order."""
        return self.source(name).float32()


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint understood: everything an executor needs, no weight decoded yet.

    `ignored` names the checkpoint's tensors that the graph does not use.
    """

    config: ModelConfig
    graph: Graph
    weights: Weights
    ignored: tuple[str, ...]
    checkpoint: Checkpoint

    @property
    def num_parameters(self) -> int:
        """Number of weight values; a tied head counts once."""
        return sum(int(np.prod(self.weights.source(name).shape)) for name in self.weights.names)


def load_model(checkpoint: Checkpoint) -> Model:
    """Read a checkpoint's configuration and check every weight's presence and shape against it.

    Raises UnsupportedError for an architecture, feature or tensor type that is not built, CheckpointError for missing
    tensors (all are listed) and for a shape that does not fit the configuration (the tensor, both shapes).

    Example: `load_model(open_checkpoint("model.gguf")).config.num_hidden_layers`.
    """
    architecture = find_architecture(checkpoint)
    gguf = checkpoint.kind == "gguf"
    if gguf:
        config = architecture.config_from_gguf(checkpoint)
    else:
        config = _with_generation_ends(architecture.config_from_hf(checkpoint.metadata), checkpoint)
    specs = list(architecture.weights(config))
    stored = {spec.name: spec.gguf_name if gguf else _stored_name(spec, checkpoint) for spec in specs}
    missing = [name for name in stored.values() if name not in checkpoint.tensors]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CheckpointError(f"{checkpoint.path}: {len(missing)} tensors are missing: {shown}")
    for name in stored.values():
        require_supported(checkpoint.tensors[name], str(checkpoint.path), checkpoint.tensors)
    sources = {spec.name: _source(checkpoint, architecture, spec, stored[spec.name]) for spec in specs}
    graph = architecture.build(config)
    if config.tie_word_embeddings:
        head = next(node for node in graph.nodes if node.op == "linear" and node.attrs["kind"] == "lm_head")
        embedding = next(spec.name for spec in specs if spec.gguf_name == GGUF_EMBEDDING)
        sources[head.weights[0]] = sources[embedding]
    used = set(stored.values())
    ignored = tuple(n for n in checkpoint.tensors if n not in used and not (gguf and gguf_config.used_by_config(n)))
    return Model(config, graph, Weights(sources), ignored, checkpoint)


def _with_generation_ends(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """generation_config's end-of-text tokens, where it has any: chat models end turns with others than config.json."""
    ends = token_ids(checkpoint.generation_config.get("eos_token_id"), "generation_config.json: eos_token_id")
    return replace(config, eos_token_ids=ends) if ends else config


def _stored_name(spec: WeightSpec, checkpoint: Checkpoint) -> str:
    """A weight's name in a Hugging Face folder: its own, an alias, or that of a base model saved without its head."""
    names = (spec.name, *spec.aliases, spec.name.partition(".")[2])
    return next((name for name in names if name in checkpoint.tensors), spec.name)


def _source(checkpoint: Checkpoint, architecture: Architecture, spec: WeightSpec, stored: str) -> WeightSource:
    info = checkpoint.tensors[stored]
    if info.shape != spec.shape:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {stored} has shape {info.shape}, but the configuration needs {spec.shape}"
        )
    index = None
    gguf = checkpoint.kind == "gguf"
    if gguf and architecture.INTERLEAVED_GGUF and spec.rotary_heads:
        # Stored row (head, j, half) is row (head, half, j) of the engine.
        rows = np.arange(spec.shape[0], dtype=np.int32).reshape(spec.rotary_heads, -1, 2)
        index = rows.swapaxes(1, 2).reshape(-1)
    elif not gguf and spec.fused_heads is not None and spec.fused_heads[0] > 1:
        kv_heads, queries, head_dim = spec.fused_heads
        rows = np.arange(spec.shape[0], dtype=np.int32).reshape(kv_heads, queries + 2, head_dim)
        index = np.concatenate([rows[:, :queries].reshape(-1), rows[:, queries].reshape(-1), rows[:, -1].reshape(-1)])
    return WeightSource(checkpoint, stored, info.type, info.shape, index)
