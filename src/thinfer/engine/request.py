"""Request: one prompt on its way to a finished text."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from thinfer.core.request import FinishReason, Timings, TokenLogprob
from thinfer.core.sampling import SamplingParams
from thinfer.engine.kv_cache import Sequence
from thinfer.engine.logprobs import token_logprob
from thinfer.engine.prefix_cache import Prefix
from thinfer.engine.sampler import Sampler


class TextSink(Protocol):
    """Turns tokens into text that may be shown: whole characters, nothing that may become a stop string."""

    def push(self, token: int) -> tuple[str, bool]:
        """New text after this token, and whether a stop string was completed."""
        ...

    def finish(self) -> str:
        """The text still held back when the tokens end."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way to a finished text.

    Attributes:
        prompt: token ids of the prompt.
        params: sampling settings.
        sampler: chooses its tokens; knows the seed.
        sink: makes its text.
        limit: most tokens it may generate: max_tokens, or fewer where the context ends before.
        arrived: when it was queued, in the scheduler's seconds.
        sequence: its place in the KV cache; empty again while it waits after a preemption.
        prefix: its text with the keys by which the prefix cache knows blocks of it; None once it is computed.
        generated: token ids so far, an end token included.
        logprobs: log-probabilities of `generated` where `params.logprobs` asks.
        prompt_logprobs: those of the prompt so far where `params.prompt_logprobs` asks.
        text: text so far.
        finish_reason: None while it runs.
        error: why it failed, with reason "error".
        cached_tokens: tokens of the prompt that came out of the prefix cache.
        started: when its first step began; None while it waits for it.
    """

    prompt: list[int]
    params: SamplingParams
    sampler: Sampler
    sink: TextSink
    limit: int
    arrived: float = 0.0
    sequence: Sequence = field(default_factory=Sequence)
    prefix: Prefix | None = None
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    text: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    cached_tokens: int = 0
    started: float | None = None
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def computed(self) -> int:
        """Positions that must be in the KV cache before a token can be sampled, the last generated one left out."""
        return len(self.prompt) + max(len(self.generated) - 1, 0)

    @property
    def most(self) -> int:
        """Positions that it may come to take."""
        return len(self.prompt) + self.limit

    @property
    def decodes(self) -> bool:
        """Whether all it needs is in the cache but the last generated token, so that each step gives one more."""
        return bool(self.generated) and self.sequence.length == self.computed

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be read, for which every row of it must be run."""
        return self.params.prompt_logprobs is not None and not self.generated

    def next_tokens(self) -> list[int]:
        """Tokens of one mode to run next: the rest of the prompt, or the generated ones that a preemption took."""
        done = self.sequence.length
        if done < len(self.prompt):
            return self.prompt[done:]
        return self.generated[done - len(self.prompt) : -1]

    def score_prompt(self, start: int, rows: NDArray[np.float32]) -> None:
        """Read the log-probabilities of prompt tokens from logits [n, vocab] at positions from ``start``."""
        for position, logits in enumerate(rows, start + 1):
            # After a preemption rows come again: they are the same and were read.
            if position == len(self.prompt_logprobs) < len(self.prompt):
                entry = token_logprob(logits, self.prompt[position], self.params.prompt_logprobs or 0)
                self.prompt_logprobs.append(entry)

    @property
    def timings(self) -> Timings:
        """Seconds in the queue, from its first step to its first token, and from there to its last."""
        started = self.arrived if self.started is None else self.started
        prompt_end = self.first_token if self.generated else started
        return Timings(
            prompt_tokens=len(self.prompt),
            prompt_seconds=prompt_end - started,
            decode_tokens=max(len(self.generated) - 1, 0),
            decode_seconds=self.last_token - self.first_token if self.generated else 0.0,
            cached_tokens=self.cached_tokens,
            queue_seconds=started - self.arrived,
        )
