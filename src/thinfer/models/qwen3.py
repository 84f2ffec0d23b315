"""Qwen3: RMS norms over each query and key head, and a head width of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinfer.core.config import ModelConfig
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models import gguf_config, hf_config
from thinfer.models.blocks import decoder as build
from thinfer.models.blocks import decoder_weights as weights

__all__ = ["GGUF_ARCHS", "HF_TYPES", "INTERLEAVED_GGUF", "build", "config_from_gguf", "config_from_hf", "weights"]

HF_TYPES = ("qwen3", "relufied_qwen3")
GGUF_ARCHS = ("qwen3",)
INTERLEAVED_GGUF = False


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with model_type qwen3."""
    bias = hf_config.Fields(values, "config.json").flag("attention_bias")
    # transformers' default head width does not follow from the hidden size.
    return hf_config.config_from_hf(
        {"head_dim": 128, **values},
        qk_norm=True,
        attention_bias=bias,
        output_bias=bias,
        **hf_config.upper_windows(values),
    )


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a GGUF file with architecture qwen3."""
    return gguf_config.config_from_gguf(checkpoint, qk_norm=True)
