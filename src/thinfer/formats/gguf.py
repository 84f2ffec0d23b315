"""GGUF files, version 2 and 3, as checkpoints."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.formats.floats import FLOATS, widen
from thinfer.formats.gguf_header import Header, TensorEntry, parse_header
from thinfer.formats.mapped import MappedFile
from thinfer.formats.tensor import BLOCKS, TensorInfo, require_supported

# ggml's numbers of the types that thinfer decodes
TYPE_IDS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: "BF16",
}


class GgufCheckpoint:
    """A GGUF file, mapped read-only; see ``Checkpoint`` for the methods' contract.

    Raises:
        CheckpointError: The file is missing, truncated or corrupt.
        UnsupportedError: Another GGUF version, or one part of a split file.

    Example:
        >>> GgufCheckpoint(Path("model.gguf")).tensors["token_embd.weight"].type  # doctest: +SKIP
        'Q8_0'
    """

    kind = "gguf"

    def __init__(self, path: Path, artifact_dir: Path | None = None) -> None:
        self.path = path
        self.artifact_dir = artifact_dir
        self._file = MappedFile(path)
        header = parse_header(self._file.map, self._file.size, str(path))
        parts = header.metadata.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise UnsupportedError(
                f"{path}: one of {parts} parts of a split GGUF file; join them with llama-gguf-split --merge"
            )
        self.metadata: Mapping[str, object] = MappingProxyType(dict(header.metadata))
        self.generation_config: Mapping[str, object] = MappingProxyType({})
        self._tensors, self._offsets = _table(header, self._file.size, str(path))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._tensors)
        self._header_bytes = header.data_offset
        self._fingerprint: str | None = None

    @property
    def size_bytes(self) -> int:
        """The size of the file in bytes."""
        return self._file.size

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the stored bytes as a read-only view [rows, row_bytes]."""
        info = self._info(name)
        return self._file.view(self._offsets[name], info.nbytes).reshape(info.rows, info.row_bytes)

    def decode(self, name: str) -> npt.NDArray[np.float32]:
        """Return the values as a new float32 array of the tensor's shape."""
        info = self._info(name)
        raw = self.raw(name)
        if info.type in FLOATS:
            return widen(raw, info.type).reshape(info.shape)
        # Half a second of imports, needed for quantised tensors only.
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        with np.errstate(all="ignore"):  # scales that are not finite stay so
            values: npt.NDArray[np.float32] = dequantize(raw, GGMLQuantizationType[info.type])
        return values.reshape(info.shape)

    def release(self, name: str) -> None:
        """Let the system drop the resident pages of a tensor."""
        self._file.release(self._offsets[name], self._tensors[name].nbytes)

    def fingerprint(self) -> str:
        """Return the SHA-256 (hexadecimal) over the header and samples of every tensor."""
        if self._fingerprint is None:
            digest = hashlib.sha256(self._file.read(0, self._header_bytes))
            self._file.hash_samples(((self._offsets[n], t.nbytes) for n, t in self._tensors.items()), digest)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()

    def _info(self, name: str) -> TensorInfo:
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: no tensor {name}; the file is incomplete or of another architecture")
        require_supported(info, str(self.path), self._tensors)
        return info


def _table(header: Header, size: int, path: str) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Check every entry against the file and return the tensors and their absolute offsets."""
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    for entry in header.tensors:
        if entry.name in tensors:
            raise CheckpointError(f"{path}: tensor {entry.name} is listed twice; the file is corrupt, fetch it again")
        info = _tensor(entry, path)
        offset = header.data_offset + entry.offset
        if entry.offset % header.alignment:
            raise CheckpointError(
                f"{path}: tensor {info.name} ({info.type}) starts at offset {entry.offset},"
                f" not a multiple of the alignment {header.alignment}; the file is corrupt, fetch it again"
            )
        if offset + info.nbytes > size:
            raise CheckpointError(
                f"{path}: tensor {info.name} ({info.type}) ends at byte {offset + info.nbytes},"
                f" the file at {size}; it is truncated, fetch it again"
            )
        tensors[info.name] = info
        offsets[info.name] = offset
    end, before = 0, ""
    for name, offset in sorted(offsets.items(), key=lambda item: item[1]):
        if offset < end:
            raise CheckpointError(f"{path}: tensors {before} and {name} overlap; the file is corrupt, fetch it again")
        end, before = offset + tensors[name].nbytes, name
    return tensors, offsets


def _tensor(entry: TensorEntry, path: str) -> TensorInfo:
    type_name, block, block_bytes = _type(entry.type_id)
    columns = entry.shape[-1]
    if not all(entry.shape):
        raise CheckpointError(
            f"{path}: tensor {entry.name} ({type_name}) has an empty axis in its shape {entry.shape};"
            " the file is corrupt, fetch it again"
        )
    if columns % block:
        raise CheckpointError(
            f"{path}: tensor {entry.name} has rows of {columns} values, not a multiple of the {block} of a {type_name}"
            " block; the file is corrupt, or was quantised wrongly: fetch it again"
        )
    return TensorInfo(entry.name, entry.shape, type_name, math.prod(entry.shape) // block * block_bytes)


def _type(type_id: int) -> tuple[str, int, int]:
    """Return name, block length and block bytes of a ggml type; of an unknown one as little as is certain."""
    name = TYPE_IDS.get(type_id)
    if name is not None:
        return name, *BLOCKS[name]
    # Only for a message and the bounds: a file of supported types never pays for this import.
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(type_id)
    except ValueError:
        return f"number {type_id}", 1, 0
    return known.name, *GGML_QUANT_SIZES[known]
