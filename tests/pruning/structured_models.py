"""Tiny random models for structured pruning, in which biases and norms matter too."""

from typing import Any

import torch

from pruning.tiny_decoders import tiny_model

GQA = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}


def full_model(architecture: str, **changes: Any) -> Any:
    """A tiny model in evaluation mode whose vectors are random as well."""
    model: Any = tiny_model(architecture, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [windows, tokens, vocabulary]."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits
