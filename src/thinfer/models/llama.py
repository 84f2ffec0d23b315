"""Llama 2 and 3, SmolLM2, and Mistral with its sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinfer.core.config import ModelConfig
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models import gguf_config, hf_config
from thinfer.models.blocks import decoder as build
from thinfer.models.blocks import decoder_weights as weights

__all__ = ["GGUF_ARCHS", "HF_TYPES", "INTERLEAVED_GGUF", "build", "config_from_gguf", "config_from_hf", "weights"]

HF_TYPES = ("llama", "mistral")
GGUF_ARCHS = ("llama",)

# llama.cpp rotates neighbouring rows of this architecture, so its converter interleaves the halves of each head.
INTERLEAVED_GGUF = True


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with model_type llama or mistral."""
    fields = hf_config.Fields(values, "config.json")
    layers = fields.layers()
    window = fields.optional_integer("sliding_window") if values.get("model_type") == "mistral" else None
    bias = fields.flag("attention_bias")
    return hf_config.config_from_hf(
        values,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        sliding_window=window,
        layer_windows=(window,) * layers,
    )


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a GGUF file with architecture llama."""
    return gguf_config.config_from_gguf(checkpoint)
