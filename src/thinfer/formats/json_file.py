"""JSON objects from files that may be broken or hostile."""

import json
from pathlib import Path

from thinfer.errors import CheckpointError

_LIMIT = 256 << 20


def parse_json(data: bytes | str, where: str) -> dict[str, object]:
    """Parse a JSON object.

    Args:
        data: The text.
        where: What it is, for messages.

    Raises:
        CheckpointError: Not JSON, not an object, a key given twice, or nested too deeply.

    Example:
        >>> parse_json('{"a": 1}', "config.json")
        {'a': 1}
    """
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error}); the file is corrupt, fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: not a JSON object; the file is corrupt, fetch it again")
    return value


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: The file cannot be read, is larger than 256 MiB, or holds no JSON object.
    """
    try:
        if path.stat().st_size > _LIMIT:
            raise CheckpointError(f"{path}: larger than {_LIMIT >> 20} MiB, so not what it should be; fetch it again")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json(data, str(path))


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} is given twice")
    return result
