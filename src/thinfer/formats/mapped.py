"""A read-only memory map of one file, with views, page release and sampled hashing."""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from thinfer.errors import CheckpointError

SAMPLES = 8
SAMPLE_BYTES = 512


class Hash(Protocol):
    """The part of a hashlib object that sampling needs."""

    def update(self, data: bytes, /) -> None:
        """Add bytes to the hash."""


class MappedFile:
    """One file, mapped read-only.

    Raises:
        CheckpointError: The file is missing, is not a regular file, cannot be read, or is empty.

    Example:
        >>> MappedFile(Path("model.gguf")).view(0, 4).tobytes()  # doctest: +SKIP
        b'GGUF'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():
                raise CheckpointError(f"{path}: no such file; check the path")
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_size == 0:
                    raise CheckpointError(f"{path}: the file is empty; fetch it again")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        self.size = stat.st_size
        self._identity = (stat.st_dev, stat.st_ino, stat.st_size)

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return ``nbytes`` bytes from ``offset`` as a read-only array without copying; the caller keeps in bounds."""
        return np.frombuffer(self.map, np.uint8, nbytes, offset)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return a copy of ``nbytes`` bytes from ``offset``."""
        return self.map[offset : offset + nbytes]

    def release(self, offset: int, nbytes: int) -> None:
        """Let the system drop the resident pages of a range; they are read again from the file when touched."""
        start = offset - offset % mmap.PAGESIZE
        if nbytes:
            self.map.madvise(mmap.MADV_DONTNEED, start, min(offset + nbytes, self.size) - start)

    def hash_samples(self, ranges: Iterable[tuple[int, int]], into: Hash) -> None:
        """Add the size of the file and samples of each (offset, nbytes) range to a hash.

        A range of at most ``SAMPLES * SAMPLE_BYTES`` bytes is taken whole, a longer one as evenly spaced pieces that
        include its first and its last bytes.

        Raises:
            CheckpointError: The file was replaced since it was opened.
        """
        into.update(self.size.to_bytes(8, "little"))
        # pread instead of the map: the kernel maps 64 KB around every page touched, and all that would count as
        # resident memory of this process.
        with self.path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            if (stat.st_dev, stat.st_ino, stat.st_size) != self._identity:
                raise CheckpointError(f"{self.path}: the file was replaced while it was open; open it again")
            for offset, nbytes in ranges:
                if nbytes <= SAMPLES * SAMPLE_BYTES:
                    into.update(os.pread(file.fileno(), nbytes, offset))
                    continue
                for i in range(SAMPLES):
                    at = offset + (nbytes - SAMPLE_BYTES) * i // (SAMPLES - 1)
                    into.update(os.pread(file.fileno(), SAMPLE_BYTES, at))

    def close(self) -> None:
        """Unmap the file, or leave that to the last view if any is still in use."""
        try:
            self.map.close()
        except BufferError:
            # Arrays of the caller still show this memory. The map is freed with the last of them.
            return
