"""Sparse checkpoints of compressed-tensors up to 0.14, opened as the dense ones they stand for.

``sparse-bitmask`` stores a matrix ``X.weight`` of shape [rows, columns] as::

    X.weight.shape        int64 [2]
    X.weight.bitmask      uint8 [rows, ceil(columns / 8)], lowest bit first: which values are stored
    X.weight.compressed   those values, row by row
    X.weight.row_offsets  int64 [rows]: where each row's values begin

``sparse-24-bitmask`` stores ``X.shape``, ``X.bitmask`` and ``X.compressed`` [rows, columns / 2]: two values of every
four. Later versions of the library no longer read either.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.formats.floats import FLOATS, widen
from thinfer.formats.hf import HfCheckpoint
from thinfer.formats.mapped import MappedFile
from thinfer.formats.safetensors_header import StoredTensor
from thinfer.formats.tensor import BLOCKS, TensorInfo

FORMATS = ("sparse-bitmask", "sparse-24-bitmask")
_DENSE = "dense"
_CONFIGS = ("quantization_config", "compression_config")
_PARTS = ("shape", "bitmask", "compressed", "row_offsets")


def sparsity_format(metadata: Mapping[str, object]) -> str | None:
    """The sparsity format that a config.json names, ``dense`` included; None where it names none.

    A checkpoint that is also quantised is left alone: its config still says so to whoever reads it.

    Example:
        >>> sparsity_format({"quantization_config": {"sparsity_config": {"format": "sparse-bitmask"}}})
        'sparse-bitmask'
    """
    found = metadata.get("sparsity_config")
    for key in _CONFIGS:
        config = metadata.get(key)
        if isinstance(config, dict):
            if config.get("config_groups"):
                return None
            found = config.get("sparsity_config") or found
    form = found.get("format") if isinstance(found, dict) else None
    return form if isinstance(form, str) else None


class CompressedCheckpoint(HfCheckpoint):
    """A folder of a legacy sparse format; its matrices are filled with zeros when they are read.

    Everything else, and a folder that only names its sparsity, is as in `HfCheckpoint`. The metadata no longer has the
    configuration of the compression.

    Raises:
        UnsupportedError: Another sparsity format.
        CheckpointError: Parts of a matrix are missing, or do not fit each other.

    Example:
        >>> CompressedCheckpoint(Path("folder")).tensors["lm_head.weight"].shape  # doctest: +SKIP
        (49152, 576)
    """

    def __init__(self, path: Path, artifact_dir: Path | None = None) -> None:
        super().__init__(path, artifact_dir)
        try:
            name = sparsity_format(self.metadata)
            if name not in (*FORMATS, _DENSE):
                raise UnsupportedError(
                    f"{path}: sparsity format {name!r} is not supported; supported are {', '.join(FORMATS)} and dense"
                )
            names = (*_CONFIGS, "sparsity_config")
            self.metadata = MappingProxyType({k: v for k, v in self.metadata.items() if k not in names})
            self._matrices = {} if name == _DENSE else self._find_matrices(name == FORMATS[1])
        except BaseException:
            self.close()
            raise
        parts = {stored.info.name for matrix in self._matrices.values() for _, stored in matrix.parts.values()}
        self._tensors = {name: info for name, info in self._tensors.items() if name not in parts}
        self._tensors |= {name: matrix.info for name, matrix in self._matrices.items()}
        self.tensors = MappingProxyType(self._tensors)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes [rows, row_bytes] of the filled matrix, read-only, or the stored bytes of another tensor."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return super().raw(name)
        if matrix.info.type not in FLOATS:
            raise UnsupportedError(
                f"{self.path}: {name} has values of type {matrix.info.type}; supported are {', '.join(FLOATS)}"
            )
        data = matrix.fill(str(self.path))
        data.flags.writeable = False
        return data

    def decode(self, name: str) -> npt.NDArray[np.float32]:
        """Return the values as a new float32 array of the tensor's shape."""
        if name not in self._matrices:
            return super().decode(name)
        return widen(self.raw(name), self._matrices[name].info.type)

    def release(self, name: str) -> None:
        """Let the system drop the resident pages of a tensor."""
        matrix = self._matrices.get(name)
        if matrix is None:
            super().release(name)
            return
        for file, stored in matrix.parts.values():
            file.release(stored.offset, stored.info.nbytes)

    def _find_matrices(self, half: bool) -> dict[str, "_Matrix"]:
        """All compressed matrices by the name they have when they are dense."""
        found: dict[str, dict[str, tuple[MappedFile, StoredTensor]]] = {}
        for name, where in self._stored.items():
            stem, _, part = name.rpartition(".")
            if part in _PARTS and stem:
                found.setdefault(stem, {})[part] = where
        needed = _PARTS[:3] if half else _PARTS
        matrices = {}
        for stem, parts in found.items():
            if missing := [part for part in needed if part not in parts]:
                raise CheckpointError(
                    f"{self.path}: {stem}.{missing[0]} is missing; the model is incomplete, fetch it again"
                )
            name = f"{stem}.weight" if half and not stem.endswith(".weight") else stem
            if name in self._stored:
                raise CheckpointError(f"{self.path}: {name} is there both dense and compressed; fetch the model again")
            matrices[name] = _Matrix(name, parts, half, str(self.path))
        return matrices


