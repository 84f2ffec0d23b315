"""Reads the GGUF keys that all architectures share."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from thinfer.core.config import MAX_LAYERS, MAX_SIZE, ModelConfig, Rope
from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models.rope import make_rope

_ROPE_FACTORS = "rope_freqs.weight"

RMS_NORM_EPSILON = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"

SPARSE_LLAMA = "thinfer-llama"
"""Architecture of a llama with another activation than SiLU, which the key `thinfer-llama.activation` names."""


class Keys:
    """Typed access to `{arch}.*` keys of a GGUF file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.metadata = checkpoint.metadata
        self.arch = str(checkpoint.metadata.get("general.architecture"))

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; `default` where the key is absent."""
        key = f"{self.arch}.{name}"
        value: Any = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(f"GGUF key {key} is missing")
        if isinstance(value, (bool, str)) or np.ndim(value) or not math.isfinite(value):
            raise CheckpointError(f"GGUF key {key} must be one number, not {value!r}")
        return float(value)

    def integer(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A whole number from 1 to `most`."""
        value = self.number(name, default)
        if not 1 <= value <= most or value != int(value):
            raise CheckpointError(f"GGUF key {self.arch}.{name} must be a whole number from 1 to {most}, not {value:g}")
        return int(value)

    def text(self, name: str, default: str | None = None) -> str:
        """A string; `default` where the key is absent."""
        value: object = self.metadata.get(f"{self.arch}.{name}", default)
        if not isinstance(value, str):
            raise CheckpointError(f"GGUF key {self.arch}.{name} must be a string, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false; `default` where the key is absent."""
        value: object = self.metadata.get(f"{self.arch}.{name}", default)
        if not isinstance(value, (bool, np.bool_)):
            raise CheckpointError(f"GGUF key {self.arch}.{name} must be true or false, not {value!r}")
        return bool(value)

    def token(self, name: str) -> int | None:
        """The token id of tokenizer.ggml.{name}, or None."""
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise CheckpointError(f"GGUF key tokenizer.ggml.{name} must be a token id, not {value!r}")
        return value


def config_from_gguf(
    checkpoint: Checkpoint, *, epsilon: str = RMS_NORM_EPSILON, partial_rotary: bool = False, **given: Any
) -> ModelConfig:
    """The ModelConfig of a GGUF file; `given` are the fields that an architecture sets itself.

    `epsilon` names the key of the norms', and `partial_rotary` says that heads may turn in part. Biases and a separate
    head are there when their tensors are. Raises CheckpointError for missing or impossible keys, UnsupportedError for
    features that are not built.
    """
    keys = Keys(checkpoint)
    tensors = checkpoint.tensors
    if keys.number("expert_count", 0) > 0:
        raise UnsupportedError(f"GGUF architecture {keys.arch} with experts is not supported; dense models are")
    hidden = keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{keys.arch}: {heads} attention heads are not a multiple of {kv_heads} key-value heads")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    turned = keys.integer("rope.dimension_count", head_dim)
    widths = {"attention.value_length": keys.integer("attention.value_length", head_dim)}
    if not (partial_rotary and turned < head_dim):
        widths["rope.dimension_count"] = turned
    for name, width in widths.items():
        if width != head_dim:
            raise UnsupportedError(f"GGUF key {keys.arch}.{name} differs from the head width {head_dim}: not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("tensor token_embd.weight is missing")
    layers = keys.integer("block_count", most=MAX_LAYERS)
    max_positions = keys.integer("context_length")
    window = keys.integer("attention.sliding_window") if keys.number("attention.sliding_window", 0) else None
    ends = [keys.token(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    built: dict[str, Any] = {
        "model_type": keys.arch,
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number(epsilon),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": max_positions,
        "rope": given["rope"] if "rope" in given else rope_from_gguf(checkpoint, keys, turned, max_positions),
        "sliding_window": window,
        "layer_windows": (window,) * layers,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": keys.token("bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(end for end in ends if end is not None)),
    }
    return ModelConfig(**(built | given))


def rope_from_gguf(checkpoint: Checkpoint, keys: Keys, head_dim: int, max_positions: int) -> Rope:
    """Frequencies from rope.freq_base and rope.scaling.*, divided by rope_freqs.weight where the file has one."""
    kind = str(keys.metadata.get(f"{keys.arch}.rope.scaling.type", "none"))
    scaling: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    if kind == "linear":
        scaling["factor"] = keys.number("rope.scaling.factor")
    elif kind == "yarn":
        factor = keys.number("rope.scaling.factor")
        scale = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1.0))
        scaling |= {
            "factor": factor,
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length", max_positions),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
            # llama.cpp multiplies this key with the magnitude that yarn gives; transformers' field replaces it.
            "attention_factor": scale * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
        }
    rope = make_rope(head_dim, keys.number("rope.freq_base", 10000.0), scaling, max_positions)
    if _ROPE_FACTORS not in checkpoint.tensors:
        return rope
    factors = checkpoint.decode(_ROPE_FACTORS)
    if factors.shape != (head_dim // 2,) or not np.all(factors > 0):
        raise CheckpointError(f"tensor {_ROPE_FACTORS} must hold {head_dim // 2} positive factors")
    scaled = np.asarray(rope.inv_freq, np.float32) / factors
    return replace(rope, inv_freq=tuple(float(f) for f in scaled))


def used_by_config(name: str) -> bool:
    """Whether a tensor was read into the configuration, so that it is not one of the ignored."""
    return name == _ROPE_FACTORS
