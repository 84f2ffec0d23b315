"""Bloom: ALiBi instead of positions, layer norms, biases everywhere, a GELU without a gate (arxiv 2211.05100)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from thinfer.core.config import ModelConfig, Rope
from thinfer.core.graph import Graph
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models import gguf_config, hf_config
from thinfer.models.blocks import Naming, WeightSpec, decoder, decoder_weights

__all__ = ["GGUF_ARCHS", "HF_TYPES", "INTERLEAVED_GGUF", "build", "config_from_gguf", "config_from_hf", "weights"]

HF_TYPES = ("bloom",)
GGUF_ARCHS = ("bloom",)
INTERLEAVED_GGUF = False

_NAMING = Naming(
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    block="transformer.h",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    ffn=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
    layer_norms=True,
)
# Its own GELU is the tanh approximation.
_ALWAYS: Mapping[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "rope": Rope(()), "alibi": True}
_CONTEXT = 2048


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with model_type bloom."""
    fields = hf_config.Fields(values, "config.json")
    if fields.flag("apply_residual_connection_post_layernorm"):
        raise UnsupportedError("config.json: apply_residual_connection_post_layernorm is not supported")
    hidden = fields.integer("hidden_size", fields.optional_integer("n_embed"))
    named = {
        **values,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": fields.integer("n_layer", fields.optional_integer("num_hidden_layers")),
        **hf_config.own_heads(hidden, fields.integer("n_head", fields.optional_integer("num_attention_heads"))),
        "max_position_embeddings": fields.integer("seq_length", _CONTEXT),
        "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
    }
    return hf_config.config_from_hf(
        named,
        **_ALWAYS,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a GGUF file with architecture bloom."""
    return gguf_config.config_from_gguf(checkpoint, epsilon=gguf_config.LAYER_NORM_EPSILON, **_ALWAYS)


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """All weights, with names and shapes."""
    return decoder_weights(config, _NAMING)


def build(config: ModelConfig) -> Graph:
    """The graph of one step."""
    return decoder(config, _NAMING)
