"""Makes tiny random transformers models and writes them as Hugging Face folders and GGUF files."""

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
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or "layernorm" in name:
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
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face parameter."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, rest = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"
    return f"{GGUF_NAMES[stem]}.{suffix}"


def quantise(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """What a value becomes by a round trip through a block type; vectors stay float."""
    return values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)


def write_gguf(path: Path, model: Any, kind: gguf.GGMLQuantizationType, extra: dict[str, Any] | None = None) -> None:
    """Write a model as llama.cpp's converter would: names, permuted q and k of llama, metadata.

    `extra` adds float keys below the architecture ("rope.scaling.factor"), string keys, or with a name ending in
    ".weight" float32 tensors.
    """
    config = model.config
    arch = "llama" if config.model_type == "mistral" else config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, arch)
    # transformers takes a llama file with "mistral" in its name for an architecture that its reader does not know.
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
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
            values = permute(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        values = np.ascontiguousarray(values)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
