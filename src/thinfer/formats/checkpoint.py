"""A checkpoint: what every stored model offers, and how a user's reference becomes one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from thinfer.errors import ArtifactError, CheckpointError, UnsupportedError, UsageError
from thinfer.formats.json_file import read_json
from thinfer.formats.tensor import BLOCKS, TensorInfo

__all__ = ["BLOCKS", "Checkpoint", "TensorInfo", "open_checkpoint"]

ARTIFACT_FILE = "thinfer.json"


class Checkpoint(Protocol):
    """A stored model, mapped read-only.

    Attributes:
        path: The GGUF file or the folder.
        kind: ``"gguf"`` or ``"hf"``.
        metadata: The GGUF keys (numeric arrays as NumPy arrays, string arrays as sequences of ``str``), or config.json.
        generation_config: generation_config.json; empty where there is none.
        tensors: All tensors by name, in file order.
        artifact_dir: The thinfer model folder through which this base checkpoint was opened, else None.
    """

    path: Path
    kind: str
    metadata: Mapping[str, object]
    generation_config: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    artifact_dir: Path | None

    @property
    def size_bytes(self) -> int:
        """The bytes of the file, or of all weight files together."""
        ...

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of a tensor as a read-only view.

        Returns:
            uint8 [rows, row_bytes]; a row is the last axis, a tensor of one axis is one row.

        Raises:
            CheckpointError: There is no such tensor.
            UnsupportedError: Its type cannot be decoded.
        """
        ...

    def decode(self, name: str) -> npt.NDArray[np.float32]:
        """Return the values of a tensor as a new float32 array of its shape; raises as ``raw`` does."""
        ...

    def release(self, name: str) -> None:
        """Let the system drop the resident pages of a tensor; they are read again when touched."""
        ...

    def fingerprint(self) -> str:
        """Return a SHA-256 (hexadecimal) over headers, sizes and fixed samples of every tensor; cached.

        Raises:
            CheckpointError: A file was replaced since it was opened.
        """
        ...

    def close(self) -> None:
        """Unmap the files; views still in use stay valid."""
        ...


def open_checkpoint(ref: str | Path) -> Checkpoint:
    """Open a model by reference.

    Args:
        ref: A .gguf file; a folder with config.json and safetensors; a thinfer model folder, whose thinfer.json names
            its base model; or a hub id, ``owner/name`` or ``owner/name/file.gguf``, taken from the hub's cache or
            fetched into it unless HF_HUB_OFFLINE is set. An existing local path is never looked up on the hub.

    Returns:
        The checkpoint; of a thinfer model folder the base checkpoint with ``artifact_dir`` set.

    Raises:
        CheckpointError: Missing, truncated or corrupt files.
        UnsupportedError: A format that thinfer does not read.
        ArtifactError: A thinfer.json that cannot be read.
        UsageError: ``ref`` is empty, or neither text nor a path.

    Example:
        >>> open_checkpoint("model.gguf").kind  # doctest: +SKIP
        'gguf'
    """
    given: object = ref
    if not isinstance(given, str | Path) or not str(given).strip():
        raise UsageError(f"a model is a path or a hub id, not {given!r:.60}")
    try:
        return _find(ref)
    except OSError as error:
        raise CheckpointError(f"{ref}: {error.strerror or error}; check the path and its permissions") from error


def _find(ref: str | Path) -> Checkpoint:
    path = Path(ref).expanduser()
    if path.is_dir() and (path / ARTIFACT_FILE).is_file():
        return _open_base(path)
    return _open(str(ref), path, None)


def _open_base(folder: Path) -> Checkpoint:
    try:
        artifact = read_json(folder / ARTIFACT_FILE)
    except CheckpointError as error:
        raise ArtifactError(f"{error}; make the folder again with thinfer calibrate") from error
    base = artifact.get("base", ".")
    if not isinstance(base, str) or not base:
        raise ArtifactError(f"{folder / ARTIFACT_FILE}: base must name the base model; calibrate the model again")
    try:
        # A relative base is seen from the folder that says it, so that both can move together.
        path = folder / Path(base).expanduser()
        return _open(base, path, folder)
    except CheckpointError as error:
        raise CheckpointError(f"base model of {folder}: {error}") from error


def _open(ref: str, path: Path, artifact_dir: Path | None) -> Checkpoint:
    from thinfer.formats.compressed_tensors import CompressedCheckpoint, sparsity_format
    from thinfer.formats.gguf import GgufCheckpoint
    from thinfer.formats.hf import HfCheckpoint

    if not path.exists():
        from thinfer.formats.hub import fetch, is_hub_id

        if not is_hub_id(ref):
            raise CheckpointError(f"{path}: no such file or folder; check the path")
        path = fetch(ref)
    if path.is_file():
        if path.suffix in (".bin", ".pt", ".pth", ".safetensors"):
            raise UnsupportedError(
                f"{path}: name the model's folder (config.json and safetensors files inside) or a .gguf file"
            )
        return GgufCheckpoint(path, artifact_dir)
    if (path / "config.json").is_file():
        sparse = sparsity_format(read_json(path / "config.json")) is not None
        return (CompressedCheckpoint if sparse else HfCheckpoint)(path, artifact_dir)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GgufCheckpoint(files[0], artifact_dir)
    if files:
        raise CheckpointError(f"{path}: holds several GGUF files, name one: {', '.join(f.name for f in files)}")
    raise CheckpointError(f"{path}: holds neither config.json nor a .gguf file; check the path")
