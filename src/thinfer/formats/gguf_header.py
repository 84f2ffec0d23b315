"""The header of a GGUF file, version 2 or 3, parsed with every length checked before it is used.

Layout (little-endian): magic ``GGUF``, u32 version, u64 tensor count, u64 key count; the keys (string name, u32 value
type, value); the tensor table (string name, u32 axes, u64 extents from the innermost, u32 type, u64 offset); padding;
the data. A string is a u64 length and its bytes, an array a u32 item type, a u64 count and the items.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import overload

import numpy as np

from thinfer.errors import CheckpointError, UnsupportedError

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_AXES = 4
_MAX_DEPTH = 2
# The smallest possible entries: they bound the counts by the size of the file before anything is allocated.
_MIN_KEY = 8 + 4 + 1
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8
_NAME_LIMIT = 65535


class StringArray(Sequence[str]):
    """An array of strings that stays in the file until it is asked for.

    Raises:
        CheckpointError: On access, when an item is not UTF-8.
    """

    def __init__(self, source: mmap, starts: list[int], key: str, path: str) -> None:
        self._source, self._starts, self._key, self._path = source, starts, key, path

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = self._starts[index]
        (length,) = _U64.unpack_from(self._source, start - 8)
        try:
            return self._source[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self._path}: string {index} of {self._key} is not UTF-8; the file is corrupt, fetch it again"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """Return all strings as a list of ``str``."""
        if not self._starts:
            return []
        starts = np.array(self._starts, np.int64)
        begin = self._starts[0] - _U64.size
        end = self._starts[-1] + _U64.unpack_from(self._source, self._starts[-1] - _U64.size)[0]
        # Put NUL where each length ends, drop the other seven bytes of it, and decode and split everything at once:
        # several times faster than one string at a time, and start-up waits for 300,000 of them.
        data = np.frombuffer(self._source, np.uint8, end - begin, begin).copy()
        keep = np.ones(len(data), np.bool_)
        for back in range(2, _U64.size + 1):
            keep[starts - begin - back] = False
        data[starts - begin - 1] = 0
        try:
            strings = data[keep][1:].tobytes().decode().split("\0")
        except UnicodeDecodeError:
            strings = []
        if len(strings) != len(self._starts):  # a string that is not UTF-8, which indexing will name, or that has NUL
            strings = [self[i] for i in range(len(self))]
        return strings


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table: shape in NumPy order, ggml type id, offset from the start of the data in bytes."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: version, metadata, tensor table, where the data starts, and the alignment, in bytes."""

    version: int
    metadata: Mapping[str, object]
    tensors: tuple[TensorEntry, ...]
    data_offset: int
    alignment: int


