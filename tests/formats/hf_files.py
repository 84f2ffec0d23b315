"""A Hugging Face folder for the tests: one tensor of every kind, in one file or in shards."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7,
    "b.weight": torch.arange(6, dtype=torch.float16).reshape(2, 3) / 7,
    "c.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3) / 7,
    "norm": torch.ones(5, dtype=torch.bfloat16),
    "cube": torch.zeros(2, 3, 4),
    "scalar": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
    "ids": torch.arange(3),
}


def write_folder(folder: Path, *, shards: int = 1, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    if shards == 1:
        save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: t for j, (name, t) in enumerate(TENSORS.items()) if j % shards == i}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
