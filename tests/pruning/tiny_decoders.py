"""Tiny random causal models of many architectures."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 64
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    **SIZES,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"tie_word_embeddings": True},
    "mistral": LLAMA | {"sliding_window": 8},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "gemma": LLAMA | {"head_dim": 8},
    "gemma3_text": LLAMA | {"head_dim": 8, "sliding_window": 4, "num_hidden_layers": 4,
                            "layer_types": ["sliding_attention", "full_attention"] * 2},
    "opt": SIZES | {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                    "max_position_embeddings": 128, "word_embed_proj_dim": 16},
    "bloom": SIZES | {"hidden_size": 32, "n_layer": 3, "n_head": 4},
    "falcon": SIZES | {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "alibi": False},
    "gpt_neox": SIZES | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gpt2": SIZES | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128},
    "phi": LLAMA | {"num_key_value_heads": 4},
    "mixtral": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "num_hidden_layers": 2,
                        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "mamba": SIZES | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}  # fmt: skip


def tiny_model(architecture: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random float32 model; its weights are larger than usual, so that every part of it matters."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **ARCHITECTURES[architecture] | changes)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model.float()


def tiny_windows(count: int = 5, tokens: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids [count, tokens]; none is a special token."""
    return torch.randint(3, VOCABULARY, (count, tokens), generator=torch.Generator().manual_seed(seed))
