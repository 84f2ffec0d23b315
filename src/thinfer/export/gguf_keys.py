"""The GGUF keys of a configuration, and which configurations GGUF cannot express."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer.core.config import ModelConfig
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models.gguf_config import SPARSE_LLAMA
from thinfer.models.rope import default_frequencies

ROPE_FACTORS = "rope_freqs.weight"

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_QWEN3_HEAD_DIM = 128
_WRITTEN = ("llama", "qwen2", "qwen3")
_WIDTHS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def require_uniform(checkpoint: Checkpoint) -> None:
    """Refuse a model whose layers differ in width.

    GGUF can store a width for each layer, but the readers of the architectures written here size every layer alike.

    Raises:
        UnsupportedError: Names two layers that differ.
    """
    listed = [name for name in _WIDTHS if isinstance(checkpoint.metadata.get(name), list)]
    differ = "config.json gives widths per layer" if checkpoint.metadata.get("per_layer_config") or listed else None
    first: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, info in checkpoint.tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None or differ:
            continue
        layer, shape = first.setdefault(found[2], (found[1], info.shape))
        if shape != info.shape:
            differ = f"{found[2]} is {shape} in layer {layer} and {info.shape} in layer {found[1]}"
    if differ:
        raise UnsupportedError(
            f"{checkpoint.path}: the layers differ in width ({differ}), and a GGUF file of this architecture has one"
            " for all; prune with uniform widths"
        )


def architecture_name(config: ModelConfig, archs: Sequence[str]) -> str:
    """GGUF's name for a model: the first of its architecture's, or the one with a key for its activation.

    Raises:
        UnsupportedError: The architecture is not written here, or has no such name and the model needs it.

    Example:
        >>> architecture_name(config, ("llama", "thinfer-llama"))  # a ReLU model  # doctest: +SKIP
        'thinfer-llama'
    """
    if not archs or archs[0] not in _WRITTEN:
        raise UnsupportedError(
            f"models of type {config.model_type} are not written as GGUF, only {', '.join(_WRITTEN)}; thinfer runs the"
            " Hugging Face folder as it is"
        )
    if config.hidden_act == "silu" and not config.norm_act:
        return archs[0]
    if SPARSE_LLAMA not in archs:
        found = f"{config.hidden_act} after its norms" if config.norm_act else config.hidden_act
        raise UnsupportedError(f"GGUF architecture {archs[0]} always has silu, the model has {found}")
    return SPARSE_LLAMA


def architecture_keys(config: ModelConfig, arch: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The keys below ``arch`` that say what the model is, without the prefix; whole numbers are int.

    Args:
        config: The model.
        arch: GGUF's name of the architecture.
        metadata: The model's config.json, for the base and the scaling of its rotary frequencies.

    Raises:
        UnsupportedError: GGUF has no way to say it.

    Example:
        >>> architecture_keys(config, "llama", {})["block_count"]  # doctest: +SKIP
        30
    """
    if len(set(config.layer_windows)) > 1:
        raise UnsupportedError(f"GGUF architecture {arch} has one sliding window for all layers, the model several")
    scaling = _scaling(metadata)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(scaling.get("rope_theta") or metadata.get("rope_theta") or 10000.0),
    }
    window = config.layer_windows[0] if config.layer_windows else None
    if window is not None:
        keys["attention.sliding_window"] = window
    if arch == SPARSE_LLAMA:
        keys["activation"] = config.hidden_act
        keys |= {"activation_threshold": config.act_threshold} if config.act_threshold else {}
        keys |= {"norm_activation": config.norm_act} if config.norm_act else {}
    return keys | _scaling_keys(config, scaling)


def rope_factors(config: ModelConfig, arch: str, metadata: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """What each rotary frequency is divided by, float32 [head_dim / 2]; None where keys say it all.

    Raises:
        UnsupportedError: The model needs them and readers of this architecture do not look for them.
    """
    scaling = _scaling(metadata)
    if _kind(scaling) != "llama3":
        return None
    if arch not in ("llama", SPARSE_LLAMA):
        raise UnsupportedError(f"GGUF architecture {arch} has no rope scaling 'llama3'")
    theta = float(scaling.get("rope_theta") or metadata.get("rope_theta") or 10000.0)
    inv_freq = np.asarray(config.rope.inv_freq, np.float32)
    factors: NDArray[np.float32] = np.divide(default_frequencies(config.head_dim, theta), inv_freq, dtype=np.float32)
    return factors


def reader_notes(config: ModelConfig, arch: str, metadata: Mapping[str, Any]) -> list[str]:
    """What some readers of the file are known to leave out."""
    notes = []
    if arch == SPARSE_LLAMA:
        notes.append(
            f"no reader but thinfer knows {arch}: GGUF's llama has no key for the activation {config.hidden_act}"
        )
    window = config.layer_windows[0] if config.layer_windows else None
    if window is not None:
        notes.append(f"only thinfer keeps the sliding window of {window}; other readers differ in longer texts")
    kind = _kind(_scaling(metadata))
    if kind in ("linear", "yarn", "llama3"):
        notes.append(f"transformers' GGUF reader leaves out the rope scaling {kind}; thinfer and llama.cpp do not")
    if arch == "llama" and (config.attention_bias or config.output_bias or config.mlp_bias):
        notes.append("transformers' GGUF reader leaves out the biases; thinfer and llama.cpp do not")
    if arch == "qwen3" and config.head_dim != _QWEN3_HEAD_DIM:
        notes.append(
            f"transformers' GGUF reader takes every qwen3 head for {_QWEN3_HEAD_DIM} wide and refuses this file"
        )
    if arch == "qwen3" and (config.attention_bias or config.output_bias):
        notes.append("llama.cpp does not load a qwen3 with biases; thinfer does")
    return notes


def _scaling(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    scaling = metadata.get("rope_parameters") or metadata.get("rope_scaling")
    return scaling if isinstance(scaling, Mapping) else {}


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _scaling_keys(config: ModelConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    kind = _kind(scaling)
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
    if kind != "yarn":
        return {}
    context = int(scaling.get("original_max_position_embeddings") or config.max_position_embeddings)
    factor = float(scaling.get("factor") or config.max_position_embeddings / context)
    # Readers multiply this key with the magnitude that yarn gives.
    magnitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": context,
        "rope.scaling.yarn_beta_fast": float(scaling.get("beta_fast") or 32.0),
        "rope.scaling.yarn_beta_slow": float(scaling.get("beta_slow") or 1.0),
        "rope.scaling.attn_factor": config.rope.attention_factor / magnitude,
    }
