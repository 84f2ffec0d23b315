"""GPT-NeoX and Pythia: attention and FFN side by side, rotary positions on a part of each head (arxiv 2204.06745)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from thinfer.core.config import ModelConfig
from thinfer.core.graph import Graph
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models import gguf_config, hf_config
from thinfer.models.blocks import Naming, WeightSpec, decoder, decoder_weights

__all__ = ["GGUF_ARCHS", "HF_TYPES", "INTERLEAVED_GGUF", "build", "config_from_gguf", "config_from_hf", "weights"]

HF_TYPES = ("gpt_neox",)
GGUF_ARCHS = ("gptneox",)
INTERLEAVED_GGUF = False

_NAMING = Naming(
    embedding="gpt_neox.embed_in",
    block="gpt_neox.layers",
    qkv=("attention.query_key_value",),
    output="attention.dense",
    ffn=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
    heads=("embed_out", "lm_head"),
    layer_norms=True,
)


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with model_type gpt_neox."""
    fields = hf_config.Fields(values, "config.json")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    bias = fields.flag("attention_bias", True)
    # The names before transformers 5.
    theta = {"rope_theta": fields.number("rotary_emb_base", fields.number("rope_theta", 10000.0))}
    rope = hf_config.rope_from_hf(
        hf_config.Fields({**values, **theta}, fields.where),
        hidden // heads,
        fields.integer("max_position_embeddings", 2048),
        share=fields.number("rotary_pct", 0.25),
    )
    named = {
        **values,
        **hf_config.own_heads(hidden, heads),
        "hidden_act": values.get("hidden_act", "gelu"),
        "rms_norm_eps": fields.number("layer_norm_eps", 1e-5),
    }
    return hf_config.config_from_hf(
        named,
        rope=rope,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        parallel_residual=fields.flag("use_parallel_residual", True),
    )


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a GGUF file with architecture gptneox."""
    keys = gguf_config.Keys(checkpoint)
    return gguf_config.config_from_gguf(
        checkpoint,
        epsilon=gguf_config.LAYER_NORM_EPSILON,
        partial_rotary=True,
        hidden_act="gelu",
        parallel_residual=keys.flag("use_parallel_residual", True),
    )


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """All weights, with names and shapes."""
    return decoder_weights(config, _NAMING)


def build(config: ModelConfig) -> Graph:
    """The graph of one step."""
    return decoder(config, _NAMING)
