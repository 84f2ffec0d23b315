"""What a generation gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of one request: its wait, its prompt, and all decode steps after the first token.

    `cached_tokens` of the prompt came out of the KV cache and were not computed; the prompt's speed leaves them out.
    """

    prompt_tokens: int
    prompt_seconds: float
    decode_tokens: int
    decode_seconds: float
    cached_tokens: int = 0
    queue_seconds: float = 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prefill speed; 0 when nothing was measured."""
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Decode speed; 0 when nothing was measured."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields and both speeds, ready for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "prompt_seconds": self.prompt_seconds,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "decode_tokens": self.decode_tokens,
            "decode_seconds": self.decode_seconds,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "cached_tokens": self.cached_tokens,
            "queue_seconds": self.queue_seconds,
        }


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token, and (token id, log-probability) of the most likely ones, largest first.

    They are the model's own: no temperature, penalty, bias or constraint is in them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The finished text of one request; `token_ids` are the generated ones only.

    `token_ids` hold the end token that stopped the request, `text` does not; `seed` is the one that was used, drawn
    from the system where the parameters had none. `logprobs` (one a token of `token_ids`) and `prompt_logprobs` (one a
    token of the prompt, None for the first, which nothing predicts) are None unless the parameters asked.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    timings: Timings
    seed: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """New text of a stream and the tokens behind it; the last chunk alone has a `finish_reason`.

    `logprobs` has one entry a token where the parameters ask; `prompt_logprobs` comes with the first token. A request
    that failed ends with reason "error" and the exception; nothing is raised, because its neighbours go on.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    timings: Timings | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: Exception | None = None