class _Matrix:
    """One compressed matrix."""

    def __init__(self, name: str, parts: Mapping[str, tuple[MappedFile, StoredTensor]], half: bool, where: str) -> None:
        self.parts = parts
        shape = self._read("shape", "I64", "<i8", where).tolist()
        if len(shape) != 2 or not all(side > 0 for side in shape):
            raise self._broken(where, f"its shape {shape} is not that of a matrix")
        rows, columns = shape
        mask = self.parts["bitmask"][1].info
        if mask.type != "U8" or mask.shape != (rows, -(-columns // 8)):
            raise self._broken(where, f"its bitmask is {mask.type} of shape {mask.shape}")
        values = self.parts["compressed"][1].info
        if half and values.shape != (rows, columns // 2):
            raise self._broken(where, f"it stores values of shape {values.shape}, not {(rows, columns // 2)}")
        item = BLOCKS[values.type][1] if values.type in FLOATS else 1
        self.info = TensorInfo(name, (rows, columns), values.type, rows * columns * item)

    def fill(self, where: str) -> npt.NDArray[np.uint8]:
        """The dense bytes, uint8 [rows, row_bytes]; CheckpointError when the parts do not fit each other."""
        rows, columns = self.info.shape
        bits = self._bytes("bitmask").reshape(rows, -1)
        mask = np.unpackbits(bits, axis=1, count=columns, bitorder="little").view(np.bool_)
        if np.any(np.unpackbits(bits, axis=1, bitorder="little")[:, columns:]):
            raise self._broken(where, "its bitmask has bits behind the last column")
        counts = mask.sum(axis=1)
        stored = math.prod(self.parts["compressed"][1].info.shape)
        if counts.sum() != stored:
            raise self._broken(where, f"its bitmask has {counts.sum()} bits for {stored} values")
        if "row_offsets" in self.parts:
            offsets = self._read("row_offsets", "I64", "<i8", where)
            if not np.array_equal(offsets, np.cumsum(counts) - counts):
                raise self._broken(where, "its row offsets do not fit the bitmask")
        item = self.info.nbytes // (rows * columns)
        data = np.zeros((rows, columns, item), np.uint8)
        data[mask] = self._bytes("compressed").reshape(-1, item)
        return data.reshape(rows, -1)

    def _bytes(self, part: str) -> npt.NDArray[np.uint8]:
        file, stored = self.parts[part]
        return file.view(stored.offset, stored.info.nbytes)

    def _read(self, part: str, kind: str, dtype: str, where: str) -> npt.NDArray[np.int64]:
        info = self.parts[part][1].info
        if info.type != kind:
            raise self._broken(where, f"its {part} has type {info.type}, not {kind}")
        return self._bytes(part).view(dtype).astype(np.int64)

    def _broken(self, where: str, what: str) -> CheckpointError:
        name = self.parts["bitmask"][1].info.name.removesuffix(".bitmask")
        return CheckpointError(f"{where}: compressed matrix {name}: {what}; the file is corrupt, fetch it again")
