"""Hugging Face folders (config.json and safetensors, in one file or in shards) as checkpoints."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.formats.floats import widen
from thinfer.formats.json_file import read_json
from thinfer.formats.mapped import MappedFile
from thinfer.formats.safetensors_header import StoredTensor, parse_safetensors
from thinfer.formats.tensor import TensorInfo, require_supported

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class HfCheckpoint:
    """A Hugging Face folder, its weight files mapped read-only; see ``Checkpoint`` for the methods' contract.

    Raises:
        CheckpointError: A file is missing, truncated or corrupt, or the shards do not fit their index.
        UnsupportedError: The folder has weights in another format only.

    Example:
        >>> HfCheckpoint(Path("folder")).metadata["model_type"]  # doctest: +SKIP
        'llama'
    """

    kind = "hf"

    def __init__(self, path: Path, artifact_dir: Path | None = None) -> None:
        self.path = path
        self.artifact_dir = artifact_dir
        self.metadata: Mapping[str, object] = MappingProxyType(read_json(path / "config.json"))
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, object] = MappingProxyType(
            read_json(generation) if generation.is_file() else {}
        )
        self._files: list[tuple[MappedFile, dict[str, StoredTensor], int]] = []
        self._stored: dict[str, tuple[MappedFile, StoredTensor]] = {}
        try:
            for file in _weight_files(path):
                self._add(MappedFile(file))
            _check_index(path, self._stored)
        except BaseException:
            self.close()
            raise
        self._tensors = {name: stored.info for name, (_, stored) in self._stored.items()}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._tensors)
        self._fingerprint: str | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of all weight files together."""
        return sum(file.size for file, _, _ in self._files)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the stored bytes as a read-only view [rows, row_bytes]."""
        file, stored = self._find(name)
        info = stored.info
        return file.view(stored.offset, info.nbytes).reshape(info.rows, info.row_bytes)

    def decode(self, name: str) -> npt.NDArray[np.float32]:
        """Return the values as a new float32 array of the tensor's shape."""
        info = self._find(name)[1].info
        return widen(self.raw(name), info.type).reshape(info.shape)

    def release(self, name: str) -> None:
        """Let the system drop the resident pages of a tensor."""
        file, stored = self._stored[name]
        file.release(stored.offset, stored.info.nbytes)

    def fingerprint(self) -> str:
        """Return the SHA-256 (hexadecimal) over config.json, the weight files' headers and samples of every tensor."""
        if self._fingerprint is None:
            digest = hashlib.sha256((self.path / "config.json").read_bytes())
            for file, tensors, header_bytes in self._files:
                digest.update(file.read(0, header_bytes))
                file.hash_samples(((t.offset, t.info.nbytes) for t in tensors.values()), digest)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def close(self) -> None:
        """Unmap the weight files."""
        for file, _, _ in self._files:
            file.close()

    def _add(self, file: MappedFile) -> None:
        tensors, header_bytes = parse_safetensors(file)
        self._files.append((file, tensors, header_bytes))
        for name, stored in tensors.items():
            if name in self._stored:
                raise CheckpointError(
                    f"{file.path}: tensor {name} is also in {self._stored[name][0].path.name}; fetch the model again"
                )
            self._stored[name] = (file, stored)

    def _find(self, name: str) -> tuple[MappedFile, StoredTensor]:
        found = self._stored.get(name)
        if found is None:
            raise CheckpointError(f"{self.path}: no tensor {name}; the model is incomplete or of another architecture")
        require_supported(found[1].info, str(found[0].path), self._tensors)
        return found


def _weight_files(folder: Path) -> list[Path]:
    """Return the weight files: the shards named by the index in its order, or the single file."""
    index = folder / INDEX_FILE
    if index.is_file():
        return [folder / name for name in dict.fromkeys(_weight_map(index).values())]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    if len(others) == 1:
        return [folder / others[0]]
    if others:
        raise CheckpointError(f"{folder}: {len(others)} safetensors files without {INDEX_FILE}; fetch the model again")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UnsupportedError(
            f"{folder}: only pickled weights, which thinfer never loads; convert them with transformers:"
            " save_pretrained writes safetensors"
        )
    raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; fetch the model again")


def _weight_map(index: Path) -> dict[str, str]:
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise CheckpointError(f"{index}: no weight_map; the file is corrupt, fetch it again")
    for name, file in entries.items():
        # A hostile index must not reach files outside its folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: tensor {name} lies in {file!r}, not a safetensors file of the folder")
    return entries


def _check_index(folder: Path, stored: Mapping[str, tuple[MappedFile, StoredTensor]]) -> None:
    index = folder / INDEX_FILE
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        if name not in stored or stored[name][0].path.name != file:
            raise CheckpointError(f"{index}: tensor {name} is not in {file}; fetch the model again")
