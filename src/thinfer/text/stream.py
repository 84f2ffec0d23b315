"""Streaming: whole characters out of single tokens, and stop strings that span tokens."""

import codecs
from collections.abc import Sequence

from thinfer.errors import UsageError
from thinfer.text.tokenizer import Tokenizer


class StreamDecoder:
    """Turns ids into text one by one; the pieces joined are what ``Tokenizer.decode`` gives for all ids.

    Args:
        tokenizer: The tokenizer.
        skip_special: Leave control tokens out.
        continuation: The ids continue a text, so a leading space is kept.

    Example:
        >>> decoder = StreamDecoder(tokenizer)  # doctest: +SKIP
        >>> [decoder.push(i) for i in ids] + [decoder.finish()]  # doctest: +SKIP
        ['Hello', ' ', '', '🙂', '']
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, continuation: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._strip = tokenizer.strips_space and not continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that is certain after this token; empty while a character is incomplete."""
        if token_id in self._skip:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return what is left: U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Ends a stream of text before the first stop string, wherever the pieces are cut.

    The first stop string to be complete counts, of two complete at once the longer one.

    Attributes:
        stopped: The stop string that was met, or None.

    Raises:
        UsageError: An empty stop string.

    Example:
        >>> matcher = StopMatcher(["END"])
        >>> matcher.push("one E"), matcher.push("ND two"), matcher.stopped
        ('one ', '', 'END')
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise UsageError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Return the text that surely lies before any stop string; nothing after one was met."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that was held back; call it when the stream ends without a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string begins."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
