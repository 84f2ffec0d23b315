"""How the next token is chosen and when a request ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from thinfer.core.whole import is_whole
from thinfer.errors import UsageError

if TYPE_CHECKING:
    # Options are checked before a model is loaded, and numpy takes a tenth of a second.
    import numpy as np
    from numpy.typing import NDArray

# More are of no use to a reader, and every one of them is sorted and sent for every token.
MAX_LOGPROBS = 100
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class TokenConstraint(Protocol):
    """Says which tokens may come next in one text, such as one that must follow a JSON schema.

    A text ends by an end token, so a constraint that is complete allows end tokens alone. What it raises ends its
    request and no other.
    """

    def mask(self) -> NDArray[np.bool_]:
        """Bool [vocab], or shorter where the rest is not allowed; at least one is True. Read before the next call."""
        ...

    def accept(self, token: int) -> None:
        """Go on to the state after this token, which the last mask allowed; end tokens come too."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and neutral defaults.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and zero presence and frequency
    penalties switch each off. `stop` strings end the text before themselves. `seed` None draws one from the system.
    `max_tokens` counts generated tokens; end-of-text is not sampled before `min_tokens`, and with `ignore_eos` never
    ends a request. `stop_token_ids` end it as end-of-text does, `ignore_eos` or not. `logit_bias` adds to the logits
    of token ids. `logprobs` asks for the log-probability of every generated token and of so many of the most likely
    ones, `prompt_logprobs` for those of the prompt; both are the model's own, before anything here changes them.
    `allowed` makes the constraint of one request, so that parameters may serve many. Raises UsageError for a value
    out of its range.

    Example: `SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=64)`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int = 256
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed: Callable[[], TokenConstraint] | None = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str) or not isinstance(stop, Iterable):
            raise UsageError(f"stop must be a tuple of strings, not {stop!r:.60}")
        stop = tuple(stop)
        object.__setattr__(self, "stop", stop)
        ids: Any = self.stop_token_ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise UsageError(f"stop_token_ids must be a tuple of token ids, not {ids!r:.60}")
        ids = tuple(ids)
        object.__setattr__(self, "stop_token_ids", ids)
        bias: Any = self.logit_bias
        if not isinstance(bias, Mapping):
            raise UsageError(f"logit_bias must map token ids to numbers, not {bias!r:.60}")
        bias = dict(bias)
        object.__setattr__(self, "logit_bias", bias)
        for name in _NUMBERS:
            if not isinstance(getattr(self, name), Real):
                raise UsageError(f"{name} must be a number, not {getattr(self, name)!r:.60}")
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", is_whole(self.top_k) and self.top_k >= 0, "0 (off) or a whole number above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "between 1e-6 and 1e6"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("stop", all(isinstance(text, str) and text for text in stop), "made of strings that are not empty"),
            (
                "seed",
                self.seed is None or (is_whole(self.seed) and 0 <= self.seed < 2**64),
                "a whole number between 0 and 2**64 - 1",
            ),
            ("max_tokens", is_whole(self.max_tokens) and self.max_tokens >= 1, "a whole number of 1 or more"),
            (
                "min_tokens",
                is_whole(self.min_tokens) and is_whole(self.max_tokens) and 0 <= self.min_tokens <= self.max_tokens,
                "between 0 and max_tokens",
            ),
            ("stop_token_ids", all(is_whole(token) and token >= 0 for token in ids), "made of token ids"),
            (
                "logit_bias",
                all(
                    is_whole(t) and t >= 0 and isinstance(v, Real) and -100 <= float(v) <= 100 for t, v in bias.items()
                ),
                "made of token ids with numbers between -100 and 100",
            ),
            ("logprobs", _top_count(self.logprobs), f"None or a whole number from 0 to {MAX_LOGPROBS}"),
            ("prompt_logprobs", _top_count(self.prompt_logprobs), f"None or a whole number from 0 to {MAX_LOGPROBS}"),
            ("allowed", self.allowed is None or callable(self.allowed), "a function that makes a constraint"),
        )
        for name, good, expected in checks:
            if not good:
                raise UsageError(f"{name} must be {expected}, not {getattr(self, name)!r:.200}")
        if self.allowed is not None and self.ignore_eos:
            raise UsageError("ignore_eos excludes allowed: a constrained text ends by its end token; drop one of them")


def _top_count(value: Any) -> bool:
    return value is None or (is_whole(value) and 0 <= value <= MAX_LOGPROBS)
