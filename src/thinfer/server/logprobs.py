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
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


class TextLogprobs:
    """Builds the ``logprobs`` object of a completion: four lists, one entry a token.

    Args:
        tokenizer: the model's.
        offset: characters of the text that are before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> dict[str, Any]:
        """The object for further tokens; None stands for a token that nothing predicts."""
        tokens, offsets = [], []
        for token in ids:
            tokens.append(self._spell(token))
            offsets.append(self._offset)
            if token not in self._tokenizer.special_ids:
                self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # The token itself is always there, as with OpenAI: clients look for it.
        most: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token, entry.logprob)):
            # Two tokens may be spelled alike; the likelier one keeps the name.
            most.setdefault(self._spell(token), value)
        return most

    def _spell(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
