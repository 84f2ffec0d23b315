"""Scheduler: runs many requests together, one bounded step at a time."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from thinfer.core.request import FinishReason, StreamChunk, Timings
from thinfer.core.sampling import SamplingParams
from thinfer.engine.kv_cache import Sequence
from thinfer.engine.runtime import Engine, Work
from thinfer.engine.sampler import Sampler
from thinfer.errors import ResourceError, UsageError


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
        sequence: its place in the KV cache.
        generated: token ids so far, an end token included.
        text: text so far.
        finish_reason: None while it runs.
    """

    prompt: list[int]
    params: SamplingParams
    sampler: Sampler
    sink: TextSink
    limit: int
    sequence: Sequence = field(default_factory=Sequence)
    generated: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    @property
    def timings(self) -> Timings:
        """Seconds from its first step to its first token, and from there to its last."""
        prompt_end = self.first_token if self.generated else self.started
        return Timings(
            prompt_tokens=len(self.prompt),
            prompt_seconds=prompt_end - self.started,
            decode_tokens=max(len(self.generated) - 1, 0),
            decode_seconds=self.last_token - self.first_token if self.generated else 0.0,
        )


class Scheduler:
    """Continuous batching: in every step each running request gets one token, and prompts get the remaining rows.

    A step has at most ``chunk`` rows, so that cancelling and other requests never wait long. A request starts once
    the KV pool holds its prompt and all it may generate; until then it waits, first come first served. What a
    request gets does not depend on the others.
    """

    def __init__(
        self,
        engine: Engine,
        make_sink: Callable[[SamplingParams, bool], TextSink],
        eos_ids: Iterable[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._make_sink = make_sink
        self._eos = frozenset(eos_ids)
        self._clock = clock
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, prompt: Items[int], params: SamplingParams, *, continues: bool = False) -> Request:
        """Queue a prompt; one that can never fit the context or the KV pool raises ResourceError.

        Args:
            prompt: token ids.
            params: its sampling settings.
            continues: whether the text made goes on after a text, rather than standing by itself; for the sink.
        """
        engine = self._engine
        if not prompt:
            raise UsageError("the prompt is empty and the model has no begin token; give at least one token")
        longest = engine.max_model_len
        if len(prompt) >= longest:
            raise ResourceError(
                f"the prompt has {len(prompt)} tokens and the context {longest}, which must also hold the answer; "
                f"shorten the prompt or raise max_model_len (the model allows {engine.config.max_position_embeddings})"
            )
        limit = min(params.max_tokens, longest - len(prompt))
        size = engine.pool.layout.block_size
        needed, total = engine.pool.blocks_for(len(prompt) + limit), engine.pool.layout.num_blocks
        if needed > total:
            raise ResourceError(
                f"the request needs {needed} KV blocks of {size} tokens and the pool has {total}; "
                f"raise kv_tokens to at least {needed * size} or lower max_tokens"
            )
        sampler = Sampler(params, prompt, self._eos)
        request = Request(list(prompt), params, sampler, self._make_sink(params, continues), limit)
        self._waiting.append(request)
        return request

    def step(self) -> list[tuple[Request, StreamChunk]]:
        """Run one step; returns the new text of every request that got a token, which may be empty."""
        self._admit()
        works, owners = self._plan()
        if not works:
            return []
        rows = self._engine.step(works)
        chunks = []
        for request, logits in zip(owners, rows, strict=True):
            if len(logits):
                chunks.append((request, self._accept(request, request.sampler.sample(logits[-1]))))
        return chunks

    def cancel(self, request: Request) -> StreamChunk:
        """End a request now and free its blocks; a finished one keeps its reason."""
        text = ""
        if request.finish_reason is None:
            try:
                text = request.sink.finish()
            finally:
                self._end(request, "cancelled")
            request.text += text
        return StreamChunk(text, (), request.finish_reason, request.timings)

    def _admit(self) -> None:
        pool = self._engine.pool
        while self._waiting and len(self._running) < self._engine.options.max_sequences:
            request = self._waiting[0]
            length = len(request.prompt) + request.limit
            if pool.blocks_for(length) > pool.num_free and self._running:
                return
            # With nothing running here the blocks are held elsewhere, and no step would free them: this raises.
            pool.reserve(request.sequence, length)
            request.started = self._clock()
            self._running.append(self._waiting.popleft())

    def _plan(self) -> tuple[list[Work], list[Request]]:
        selector = self._engine.selector
        works, owners = [], []
        budget = self._engine.options.chunk
        for request in self._running:
            if request.generated and budget:
                works.append(Work(request.sequence, request.generated[-1:], "last", sparse=True))
                owners.append(request)
                budget -= 1
        for request in self._running:
            if not request.generated and budget:
                start = request.sequence.length
                part = request.prompt[start : start + budget]
                done = start + len(part) == len(request.prompt)
                sparse = selector is not None and selector.prefill
                works.append(Work(request.sequence, part, "last" if done else "none", sparse))
                owners.append(request)
                budget -= len(part)
        return works, owners

    def _accept(self, request: Request, token: int) -> StreamChunk:
        request.last_token = self._clock()
        if not request.generated:
            request.first_token = request.last_token
        request.generated.append(token)
        reason: FinishReason | None = None
        text = ""
        if token in self._eos and not request.params.ignore_eos:
            reason, text = "stop", request.sink.finish()
        else:
            text, stopped = request.sink.push(token)
            if stopped:
                reason = "stop"
            elif len(request.generated) >= request.limit:
                reason = "length"
                text += request.sink.finish()
        request.text += text
        if reason is not None:
            self._end(request, reason)
        return StreamChunk(text, (token,), reason, request.timings if reason is not None else None)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._engine.free(request.sequence)
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
