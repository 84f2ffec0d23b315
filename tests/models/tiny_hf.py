"""Makes tiny random transformers models and writes them as Hugging Face folders and GGUF files."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from models.tiny import BASE, TINY


def make_model(model_type: str, variant: str, **config_values: Any) -> Any:
    """A float32 model in which every parameter, norms and biases too, is random and matters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(BASE | TINY[model_type][variant] | config_values))
    # transformers' eager Falcon adds its linear biases twice.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or "layernorm" in name or ".ln_" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model


def tokens(count: int = 20) -> np.ndarray:
    """A fixed prompt of token ids."""
    return np.random.default_rng(1).integers(0, BASE["vocab_size"], count).astype(np.int32)


def hf_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """Logits [len(ids), vocab] of all positions."""
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleave the halves of each head, as llama.cpp's converter does for architecture llama."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "transformer.word_embeddings": "token_embd",
    "transformer.word_embeddings_layernorm": "token_embd_norm",
    "transformer.ln_f": "output_norm",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "ln_attn": "attn_norm_2",
    "ln_mlp": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
BLOCK = re.compile(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.+)")
GGUF_ARCHS = {"mistral": "llama", "gpt_neox": "gptneox"}
LAYER_NORM_ARCHS = ("bloom", "falcon", "gptneox", "nemotron")


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face parameter."""
    stem, _, suffix = name.rpartition(".")
    if found := BLOCK.fullmatch(stem):
        return f"blk.{found[1]}.{GGUF_NAMES[found[2]]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def quantise(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """What a value becomes by a round trip through a block type; vectors stay float."""
    return values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)


def key_heads(config: Any) -> int:
    """Key heads of any type's configuration."""
    if config.model_type == "falcon":
        grouped = config.new_decoder_architecture or not config.multi_query
        return config.num_kv_heads if grouped else 1
    fused = config.model_type in ("bloom", "gpt_neox")
    return config.num_attention_heads if fused else config.num_key_value_heads


def stack_heads(weight: np.ndarray, heads: int, kv_heads: int) -> np.ndarray:
    """Rows of q, then k, then v, from rows by key head, as llama.cpp's converters do."""
    grouped = weight.reshape(kv_heads, heads // kv_heads + 2, -1, *weight.shape[1:])
    parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    return np.concatenate([part.reshape(-1, *weight.shape[1:]) for part in parts])


def write_gguf(path: Path, model: Any, kind: gguf.GGMLQuantizationType, extra: dict[str, Any] | None = None) -> None:
    """Write a model as llama.cpp's converter would: names, order of q, k and v, metadata.

    `extra` adds float keys below the architecture ("rope.scaling.factor"), string keys, or with a name ending in
    ".weight" float32 tensors.
    """
    config = model.config
    arch = GGUF_ARCHS.get(config.model_type, config.model_type)
    heads, kv_heads = config.num_attention_heads, key_heads(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    ffn = getattr(config, "ffn_hidden_size", None) or getattr(config, "intermediate_size", 4 * config.hidden_size)
    if arch == "bloom":
        ffn = 4 * config.hidden_size
    writer = gguf.GGUFWriter(path, arch)
    # transformers takes a llama file with "mistral" in its name for an architecture that its reader does not know.
    writer.add_name("tiny")
    writer.add_context_length(getattr(config, "max_position_embeddings", 128))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if rope:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_freq_base(rope["rope_theta"])
    if arch in LAYER_NORM_ARCHS:
        names = ("layer_norm_epsilon", "layer_norm_eps", "norm_eps")
        writer.add_layer_norm_eps(next(getattr(config, name) for name in names if hasattr(config, name)))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for key, value in (extra or {}).items():
        if key.endswith(".weight"):
            writer.add_tensor(key, np.asarray(value, np.float32))
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        else:
            writer.add_float32(f"{arch}.{key}", value)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if arch == "llama" and ".q_proj." in name:
            values = permute(values, heads)
        if arch == "llama" and ".k_proj." in name:
            values = permute(values, kv_heads)
        if "query_key_value" in name:
            values = stack_heads(values, heads, kv_heads)
        if arch == "nemotron" and name.endswith("norm.weight"):
            values = values + 1
        values = np.ascontiguousarray(values)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
