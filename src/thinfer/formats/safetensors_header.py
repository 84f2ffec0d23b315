"""The header of a safetensors file: a u64 length, then a JSON object of tensors, then the data."""

import math
from dataclasses import dataclass
from typing import TypeGuard

from thinfer.errors import CheckpointError
from thinfer.formats.json_file import parse_json
from thinfer.formats.mapped import MappedFile
from thinfer.formats.tensor import TensorInfo

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
# Far above any real model (100 bytes a tensor), far below what would hurt while it is parsed.
_HEADER_LIMIT = 32 << 20
_MAX_AXES = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of one safetensors file and its absolute offset in bytes."""

    info: TensorInfo
    offset: int


def parse_safetensors(file: MappedFile) -> tuple[dict[str, StoredTensor], int]:
    """Parse and check the header of a mapped safetensors file.

    Returns:
        The tensors by name, and the bytes of length and header together.

    Raises:
        CheckpointError: The header is longer than the file, is not what the format asks for, or the tensors overlap,
            leave holes, or end where the file does not.

    Example:
        >>> parse_safetensors(MappedFile(Path("model.safetensors")))[0]["lm_head.weight"].info.type  # doctest: +SKIP
        'BF16'
    """
    path = file.path
    length = int.from_bytes(file.map[:8], "little") if file.size >= 8 else -1
    if not 2 <= length <= min(file.size - 8, _HEADER_LIMIT):
        raise CheckpointError(
            f"{path}: not a safetensors file, or truncated: its header claims {length} bytes, the file has {file.size};"
            " fetch it again"
        )
    header = parse_json(file.map[8 : 8 + length], f"{path}: header")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _tensor(file, start, name, entry) for name, entry in header.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.info.nbytes)):
        if tensor.offset != end:
            raise CheckpointError(
                f"{path}: tensor {tensor.info.name} starts at byte {tensor.offset}, the one before ends at {end};"
                " the file is corrupt, fetch it again"
            )
        end += tensor.info.nbytes
    if end != file.size:
        raise CheckpointError(f"{path}: the tensors end at byte {end}, the file at {file.size}; fetch it again")
    return tensors, start


def _tensor(file: MappedFile, start: int, name: str, entry: object) -> StoredTensor:
    def fail(what: str) -> CheckpointError:
        return CheckpointError(f"{file.path}: tensor {name}: {what}; the file is corrupt, fetch it again")

    if not isinstance(entry, dict):
        raise fail("its entry is not an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(span) or len(span) != 2:
        raise fail("dtype, shape or data_offsets is missing or malformed")
    if len(shape) > _MAX_AXES:
        raise fail(f"{len(shape)} axes (at most {_MAX_AXES} are allowed)")
    begin, end = span
    if not begin <= end <= file.size - start:
        raise fail(f"{dtype} data at {begin} to {end}, but the file holds {file.size - start} bytes of data")
    item = _ITEM_BYTES.get(dtype)
    if item is not None and math.prod(shape) * item != end - begin:
        raise fail(f"{dtype} of shape {tuple(shape)} needs {math.prod(shape) * item} bytes, {end - begin} are stored")
    return StoredTensor(TensorInfo(name, tuple(shape), dtype, end - begin), start + begin)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
