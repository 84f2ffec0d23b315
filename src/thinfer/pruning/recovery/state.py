"""The state of an unfinished training in safetensors files, each of which appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from thinfer.errors import ArtifactError, UsageError
from thinfer.pruning.writing import writing

STATE_NAME = "training.safetensors"
_VERSION = 1


def save_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, key: str, facts: Any) -> None:
    """Write what continuing needs: trainable weights, buffers, optimizer, random numbers, and `facts` (JSON).

    Args:
        folder: made when absent; holds one file, `STATE_NAME`, replaced by rename.
        model: only its trainable parameters and persistent buffers are written.
        optimizer: of these parameters.
        key: names the run; `load_state` refuses another.
        facts: step and curve, as JSON.

    Raises:
        ResourceError: the disk is full.
    """
    tensors = {f"model.{name}": tensor for name, tensor in _changing(model).items()}
    plain: dict[str, Any] = {}
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                plain[f"{index}.{name}"] = value
    tensors["random.cpu"] = torch.get_rng_state()
    device = _device(model)
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    document = {"version": _VERSION, "key": key, "optimizer": plain, "facts": facts}
    _write(folder / STATE_NAME, tensors, document)


def load_state(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> Any:
    """Put a state back into model, optimizer and the generators of random numbers; returns its facts.

    Raises:
        ArtifactError: the file is damaged or of another version of thinfer.
        UsageError: it belongs to a run with other options, text or weights.
    """
    path = folder / STATE_NAME
    tensors, document = _read(path)
    if document.get("version") != _VERSION:
        raise ArtifactError(f"{path}: not a state that this thinfer reads; delete {folder} and start again")
    if document["key"] != key:
        raise UsageError(
            f"{folder}: belongs to a run with other options, text or weights; "
            "give those again to continue it, or delete that folder to start anew"
        )
    with torch.no_grad():
        for name, tensor in _changing(model).items():
            tensor.copy_(tensors[f"model.{name}"])
    state: dict[int, dict[str, Any]] = {}
    entries = {name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")}
    for name, value in (entries | document["optimizer"]).items():
        index, field = name.split(".", 1)
        state.setdefault(int(index), {})[field] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], _device(model))
    return document["facts"]


def kept(
    folder: Path, name: str, key: str, make: Callable[[], tuple[dict[str, Tensor], Any]]
) -> tuple[dict[str, Tensor], Any]:
    """What `make` gives, tensors and facts (JSON), or what this run left in the folder when it did so before.

    Args:
        folder: of the run's state.
        name: of the file, without its end.
        key: names the run; what another one left is made anew.
        make: is slow.

    Raises:
        ArtifactError: the file is damaged.
        ResourceError: the disk is full.

    Example:
        >>> kept(states, "refit", key, fit)[1]  # doctest: +SKIP
        [{'before': 0.3, 'after': 0.1}]
    """
    path = folder / f"{name}.safetensors"
    if path.exists():
        tensors, document = _read(path)
        if document.get("key") == key:
            return tensors, document["facts"]
    tensors, facts = make()
    _write(path, tensors, {"version": _VERSION, "key": key, "facts": facts})
    return tensors, facts


def _write(path: Path, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(copies, unfinished, metadata={"state": json.dumps(document)})
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Tensor], Any]:
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {}).get("state", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, document  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ArtifactError(f"{path}: {error}; delete {path.parent} and start again") from error


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """What training changes; each shared tensor once."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return buffers | {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
