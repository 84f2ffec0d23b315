"""Log-probabilities in the forms of the two endpoints."""

import codecs
from collections.abc import Sequence
from typing import Any

from thinfer.core.request import TokenLogprob
from thinfer.text.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The ``logprobs`` object of a chat's choice."""
    content = [
        {
            **_entry(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_entry(tokenizer, token, value) for token, value in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI and vLLM write this for tokens that cannot come.
    return max(logprob, -9999.0)


class TextLogprobs:
    """Builds the ``logprobs`` object of a completion: four lists, one entry a token.

    Args:
        tokenizer: the model's.
        prompt: the text of the first tokens, where the completion repeats it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str = "") -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The object for further tokens; None stands for a token that nothing predicts."""
        tokens, offsets = [], []
        for token in ids:
            tokens.append(self._spell(token))
            offsets.append(self._offset)
            self._offset += self._length(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _length(self, token: int) -> int:
        """Characters that a token adds to the text."""
        data = self._tokenizer.token_bytes(token)
        if token in self._tokenizer.special_ids:
            # Shown only where a prompt spells it: neither the begin token before it nor an end token is.
            return len(data.decode()) if self._prompt.startswith(data.decode(), self._offset) else 0
        if self._offset == 0 and self._prompt and data.startswith(b" ") and not self._prompt.startswith(" "):
            # SentencePiece puts a space before a text, which the text does not have.
            data = data[1:]
        return len(self._utf8.decode(data))

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # The token itself is always there, as with OpenAI: clients look for it.
        most: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token, entry.logprob)):
            # Two tokens may be spelled alike; the likelier one keeps the name.
            most.setdefault(self._spell(token), _finite(value))
        return most

    def _spell(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
