"""OPT: learned positions, layer norms, biases everywhere, an FFN of ReLU without a gate (arxiv 2205.01068)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from thinfer.core.config import ModelConfig, Rope
from thinfer.core.graph import Graph
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models import hf_config
from thinfer.models.blocks import Naming, WeightSpec, decoder, decoder_weights

__all__ = ["GGUF_ARCHS", "HF_TYPES", "INTERLEAVED_GGUF", "build", "config_from_gguf", "config_from_hf", "weights"]

HF_TYPES = ("opt",)
GGUF_ARCHS = ()
INTERLEAVED_GGUF = False

_NAMING = Naming(
    embedding="model.decoder.embed_tokens",
    block="model.decoder.layers",
    attention_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    ffn_norm="final_layer_norm",
    ffn=("fc1",),
    down="fc2",
    final_norm="model.decoder.final_layer_norm",
    layer_norms=True,
    positions="model.decoder.embed_positions",
    # fairseq's table began at the padding token, and so do these.
    position_offset=2,
)


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with model_type opt; UnsupportedError for the odd layout of opt-350m."""
    fields = hf_config.Fields(values, "config.json")
    hidden = fields.integer("hidden_size")
    if fields.integer("word_embed_proj_dim", hidden) != hidden:
        raise UnsupportedError("config.json: word_embed_proj_dim other than hidden_size is not supported (opt-350m)")
    for name, wanted in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
    ):
        if fields.flag(name, wanted) is not wanted:
            raise UnsupportedError(f"config.json: an opt with {name} {str(not wanted).lower()} is not supported")
    bias = fields.flag("enable_bias", True)
    named = {
        **values,
        **hf_config.own_heads(hidden, fields.integer("num_attention_heads")),
        "intermediate_size": fields.integer("ffn_dim"),
        "hidden_act": values.get("activation_function", "relu"),
        "rms_norm_eps": 1e-5,
    }
    return hf_config.config_from_hf(
        named,
        rope=Rope(()),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """Never asked for: GGUF has no such architecture."""
    raise UnsupportedError(f"{checkpoint.path}: GGUF has no architecture opt; use the Hugging Face folder")


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """All weights, with names and shapes."""
    return decoder_weights(config, _NAMING)


def build(config: ModelConfig) -> Graph:
    """The graph of one step."""
    return decoder(config, _NAMING)
