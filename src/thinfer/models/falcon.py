"""Falcon 1 and 2, and ReluFalcon: attention beside or before an FFN without a gate, rotary positions or ALiBi.

Old decoders have one key head (7B) or one a query head (RW), new ones (40B, 11B) groups; arxiv 2311.16867. A model with
activation relu is ReluFalcon (arxiv 2310.04564).
"""

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

HF_TYPES = ("falcon",)
GGUF_ARCHS = ("falcon",)
INTERLEAVED_GGUF = False


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a config.json with model_type falcon."""
    fields = hf_config.Fields(values, "config.json")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    grouped, parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn", True)
    if grouped and not parallel:
        raise UnsupportedError("config.json: new_decoder_architecture without parallel_attn is not supported")
    kv_heads = heads
    if grouped:
        kv_heads = fields.integer("num_kv_heads", heads)
    elif fields.flag("multi_query", True):
        kv_heads = 1
    norms = fields.integer("num_ln_in_parallel_attn", 2 if grouped else 1, most=2)
    if norms == 2 and not grouped and parallel:
        raise UnsupportedError("config.json: two norms in an old decoder with parallel_attn are not supported")
    bias, alibi = fields.flag("bias"), fields.flag("alibi")
    named = {
        **values,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": fields.integer("ffn_hidden_size", 4 * hidden),
        "hidden_act": values.get("activation") or "gelu",
        "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
    }
    given = {"rope": Rope(())} if alibi else {}
    return hf_config.config_from_hf(
        named,
        **given,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        parallel_residual=parallel,
        shared_norm=parallel and norms == 1,
        alibi=alibi,
    )


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a GGUF file with architecture falcon, which is always parallel and rotary."""
    return gguf_config.config_from_gguf(
        checkpoint,
        epsilon=gguf_config.LAYER_NORM_EPSILON,
        hidden_act="gelu",
        parallel_residual=True,
        shared_norm="blk.0.attn_norm_2.weight" not in checkpoint.tensors,
    )


def weights(config: ModelConfig) -> Iterator[WeightSpec]:
    """All weights, with names and shapes."""
    return decoder_weights(config, _naming(config))


def build(config: ModelConfig) -> Graph:
    """The graph of one step."""
    return decoder(config, _naming(config))


def _naming(config: ModelConfig) -> Naming:
    attention_norm, ffn_norm, stored = "input_layernorm", "post_attention_layernorm", ("attn_norm", "ffn_norm")
    if config.shared_norm:
        ffn_norm = ""
    elif config.parallel_residual:
        # GGUF's first norm is the FFN's, which the one of a shared norm is too.
        attention_norm, ffn_norm, stored = "ln_attn", "ln_mlp", ("attn_norm_2", "attn_norm")
    return Naming(
        embedding="transformer.word_embeddings",
        block="transformer.h",
        attention_norm=attention_norm,
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        ffn_norm=ffn_norm,
        ffn=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="transformer.ln_f",
        layer_norms=True,
        gguf_norms=stored,
    )
