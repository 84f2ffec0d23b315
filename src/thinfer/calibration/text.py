"""Text to windows of tokens: seeded ones to calibrate on, with a hash that names them, and ones in a row to score."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinfer.data import calibration_text
from thinfer.errors import UsageError

BUILT_IN = "war-and-peace-excerpt"


@dataclass(frozen=True, slots=True)
class TokenWindows:
    """Windows of one length, cut without overlap from a packed text.

    Attributes:
        windows: token ids, each window with the model's begin token first if it has one.
        held_out: windows of the same text that share no token with `windows`.
        source: name of the text.
        sha256: hash of the text's bytes.
        length: tokens of one window.
        seed: what chose the windows.
    """

    windows: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]
    source: str
    sha256: str
    length: int
    seed: int

    @property
    def tokens(self) -> int:
        """Tokens of `windows` together."""
        return len(self.windows) * self.length


def read_documents(text: str | Path | None) -> tuple[list[str], str, str]:
    """Documents of a text.

    Args:
        text: a Path is read: a .jsonl file has one object with a "text" a line, any other file is one document. A str
            is the text itself, None the built-in text.

    Returns:
        The documents, the name of the source, and the SHA-256 of its bytes.

    Raises:
        UsageError: the file is missing or not UTF-8, a line is not an object with a "text", or there is no text at all.
    """
    if isinstance(text, Path):
        source, blob = text.name, _read(text)
    else:
        source = "given text" if text is not None else BUILT_IN
        blob = (text if text is not None else calibration_text()).encode()
    try:
        content = blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 at byte {error.start}; convert it first") from error
    lines = isinstance(text, Path) and text.suffix == ".jsonl"
    documents = _json_lines(source, content) if lines else [content]
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise UsageError(f"{source}: holds no text")
    return documents, source, hashlib.sha256(blob).hexdigest()


def token_windows(
    encode: Callable[[str], list[int]],
    text: str | Path | None = None,
    *,
    samples: int = 16,
    held_out: int = 8,
    length: int = 512,
    seed: int = 0,
    bos_id: int | None = None,
) -> TokenWindows:
    """Pack the documents' tokens one after another and choose windows by seed.

    Args:
        encode: text to token ids, without special tokens.
        text: as for `read_documents`.
        samples: windows to observe.
        held_out: further windows to measure on.
        length: tokens of each window, the begin token included.
        seed: chooses which windows.
        bos_id: begin token put first in every window; None: none.

    Raises:
        UsageError: the text is too short; the message says how many tokens it has and how many are needed.
    """
    documents, source, digest = read_documents(text)
    stream = [token for document in documents for token in encode(document)]
    prefix = () if bos_id is None else (bos_id,)
    body = length - len(prefix)
    if body < 2:
        raise UsageError(f"windows of {length} tokens are too short; use at least {2 + len(prefix)}")
    available, needed = len(stream) // body, samples + held_out
    if available < needed:
        raise UsageError(
            f"{source} has {len(stream)} tokens, {needed} windows of {length} need {needed * body}; "
            "give a longer text, or ask for fewer or shorter windows"
        )
    order = np.random.Generator(np.random.Philox(seed)).permutation(available)[:needed]
    chosen = tuple((*prefix, *stream[index * body : (index + 1) * body]) for index in map(int, order))
    return TokenWindows(chosen[:samples], chosen[samples:], source, digest, length, seed)


def read_text(path: str) -> str:
    r"""A text file as UTF-8 with ``\r\n`` read as ``\n``; UsageError when it cannot be read."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; convert it first") from error
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def cut_windows(ids: Sequence[int], ctx: int, windows: int | None, stride: int = 1) -> list[list[int]]:
    """Every ``stride``-th of the windows in a row of ``ctx`` tokens, at most ``windows`` of them (None: all).

    Raises UsageError when the text has fewer, or no whole one.
    """
    if ctx < 2 or stride < 1 or (windows is not None and windows < 1):
        raise UsageError(f"ctx {ctx} must be at least 2, stride {stride} and windows {windows} at least 1")
    starts = range(0, len(ids) - ctx + 1, ctx * stride)
    if not starts or (windows is not None and len(starts) < windows):
        raise UsageError(
            f"the text has {len(ids)} tokens: {len(starts)} windows of {ctx} at stride {stride}, "
            f"{windows or 1} wanted; take shorter or fewer windows or a smaller stride, or give a longer text"
        )
    return [list(ids[start : start + ctx]) for start in starts[:windows]]


def require_context(tokens: int, most: int, option: str = "--seqlen") -> None:
    """UsageError when windows have more tokens than the model was made for; the message names the option to change.

    Example:
        >>> require_context(512, most=2048)
    """
    if tokens > most:
        raise UsageError(f"windows of {tokens} tokens: the model was made for {most}; use {option} {most} or less")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; check the path") from error


def _json_lines(source: str, content: str) -> list[str]:
    documents = []
    # Not splitlines: JSON strings may hold other line separators of Unicode.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f'{source}: line {number} is not a JSON object with a "text"') from error
        if not isinstance(text, str):
            raise UsageError(f'{source}: line {number}: "text" is not a string')
        documents.append(text)
    return documents
