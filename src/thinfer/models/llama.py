"""Llama 2 and 3, SmolLM2, Mistral with its sliding window, and their sparse kin.

Those have hidden_act relu (ReluLLaMA, stage 1 of arxiv 2310.04564), fatrelu with its threshold in hidden_act_param
(ProSparse, arxiv 2402.13516; MiniCPM-S in its llama format), or drelu: relu on gate and up (arxiv 2406.05955), which
the files of TurboSparse-Mistral and Bamboo call relu under model_type bamboo. Types that begin with relufied_ have ReLU
after the norms of their blocks too (stage 2 of arxiv 2310.04564).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinfer.core.config import ModelConfig
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.kernels.gated_act import DRELU
from thinfer.models import gguf_config, hf_config
from thinfer.models.blocks import decoder as build
from thinfer.models.blocks import decoder_weights as weights

__all__ = ["GGUF_ARCHS", "HF_TYPES", "INTERLEAVED_GGUF", "build", "config_from_gguf", "config_from_hf", "weights"]

HF_TYPES = ("llama", "mistral", "bamboo", "relufied_llama", "relufied_mistral")
# GGUF's llama has no key for its activation, and other readers would silently take SiLU; hence a name of its own.
GGUF_ARCHS = ("llama", gguf_config.SPARSE_LLAMA)

# llama.cpp rotates neighbouring rows of this architecture, so its converter interleaves the halves of each head.
INTERLEAVED_GGUF = True

_BAMBOO = "bamboo"


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with one of the model_types here."""
    fields = hf_config.Fields(values, "config.json")
    layers = fields.layers()
    if values.get("model_type") == _BAMBOO:
        values = _drelu(values)
    windowed = not str(values.get("model_type")).endswith("llama")
    window = fields.optional_integer("sliding_window") if windowed else None
    bias = fields.flag("attention_bias")
    return hf_config.config_from_hf(
        values,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        sliding_window=window,
        layer_windows=(window,) * layers,
    )


def _drelu(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A bamboo's configuration with its activation by this engine's name."""
    # transformers has another bamboo, a hybrid with state space layers.
    if any(name.startswith("mamba_") for name in values):
        raise UnsupportedError("config.json: model_type bamboo with mamba layers is not supported; dReLU models are")
    act = values.get("hidden_act", "relu")
    if act != "relu":
        raise UnsupportedError(f"config.json: a bamboo with hidden_act {act!r} is not supported; relu is")
    return {**values, "hidden_act": DRELU}


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a GGUF file with architecture llama, or thinfer-llama with its activation in keys."""
    keys = gguf_config.Keys(checkpoint)
    if keys.arch != gguf_config.SPARSE_LLAMA:
        return gguf_config.config_from_gguf(checkpoint)
    act = hf_config.check_act(keys.text("activation"))
    norm_act = keys.text("norm_activation", "")
    if norm_act:
        hf_config.check_act(norm_act)
    threshold = keys.number("activation_threshold", 0.0)
    return gguf_config.config_from_gguf(checkpoint, hidden_act=act, act_threshold=threshold, norm_act=norm_act)
