"""Constrained decoding: answers that follow a JSON schema, by llguidance's token masks."""

import json
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

import llguidance
import llguidance.numpy as masks
import numpy as np
from numpy.typing import NDArray

from thinfer.core.sampling import TokenConstraint
from thinfer.errors import UnsupportedError
from thinfer.server.failures import ApiError
from thinfer.text.tokenizer import Tokenizer

# Whole numbers of spaces and newlines between tokens of JSON are valid, and small models can go on with them for ever.
_COMPILE: Any = {"whitespace_pattern": r"[ \n]{0,8}"}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Grammars:
    """Makes constraints for one vocabulary; the vocabulary is read at the first of them.

    Args:
        tokenizer: the model's.
        eos_ids: tokens that end a text.
        vocab_size: number of logits.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos = sorted(eos_ids)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: llguidance.LLTokenizer | None = None

    def json_schema(self, schema: Mapping[str, Any], param: str) -> Callable[[], TokenConstraint]:
        """What makes constraints for JSON of a schema; takes milliseconds to seconds, so not in the event loop.

        Args:
            schema: the JSON schema.
            param: the field of the request that holds it, for messages.

        Raises:
            ApiError: 400 for a schema that is not supported.
            UnsupportedError: the model has no end token, so a finished text could not end.
        """
        vocabulary = self._read()
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_COMPILE)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="invalid_schema") from error
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0][:500]
            raise ApiError(400, f"{param}: the schema is not supported: {reason}", param=param, code="invalid_schema")
        try:
            # Some schemas that nothing follows, such as a reference to itself, show only here.
            _Constraint(matcher.deep_copy(), self._eos, self._vocab_size).mask()
        except UnsupportedError as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="invalid_schema") from error
        return lambda: _Constraint(matcher.deep_copy(), self._eos, self._vocab_size)

    def _read(self) -> llguidance.LLTokenizer:
        if not self._eos:
            raise UnsupportedError("the model has no end token, so its answers cannot be constrained")
        with self._lock:
            if self._vocabulary is None:
                wrapped: Any = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos[0], self._vocab_size))
                self._vocabulary = llguidance.LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=self._eos)
            return self._vocabulary


class _Vocabulary:
    """The tokenizer as llguidance reads one."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab_size)

    def __call__(self, text: bytes | str) -> list[int]:
        given = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(given, add_special=False)


class _Constraint:
    """One text that must follow a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, eos: list[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos = eos
        self._vocab_size = vocab_size
        self._bits = masks.allocate_token_bitmask(1, vocab_size)

    def mask(self) -> NDArray[np.bool_]:
        self._check()
        if self._matcher.is_stopped():
            allowed = np.zeros(self._vocab_size, np.bool_)
            allowed[self._eos] = True
            return allowed
        masks.fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8)[0], bitorder="little")[: self._vocab_size].view(np.bool_)

    def accept(self, token: int) -> None:
        if token not in self._eos:
            self._matcher.consume_token(token)

    def _check(self) -> None:
        """A grammar that gave up allows end tokens, and its text would look as if it were complete."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0][:500]
            raise UnsupportedError(f"the schema cannot be followed from here: {reason}")
