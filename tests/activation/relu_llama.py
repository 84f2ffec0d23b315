"""The tiny llama with a ReLU, and neurons that follow a few directions so that there is something to predict."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from tiny_llama import FFN, HIDDEN, LAYERS, write_tiny_llama


def write_relu(folder, seed=0):
    """The tiny model with a ReLU instead of its SiLU."""
    write_tiny_llama(folder, seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    return folder


def write_predictable(folder, directions=8):
    """As `write_relu`, with gates of low rank."""
    write_relu(folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(5)
    for layer in range(LAYERS):
        gate = rng.standard_normal((FFN, directions)) @ rng.standard_normal((directions, HIDDEN)) / 8
        tensors[f"model.layers.{layer}.mlp.gate_proj.weight"] = gate.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_broken(folder, write=write_relu):
    """A tiny model, as `write` makes it, with a NaN among its weights."""
    write(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = np.nan
    save_file(tensors, folder / "model.safetensors")
    return folder