class _Cursor:
    """Reads forward through the map; reading past the end of the file is one clear error."""

    def __init__(self, source: mmap, size: int, path: str) -> None:
        self.source, self.size, self.path, self.at = source, size, path, 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what} at byte {self.at}; the file is corrupt or truncated, fetch it again"
        )

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.at:
            raise self.fail(f"{what} needs {nbytes} bytes, {max(self.size - self.at, 0)} are left,")

    def integer(self, form: struct.Struct, what: str) -> int:
        self.need(form.size, what)
        value: int = form.unpack_from(self.source, self.at)[0]
        self.at += form.size
        return value

    def u32(self, what: str) -> int:
        return self.integer(_U32, what)

    def u64(self, what: str) -> int:
        return self.integer(_U64, what)

    def take(self, nbytes: int, what: str) -> bytes:
        self.need(nbytes, what)
        self.at += nbytes
        return self.source[self.at - nbytes : self.at]

    def name(self, what: str) -> str:
        length = self.u64(what)
        if not 0 < length <= _NAME_LIMIT:
            raise self.fail(f"{what} is {length} bytes long (1 to {_NAME_LIMIT} are allowed)")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def strings(self, count: int, key: str) -> StringArray:
        if count > (self.size - self.at) // 8:
            raise self.fail(f"{key} claims {count} strings, more than the file can hold,")
        starts: list[int] = []
        append, unpack, source, at = starts.append, _U64.unpack_from, self.source, self.at
        last = self.size - 8
        # 300,000 strings are usual, so this loop calls nothing that it can do without.
        for _ in range(count):
            if at > last:
                self.at = at
                raise self.fail(f"string {len(starts)} of {key} lies past the end of the file")
            append(at + 8)
            at += 8 + unpack(source, at)[0]
        if at > self.size:
            raise self.fail(f"the last string of {key} lies past the end of the file")
        self.at = at
        return StringArray(source, starts, key, self.path)

    def value(self, type_id: int, key: str, depth: int = 0) -> object:
        if type_id == _STRING:
            # Free text: a bad byte in a licence must not stop a model from loading.
            return self.take(self.u64(key), key).decode(errors="replace")
        if type_id == _ARRAY:
            return self.array(key, depth)
        form = _SCALARS.get(type_id)
        if form is None:
            raise self.fail(f"{key} has unknown value type {type_id}")
        dtype = np.dtype(form)
        raw = np.frombuffer(self.take(dtype.itemsize, key), "<u1" if type_id == _BOOL else dtype)
        return bool(raw[0]) if type_id == _BOOL else raw[0].item()

    def array(self, key: str, depth: int) -> object:
        item = self.u32(key)
        count = self.u64(key)
        if item == _STRING:
            return self.strings(count, key)
        if item == _ARRAY:
            if depth >= _MAX_DEPTH or count > (self.size - self.at) // 12:
                raise self.fail(f"{key} claims {count} nested arrays, more than is allowed,")
            return [self.array(key, depth + 1) for _ in range(count)]
        form = _SCALARS.get(item)
        if form is None:
            raise self.fail(f"{key} is an array of unknown value type {item}")
        dtype = np.dtype(form)
        self.need(count * dtype.itemsize, f"{key} with {count} items")
        raw = np.frombuffer(self.take(count * dtype.itemsize, key), "<u1" if item == _BOOL else dtype)
        return raw != 0 if item == _BOOL else raw


def parse_header(source: mmap, size: int, path: str) -> Header:
    """Parse the header of a mapped GGUF file.

    Args:
        source: The map of the whole file.
        size: Its size in bytes.
        path: Its name, for messages.

    Returns:
        The header. Numbers and booleans are Python's, numeric arrays NumPy's, string arrays ``StringArray``.

    Raises:
        CheckpointError: The file is no GGUF file, truncated, or claims what cannot be.
        UnsupportedError: A version other than 2 or 3, or a big-endian file.

    Example:
        >>> parse_header(mapped.map, mapped.size, "model.gguf").metadata["general.architecture"]  # doctest: +SKIP
        'llama'
    """
    cursor = _Cursor(source, size, path)
    if cursor.take(4, "the magic") != b"GGUF":
        raise CheckpointError(
            f"{path}: not a GGUF file (it does not start with GGUF); check the path or fetch it again"
        )
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = f"big-endian GGUF version {swapped}" if swapped in (2, 3) else f"GGUF version {version}"
        raise UnsupportedError(f"{path}: {kind} is not supported; supported are little-endian versions 2 and 3")
    tensor_count = cursor.u64("the tensor count")
    key_count = cursor.u64("the key count")
    if key_count * _MIN_KEY + tensor_count * _MIN_TENSOR > size - cursor.at:
        raise cursor.fail(
            f"the header claims {tensor_count} tensors and {key_count} keys, more than the file can hold,"
        )
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.name("a key name")
        if key in metadata:
            raise cursor.fail(f"key {key} is given twice")
        metadata[key] = cursor.value(cursor.u32(key), key)
    alignment = _alignment(cursor, metadata)
    tensors = tuple(_entry(cursor) for _ in range(tensor_count))
    data_offset = cursor.at + -cursor.at % alignment
    return Header(version, metadata, tensors, data_offset, alignment)


def _alignment(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value & (value - 1) or value > 1 << 20:
        raise cursor.fail(f"general.alignment is {value!r}, not a power of two up to {1 << 20},")
    return value


def _entry(cursor: _Cursor) -> TensorEntry:
    name = cursor.name("a tensor name")
    axes = cursor.u32(f"tensor {name}")
    if not 1 <= axes <= _MAX_AXES:
        raise cursor.fail(f"tensor {name} claims {axes} axes (1 to {_MAX_AXES} are allowed)")
    extents = struct.unpack(f"<{axes}Q", cursor.take(8 * axes, f"tensor {name}"))
    return TensorEntry(name, extents[::-1], cursor.u32(f"tensor {name}"), cursor.u64(f"tensor {name}"))
