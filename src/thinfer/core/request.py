"""What a generation gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock seconds of one request: its prompt, and all decode steps after the first token."""

    prompt_tokens: int
    prompt_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prefill speed; 0 when nothing was measured."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

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
        }


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The finished text of one request; `token_ids` are the generated ones only.

    `token_ids` hold the end token that stopped the request, `text` does not; `seed` is the one that was used, drawn
    from the system where the parameters had none.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    timings: Timings
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """New text of a stream and the tokens behind it; the last chunk alone has a `finish_reason`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    timings: Timings | None = None
