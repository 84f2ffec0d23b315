"""Reads the fields of config.json that all architectures share."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from thinfer.core.config import MAX_LAYERS, MAX_SIZE, ModelConfig, Rope
from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.kernels.act import ACTS
from thinfer.kernels.gated_act import DRELU
from thinfer.models.rope import make_rope

# Model types of "ReLU Strikes Back", stage 2 (arxiv 2310.04564): the original's with this before it, and norm_act relu.
RELUFIED = "relufied_"

# No activation of a trained model reaches it.
MAX_THRESHOLD = 1e6


class Fields:
    """Typed access to a JSON object; every complaint names the field and what it holds."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A whole number from 1 to `most`; `default` where the field is absent or null."""
        value = self.optional_integer(name, default, most)
        if value is None:
            raise CheckpointError(f"{self.where}: {name} is missing")
        return value

    def layers(self) -> int:
        """num_hidden_layers."""
        return self.integer("num_hidden_layers", most=MAX_LAYERS)

    def optional_integer(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int | None:
        """A whole number from 1 to `most`, or `default`."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise CheckpointError(f"{self.where}: {name} must be a whole number from 1 to {most}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"{self.where}: {name} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name} must be true or false, not {value!r}")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: absent, one number, or a list."""
        return token_ids(self.values.get(name), f"{self.where}: {name}")


def token_ids(value: object, where: str) -> tuple[int, ...]:
    """Token ids of a field that is null, one number, or a list of numbers."""
    items = [] if value is None else value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int):
            raise CheckpointError(f"{where} must hold token ids, not {item!r}")
    return tuple(dict.fromkeys(items))


def config_from_hf(values: Mapping[str, Any], **given: Any) -> ModelConfig:
    """The ModelConfig of a config.json; `given` are the fields that an architecture sets itself.

    Raises CheckpointError for missing or impossible values, UnsupportedError for features that are not built.
    """
    fields = Fields(values, "config.json")
    quantised = values.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise UnsupportedError(
            f"config.json: weights quantised by {method!r} are not supported; use the float checkpoint or a GGUF file"
        )
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads are not a multiple of {kv_heads} key-value heads")
    head_dim = fields.integer("head_dim", hidden // heads)
    max_positions = fields.integer("max_position_embeddings", 2048)
    layers = fields.layers()
    model_type = str(values.get("model_type"))
    norm_act = str(values.get("norm_act") or "")
    if model_type.startswith(RELUFIED) != (norm_act == "relu"):
        raise UnsupportedError(
            f"config.json: norm_act {norm_act!r} in model_type {model_type!r} is not supported; relu in {RELUFIED}* is"
        )
    act = check_act(values.get("hidden_act", "silu"))
    threshold = act_threshold(fields, act)
    bos = fields.ids("bos_token_id")
    built: dict[str, Any] = {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": act,
        "act_threshold": threshold,
        "norm_act": norm_act,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "vocab_size": fields.integer("vocab_size"),
        "max_position_embeddings": max_positions,
        "rope": given["rope"] if "rope" in given else rope_from_hf(fields, head_dim, max_positions),
        "layer_windows": (None,) * layers,
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": fields.ids("eos_token_id"),
    }
    return ModelConfig(**(built | given))


def own_heads(hidden: int, heads: int) -> dict[str, int]:
    """Fields of a model in which every query head has a key head, whatever else its file says."""
    return {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": hidden // heads}


def check_act(name: object) -> str:
    """The activation's name, if it is built."""
    if not isinstance(name, str) or name not in (*ACTS, DRELU):
        raise UnsupportedError(f"activation {name!r} is not supported; supported: {', '.join((*ACTS, DRELU))}")
    return name


def act_threshold(fields: Fields, act: str) -> float:
    """What fatrelu drops up to: hidden_act_param, as ProSparse and MiniCPM-S name it; 0 for other activations."""
    if act != "fatrelu":
        return 0.0
    value = fields.values.get("hidden_act_param")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_THRESHOLD:
        raise CheckpointError(
            f"{fields.where}: hidden_act_param must be fatrelu's threshold, from 0 to {MAX_THRESHOLD:g}, not {value!r}"
        )
    return float(value)


def rope_from_hf(fields: Fields, head_dim: int, max_positions: int, share: float | None = None) -> Rope:
    """Frequencies from rope_parameters (transformers 5) or rope_theta and rope_scaling (before).

    `share` is the part of a head that turns where the file does not say; None: architectures that turn all of it.
    """
    scaling = fields.values.get("rope_parameters") or fields.values.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"{fields.where}: rope scaling must be an object, not {scaling!r}")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UnsupportedError(f"{fields.where}: a rope scaling per kind of layer is not supported")
    found = scaling.get("partial_rotary_factor", fields.values.get("partial_rotary_factor"))
    if share is not None:
        part = Fields({"partial_rotary_factor": found}, fields.where).number("partial_rotary_factor", share)
        if part > 1:
            raise CheckpointError(f"{fields.where}: partial_rotary_factor must be at most 1, not {part}")
        head_dim = int(head_dim * part)
    elif found not in (None, 1, 1.0):
        raise UnsupportedError(f"{fields.where}: partial_rotary_factor {found} is not supported, only whole heads")
    theta = Fields(scaling, fields.where).number("rope_theta", fields.number("rope_theta", 10000.0))
    return make_rope(head_dim, theta, scaling, max_positions)


def upper_windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's sliding window: off unless use_sliding_window, by layer_types or from max_window_layers on.

    Returns the fields sliding_window and layer_windows of a ModelConfig.
    """
    fields = Fields(values, "config.json")
    layers = fields.layers()
    window = fields.optional_integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise CheckpointError(f"config.json: max_window_layers must be a whole number, not {first!r}")
        types = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"config.json: layer_types must be a list of {layers} entries")
    unknown = sorted({str(kind) for kind in types if not isinstance(kind, str) or kind not in known})
    if unknown:
        raise UnsupportedError(
            f"config.json: layer type {unknown[0]!r} is not supported; supported: {', '.join(known)}"
        )
    return {"sliding_window": window, "layer_windows": tuple(known[kind] for kind in types)}
