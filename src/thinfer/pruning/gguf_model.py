"""A GGUF file as a transformers configuration and float32 weights.

transformers reads GGUF files too, but takes most of a minute for what takes seconds here, and leaves out the frequency
factors of llama 3; it remains the way for architectures that thinfer itself does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from thinfer.core.config import ModelConfig
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import Checkpoint
from thinfer.models.gguf_config import SPARSE_LLAMA, Keys
from thinfer.models.loader import Model, load_model
from thinfer.models.rope import make_rope

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig


def config_and_weights(checkpoint: Checkpoint) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """The configuration and the dequantised weights by their names in transformers.

    Raises:
        UnsupportedError: an architecture, a tensor type or a rope scaling that thinfer does not know.
        CheckpointError: tensors are missing.
    """
    model = load_model(checkpoint)
    config = _config(model)
    weights = {}
    for name in model.weights.names:
        source = model.weights.source(name)
        weights[name] = torch.from_numpy(source.float32())
        source.release()
    return config, weights


def config_only(checkpoint: Checkpoint) -> PretrainedConfig:
    """The configuration alone; raises as `config_and_weights` does."""
    return _config(load_model(checkpoint))


def _config(model: Model) -> PretrainedConfig:
    from transformers import AutoConfig

    config, keys = model.config, Keys(model.checkpoint)
    model_type = "llama" if config.model_type == SPARSE_LLAMA else config.model_type
    if model_type == "llama" and (config.attention_bias != config.output_bias):
        raise UnsupportedError(
            f"{model.checkpoint.path}: a llama with biases on q, k and v only has no equal to be saved as"
        )
    # GGUF files of Mistral say that they are llamas; the window tells them apart.
    model_type = "mistral" if model_type == "llama" and config.sliding_window else model_type
    fields = {
        name: getattr(config, name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "rms_norm_eps",
            "vocab_size",
            "max_position_embeddings",
            "tie_word_embeddings",
            "bos_token_id",
        )
    }
    if model_type == "llama":
        fields |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    if model_type == "mistral":
        fields["sliding_window"] = config.sliding_window
    theta = keys.number("rope.freq_base", 10000.0)
    return AutoConfig.for_model(
        model_type,
        **fields,
        eos_token_id=config.eos_token_ids[0] if config.eos_token_ids else None,
        pad_token_id=keys.token("padding_token_id"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(config, keys, theta),
    )


def _rope_scaling(config: ModelConfig, keys: Keys, theta: float) -> dict[str, Any] | None:
    """How transformers says the frequencies that the file gives: the first words that make the same numbers."""
    for scaling in _scalings(keys, config.max_position_embeddings):
        rope = make_rope(config.head_dim, theta, scaling, config.max_position_embeddings)
        same = np.allclose(rope.inv_freq, config.rope.inv_freq, rtol=1e-4, atol=0)
        if same and np.isclose(rope.attention_factor, config.rope.attention_factor):
            return scaling if scaling["rope_type"] != "default" else None
    raise UnsupportedError(
        "the rope frequencies of this GGUF file have no equal in transformers; use the original model"
    )


def _scalings(keys: Keys, positions: int) -> Iterator[dict[str, Any]]:
    yield {"rope_type": "default"}
    factor = keys.number("rope.scaling.factor", 1.0)
    yield {"rope_type": "linear", "factor": factor}
    original = int(keys.number("rope.scaling.original_context_length", positions))
    yield {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    # The file has the factors of llama 3 but not what they were made from: of 3.1, and of 3.2.
    for llama3 in (8.0, 32.0):
        yield {
            "rope_type": "llama3",
            "factor": llama3,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
