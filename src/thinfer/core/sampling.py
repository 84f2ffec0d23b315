"""How the next token is chosen and when a request ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from thinfer.errors import UsageError

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one request, with vLLM's names and neutral defaults.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and zero presence and frequency
    penalties switch each off. `stop` strings end the text before themselves. `seed` None draws one from the system.
    `max_tokens` counts generated tokens; end-of-text is not sampled before `min_tokens`, and with `ignore_eos` never
    ends a request. Raises UsageError for a value out of its range.

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

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str) or not isinstance(stop, Iterable):
            raise UsageError(f"stop must be a tuple of strings, not {stop!r:.60}")
        stop = tuple(stop)
        object.__setattr__(self, "stop", stop)
        for name in _NUMBERS:
            if not isinstance(getattr(self, name), Real):
                raise UsageError(f"{name} must be a number, not {getattr(self, name)!r:.60}")
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", _whole(self.top_k) and self.top_k >= 0, "0 (off) or a whole number above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 1e-6 <= self.repetition_penalty <= 1e6, "between 1e-6 and 1e6"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("stop", all(isinstance(text, str) and text for text in stop), "made of strings that are not empty"),
            (
                "seed",
                self.seed is None or (_whole(self.seed) and 0 <= self.seed < 2**64),
                "a whole number between 0 and 2**64 - 1",
            ),
            ("max_tokens", _whole(self.max_tokens) and self.max_tokens >= 1, "a whole number of 1 or more"),
            (
                "min_tokens",
                _whole(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
                "between 0 and max_tokens",
            ),
        )
        for name, good, expected in checks:
            if not good:
                raise UsageError(f"{name} must be {expected}, not {getattr(self, name)!r}")


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
