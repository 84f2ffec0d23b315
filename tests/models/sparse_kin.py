"""Llamas as sparse models have them, which transformers cannot express: its modules are changed instead."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from models.tiny_hf import make_model

Change = Callable[[Any], None]


def _fatrelu(threshold: float) -> Change:
    def change(layer: Any) -> None:
        layer.mlp.act_fn = torch.nn.Threshold(threshold, 0.0)

    return change


def _drelu(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.ReLU()
    layer.mlp.up_proj.register_forward_hook(lambda module, args, output: torch.relu(output))


def _relu_norms(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.ReLU()
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        norm.register_forward_hook(lambda module, args, output: torch.relu(output))


def _relufied(base: str) -> tuple[str, dict[str, Any], Change]:
    return base, {"model_type": f"relufied_{base}", "norm_act": "relu", "hidden_act": "relu"}, _relu_norms


# Name -> transformers' type and variant, fields of config.json, change of each layer.
KIN: dict[str, tuple[str, dict[str, Any], Change]] = {
    "fatrelu": ("llama", {"hidden_act": "fatrelu", "hidden_act_param": 0.05}, _fatrelu(0.05)),
    "fatrelu_zero": ("llama", {"hidden_act": "fatrelu", "hidden_act_param": 0}, _fatrelu(0.0)),
    "drelu": ("llama", {"hidden_act": "drelu"}, _drelu),
    "bamboo": ("mistral", {"model_type": "bamboo", "hidden_act": "relu"}, _drelu),
    "relufied_llama": _relufied("llama"),
    "relufied_mistral": _relufied("mistral"),
    "relufied_qwen2": _relufied("qwen2"),
    "relufied_qwen3": _relufied("qwen3"),
}
_VARIANTS = {"llama": "gqa", "mistral": "window", "qwen2": "tied", "qwen3": "head_dim"}


def make_kin(name: str, folder: Path, **config_values: Any) -> Any:
    """Write a tiny random model to the folder and return the module that computes it."""
    base, fields, change = KIN[name]
    model = make_model(base, _VARIANTS[base], **config_values)
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    for layer in model.model.layers:
        change(layer)
    return model
