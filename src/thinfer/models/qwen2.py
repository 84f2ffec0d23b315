"""Qwen2 and Qwen2.5: biases on q, k and v, an optional sliding window in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinfer.core.config import ModelConfig
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models import gguf_config, hf_config
from thinfer.models.blocks import decoder as build
from thinfer.models.blocks import decoder_weights as weights

__all__ = ["GGUF_ARCHS", "HF_TYPES", "INTERLEAVED_GGUF", "build", "config_from_gguf", "config_from_hf", "weights"]

HF_TYPES = ("qwen2", "relufied_qwen2")
GGUF_ARCHS = ("qwen2",)
INTERLEAVED_GGUF = False


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with model_type qwen2."""
    return hf_config.config_from_hf(values, attention_bias=True, **hf_config.upper_windows(values))


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a GGUF file with architecture qwen2."""
    return gguf_config.config_from_gguf(checkpoint)
