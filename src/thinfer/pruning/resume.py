"""Finished blocks of a pruning run on disk: an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thinfer.errors import ArtifactError, UsageError
from thinfer.pruning.writing import writing


def run_key(model: nn.Module, windows: Tensor | None, recipe: Mapping[str, Any]) -> str:
    """SHA-256 over every weight of the model, the calibration tokens and the recipe (ready for JSON)."""
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(_bytes(parameter.detach()))
    if windows is not None:
        digest.update(str(tuple(windows.shape)).encode() + _bytes(windows))
    return digest.hexdigest()


class BlockStore:
    """A folder with one safetensors file for each finished block; each appears at once and complete.

    Args:
        folder: made where it is missing.
        key: of `run_key`; what other runs left is refused.

    Raises:
        UsageError: the folder cannot be made, or holds other things.
        ArtifactError: the folder holds blocks of another run, or a damaged file.
        ResourceError: the disk is full.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{folder}: {error.strerror}; choose another folder for unfinished work") from error
        for path in sorted(folder.glob("block-*.safetensors")):
            self._facts(path)

    def load(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Matrices as stored in the model, by name, and notes of a finished block; None where it is not finished."""
        path = self._path(index)
        if not path.exists():
            return None
        facts = self._facts(path)
        return load_file(path), json.loads(facts["notes"])

    def save(self, index: int, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> None:
        """Write a finished block."""
        path = self._path(index)
        temporary = path.with_suffix(".tmp")
        facts = {"key": self._key, "notes": json.dumps(notes)}
        try:
            with writing(path):
                copies = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
                save_file(copies, temporary, metadata=facts)
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _facts(self, path: Path) -> dict[str, str]:
        """What a file says of itself; refuses one of another run."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{path}: damaged ({error}); delete it and run again") from error
        if facts.get("key") != self._key:
            raise ArtifactError(
                f"{self._folder} holds unfinished work of another recipe, calibration text or model; "
                "delete the folder to start anew, or run with the same options to resume it"
            )
        return dict(facts)

    def _path(self, index: int) -> Path:
        return self._folder / f"block-{index:04d}.safetensors"


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
