"""Tiny configurations of every supported model_type; the contract test runs each of them.

To support a new model_type add an entry: variant name -> keyword arguments of its transformers configuration.
"""

from typing import Any

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}

TINY: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "gqa": {},
        "mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "head_dim": {"head_dim": 32},
        "gelu": {"hidden_act": "gelu"},
        "gelu_tanh": {"hidden_act": "gelu_pytorch_tanh"},
        "relu": {"hidden_act": "relu"},
        "relu2": {"hidden_act": "relu2"},
        "gelu_new": {"hidden_act": "gelu_new"},
        "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        # More layers than ten, in which a sorted list of names is not in order.
        "deep": {"num_hidden_layers": 12},
        "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
        "llama3": {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
            },
        },
        "yarn": {"rope_parameters": YARN},
        "yarn_attention_factor": {"rope_parameters": {**YARN, "attention_factor": 0.8}},
        "yarn_mscale": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16}},
    },
    "opt": {
        "tied": {"ffn_dim": 96},
        "untied": {"ffn_dim": 96, "tie_word_embeddings": False},
        "gelu_no_biases": {"ffn_dim": 96, "activation_function": "gelu", "enable_bias": False},
    },
    "bloom": {
        "tied": {"n_head": 4},
        # More heads than a power of two, which take every other slope of the next.
        "heads": {"n_head": 6, "hidden_size": 96},
        "deep": {"n_head": 4, "n_layer": 12},
    },
    "falcon": {
        "multi_query": {},
        "old_mha": {"multi_query": False},
        "sequential": {"multi_query": False, "parallel_attn": False, "bias": True},
        "alibi": {"multi_query": False, "parallel_attn": False, "alibi": True},
        "grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "grouped_one_norm": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        "relu": {"new_decoder_architecture": True, "num_kv_heads": 2, "activation": "relu"},
        "untied": {"tie_word_embeddings": False, "ffn_hidden_size": 128},
    },
    "gpt_neox": {
        "quarter": {},
        "sequential": {"use_parallel_residual": False},
        "whole": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
        "no_biases": {"attention_bias": False, "hidden_act": "gelu_fast"},
        "tied": {"tie_word_embeddings": True},
    },
    "nemotron": {
        "half": {},
        "head_dim": {"head_dim": 32},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "relu": {"hidden_act": "relu"},
        "tied": {"tie_word_embeddings": True},
    },
    "mistral": {
        "full": {"sliding_window": None},
        "window": {"sliding_window": 5},
        "head_dim": {"head_dim": 32, "sliding_window": None},
    },
    "qwen2": {
        "tied": {"tie_word_embeddings": True},
        "untied": {},
        "upper_window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    },
    "qwen3": {
        "head_dim": {"head_dim": 32},
        "tied": {"head_dim": 16, "tie_word_embeddings": True},
        "biases": {"head_dim": 16, "attention_bias": True},
        "layer_types": {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    },
}

# Variants that a GGUF file and transformers' reader of it can both express.
GGUF_VARIANTS = [
    ("llama", "gqa"),
    ("llama", "mha_tied"),
    ("llama", "head_dim"),
    ("llama", "theta"),
    ("llama", "deep"),
    ("mistral", "full"),
    ("mistral", "head_dim"),
    ("qwen2", "tied"),
    ("qwen2", "untied"),
    ("qwen3", "head_dim"),
    ("qwen3", "tied"),
    ("bloom", "tied"),
    ("bloom", "heads"),
    ("falcon", "multi_query"),
    ("falcon", "grouped"),
    ("falcon", "grouped_one_norm"),
    ("gpt_neox", "quarter"),
    ("gpt_neox", "sequential"),
    ("nemotron", "half"),
    ("nemotron", "biases"),
]

# GGUF files of models that transformers' reader does not know or does not read right.
NO_READER = [
    ("falcon", "grouped"),
    ("falcon", "grouped_one_norm"),
    ("gpt_neox", "quarter"),
    ("gpt_neox", "sequential"),
    ("nemotron", "biases"),
]


def variants() -> list[tuple[str, str]]:
    """All (model_type, variant) pairs."""
    return [(model_type, variant) for model_type, named in TINY.items() for variant in named]
