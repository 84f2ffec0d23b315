"""Nemotron, Minitron: squared ReLU without a gate, layer norms around 1, heads rotary in part (arxiv 2402.16819)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from thinfer.core.config import ModelConfig
from thinfer.core.graph import Graph
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models import gguf_config, hf_config
from thinfer.models.blocks import Naming, WeightSpec, decoder, decoder_weights

__all__ = ["GGUF_ARCHS", "HF_TYPES", "INTERLEAVED_GGUF", "build", "config_from_gguf", "config_from_hf", "weights"]

HF_TYPES = ("nemotron",)
GGUF_ARCHS = ("nemotron",)
INTERLEAVED_GGUF = False

_NAMING = Naming(ffn=("mlp.up_proj",), layer_norms=True)


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with model_type nemotron."""
    fields = hf_config.Fields(values, "config.json")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden // heads)
    bias = fields.flag("attention_bias")
    return hf_config.config_from_hf(
        {**values, "rms_norm_eps": fields.number("norm_eps", 1e-5), "hidden_act": values.get("hidden_act", "relu2")},
        rope=hf_config.rope_from_hf(fields, head_dim, fields.integer("max_position_embeddings", 4096), share=0.5),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        # Norm weights are stored as what they differ from 1.
        norm_offset=1.0,
    )


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a GGUF file with architecture nemotron, whose norm weights are whole."""
    return gguf_config.config_from_gguf(
        checkpoint, epsilon=gguf_config.LAYER_NORM_EPSILON, partial_rotary=True, hidden_act="relu2"
    )


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """All weights, with names and shapes."""
    return decoder_weights(config, _NAMING)


def build(config: ModelConfig) -> Graph:
    """The graph of one step."""
    return decoder(config, _NAMING)
