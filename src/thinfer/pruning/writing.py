"""Writing results and unfinished work: failures as our errors, and one run at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from thinfer.errors import ResourceError, UsageError

LOCK_FILE = "lock"


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Within, what is written belongs to `place`, which messages name.

    Raises:
        ResourceError: it cannot be written: the disk is full, or the place forbids it.

    Example:
        >>> with writing(Path("out")):  # doctest: +SKIP
        ...     save_file(tensors, "out/model.safetensors")
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ResourceError(
            f"{place}: cannot be written ({reason}); free some space or choose another -o, and run again"
        ) from error


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Within, no other process holds the folder of unfinished work, which is made; afterwards it goes if it is empty.

    Raises:
        UsageError: another run holds it, or it cannot be made.

    Example:
        >>> with exclusive(Path("out.partial")):  # doctest: +SKIP
        ...     ...
    """
    lock = folder / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made ({error.strerror}); delete it, or choose another -o") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{folder}: another run works there; wait for it, or choose another -o") from error
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()
