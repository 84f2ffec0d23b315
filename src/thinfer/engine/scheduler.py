"""Scheduler: runs many requests together, one bounded step at a time."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from thinfer.core.request import FinishReason, StreamChunk
from thinfer.core.sampling import SamplingParams
from thinfer.engine.kv_cache import Sequence
from thinfer.engine.logprobs import token_logprob
from thinfer.engine.prefix_cache import Prefix
from thinfer.engine.request import Request, TextSink
from thinfer.engine.runtime import Engine, LogitsWanted, Work
from thinfer.engine.sampler import Sampler, Scratch
from thinfer.errors import ResourceError, UsageError

# A prompt beside decoding requests makes each of their tokens wait for its rows.
PROMPT_ROWS_BESIDE_DECODE = 64

Chunks = list[tuple[Request, StreamChunk]]


class Scheduler:
    """Continuous batching: in every step each running request gets one token, and prompts share the remaining rows.

    Requests start first come first served, as soon as the KV pool holds their prompts; blocks for their answers come
    as tokens do. When blocks run out the youngest request gives its own back and waits; later its tokens are run
    again in the modes that they were run in, so that it goes on as if nothing had happened. Prompts begin with the
    blocks that the prefix cache knows, and where several running ones begin alike only one computes. A step has at
    most ``chunk`` rows, and at most 64 of prompts while others decode, so that neither cancelling nor the next token
    waits long. What a request gets depends neither on the others nor on any of this.

    One thread calls a scheduler. What fails for one request alone (its sampler, its constraint, its text) ends that
    request with reason "error"; what fails for all is raised by `step`.

    Attributes:
        preemptions: how often a request had to give its blocks back.

    Example:
        >>> scheduler = Scheduler(engine, make_sink, eos_ids=[2])  # doctest: +SKIP
        >>> request = scheduler.add([1, 5, 9], SamplingParams())  # doctest: +SKIP
        >>> while scheduler.busy:  # doctest: +SKIP
        ...     for request, chunk in scheduler.step():
        ...         print(chunk.text)
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
        self._scratch = Scratch()
        # Both are in order of arrival, and all that runs arrived before all that waits.
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for blocks after a preemption."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._running)

    def add(self, prompt: Items[int], params: SamplingParams, *, continues: bool = False) -> Request:
        """Queue a prompt.

        Args:
            prompt: its token ids.
            params: sampling settings.
            continues: whether the answer goes on with the prompt's text, so that a leading space belongs to it.

        Raises:
            ResourceError: it can never fit the context or the KV pool.
            UsageError: no tokens, or ids outside the vocabulary in the prompt or the parameters.
        """
        engine = self._engine
        if not prompt:
            raise UsageError("the prompt is empty and the model has no begin token; give at least one token")
        self._check_ids("prompt", prompt)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)
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
        sampler = Sampler(params, prompt, self._eos, self._scratch)
        request = Request(list(prompt), params, sampler, self._make_sink(params, continues), limit, self._clock())
        self._waiting.append(request)
        return request

    def step(self) -> Chunks:
        """Run one step; returns the new text of every request that got a token, which may be empty."""
        chunks = self._admit()
        works: list[Work] = []
        owners: dict[int, Request] = {}
        for request, count in self._secure(self._share(), chunks):
            works.append(self._work(request, count))
            owners[id(request.sequence)] = request
        if not works:
            return chunks

        def read(sequence: Sequence, start: int, rows: NDArray[np.float32]) -> None:
            request = owners[id(sequence)]
            if request.scores_prompt:
                request.score_prompt(start, rows)
            if sequence.length == request.computed + bool(request.generated):
                # Here, while the logits are there: copies of a large vocabulary would take longer than the rest.
                del owners[id(sequence)]
                self._remember(request)
                chunks.append((request, self._accept(request, rows[-1])))

        self._engine.step(works, on_logits=read)
        for request in owners.values():
            self._remember(request)
        return chunks

    def cancel(self, request: Request) -> StreamChunk:
        """End a request now and free its blocks; a finished one keeps its reason."""
        text = ""
        if request.finish_reason is None:
            try:
                text = request.sink.finish()
            except Exception as error:
                return self._fail(request, error)
            self._end(request, "cancelled")
            request.text += text
        return StreamChunk(text, (), request.finish_reason, request.timings, error=request.error)

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        vocab = self._engine.config.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise UsageError(f"{name}: token {wrong} is outside the vocabulary of {vocab}")

    # ---- which requests run

    def _admit(self) -> Chunks:
        """Start requests in order of arrival while there is room; those that can never start end with an error."""
        pool = self._engine.pool
        ended: Chunks = []
        while self._waiting and len(self._running) < self._engine.options.max_sequences:
            request = self._waiting[0]
            adopted = self._adopt(request)
            if self._running:
                # Room for what runs to go on for a block each: what starts now shall not be preempted at once.
                if sum(map(self._blocks_ahead, (*self._running, request))) > pool.num_free:
                    self._engine.free(request.sequence)
                    break
            else:
                # With nothing running here the blocks are held elsewhere, and no step would free them.
                try:
                    pool.reserve(request.sequence, request.computed + 1)
                except ResourceError as error:
                    ended.append((request, self._fail(request, error)))
                    continue
            if request.started is None:
                request.started = self._clock()
            if not request.generated:
                request.cached_tokens = adopted
            self._running.append(self._waiting.popleft())
        return ended

    def _blocks_ahead(self, request: Request) -> int:
        """Blocks that a request lacks for what must be computed and one block of new tokens."""
        pool = self._engine.pool
        length = min(request.computed + pool.layout.block_size, request.most)
        return max(pool.blocks_for(length) - len(request.sequence.blocks), 0)

    def _adopt(self, request: Request) -> int:
        """Continue a request's sequence with remembered blocks; returns the number of positions it got."""
        if request.scores_prompt or not self._engine.options.prefix_cache:
            return 0
        engine, pool = self._engine, self._engine.pool
        if request.prefix is None or request.prefix.keys[0] != pool.root:
            # The last token is always run: its logits are wanted.
            ids = [*request.prompt, *request.generated][:-1]
            last = min(len(request.prompt), len(ids))
            modes = engine.modes(self._prompt_sparse, 0, last) + engine.modes(True, last, len(ids))
            request.prefix = Prefix.of(pool.root, ids, modes, pool.layout.block_size)
        return pool.adopt(request.sequence, request.prefix)

    def _remember(self, request: Request) -> None:
        if self._engine.options.prefix_cache:
            self._engine.pool.remember(request.sequence)

    @property
    def _prompt_sparse(self) -> bool:
        selector = self._engine.selector
        return selector is not None and selector.prefill

    def _preempt(self, request: Request) -> None:
        self._engine.free(request.sequence)
        request.prefix = None
        self._running.remove(request)
        self._waiting.appendleft(request)
        self.preemptions += 1

    # ---- what a step runs

    def _share(self) -> list[tuple[Request, int]]:
        """Rows of the next step by request: one for each that decodes, the rest for prompts in equal parts."""
        budget = self._engine.options.chunk
        prompts = self._prompts()
        # Those that got a token longest ago come first, in case a step has fewer rows than there are requests.
        decoding = sorted((r for r in self._running if r.decodes), key=lambda r: r.last_token)[:budget]
        budget -= len(decoding)
        if decoding:
            budget = min(budget, PROMPT_ROWS_BESIDE_DECODE)
        rows = share_rows([len(request.next_tokens()) for request in prompts], budget)
        return [(r, 1) for r in decoding] + [(r, n) for r, n in zip(prompts, rows, strict=True) if n]

    def _prompts(self) -> list[Request]:
        """Running requests with a prompt to compute, without those whose next block an older one is computing."""
        size = self._engine.pool.layout.block_size
        prompts = []
        claimed: set[bytes] = set()
        for request in self._running:
            if request.decodes:
                continue
            adopted = self._adopt(request)
            if not request.generated:
                request.cached_tokens += adopted
            place = request.sequence.length // size + 1
            if request.prefix is not None and place < len(request.prefix.keys):
                key = request.prefix.keys[place]
                if key in claimed and request.sequence.length % size == 0:
                    continue
                claimed.add(key)
            # A preempted request may have found in the cache all that it had computed.
            if not request.decodes:
                prompts.append(request)
        return prompts

    def _secure(self, shares: list[tuple[Request, int]], ended: Chunks) -> list[tuple[Request, int]]:
        """Reserve the blocks of a step, the oldest request first; when they run out the youngest gives its own back."""
        secured = []
        rows = {id(request): count for request, count in shares}
        for request in list(self._running):
            count = rows.get(id(request), 0)
            while count and request in self._running:
                try:
                    self._engine.pool.reserve(request.sequence, request.sequence.length + count)
                except ResourceError as error:
                    if len(self._running) > 1:
                        self._preempt(self._running[-1])
                    else:
                        ended.append((request, self._fail(request, error)))
                else:
                    secured.append((request, count))
                    break
        return secured

    def _work(self, request: Request, count: int) -> Work:
        if request.decodes:
            return Work(request.sequence, request.generated[-1:], "last", sparse=True)
        tokens = request.next_tokens()[:count]
        last = request.sequence.length + count == len(request.prompt) and not request.generated
        wanted: LogitsWanted = "all" if request.scores_prompt else "last" if last else "none"
        replay = request.sequence.length >= len(request.prompt)
        return Work(request.sequence, tokens, wanted, sparse=replay or self._prompt_sparse)

    # ---- what comes out

    def _accept(self, request: Request, logits: NDArray[np.float32]) -> StreamChunk:
        try:
            return self._extend(request, logits)
        except Exception as error:
            # Samplers, constraints and sinks are one request's own: the others go on.
            return self._fail(request, error)

    def _extend(self, request: Request, logits: NDArray[np.float32]) -> StreamChunk:
        params = request.params
        token = request.sampler.sample(logits)
        request.last_token = self._clock()
        first = not request.generated
        if first:
            request.first_token = request.last_token
            request.prefix = None
        request.generated.append(token)
        if params.logprobs is not None:
            request.logprobs.append(token_logprob(logits, token, params.logprobs))
        reason: FinishReason | None = None
        text = ""
        if (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids:
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
        return StreamChunk(
            text,
            (token,),
            reason,
            request.timings if reason is not None else None,
            logprobs=tuple(request.logprobs[-1:]) if params.logprobs is not None else None,
            prompt_logprobs=tuple(request.prompt_logprobs) if first and params.prompt_logprobs is not None else None,
        )

    def _fail(self, request: Request, error: Exception) -> StreamChunk:
        request.error = error
        self._end(request, "error")
        return StreamChunk("", (), "error", request.timings, error=error)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        request.prefix = None
        self._engine.free(request.sequence)
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)


def share_rows(needs: Items[int], budget: int) -> list[int]:
    """Equal parts of a budget of rows; what small needs leave goes to the others, and odd rows to the first.

    Example:
        >>> share_rows([10, 2, 90], 32)
        [10, 2, 20]
    """
    parts = [0] * len(needs)
    unmet = [place for place, need in enumerate(needs) if need]
    while budget and unmet:
        part, odd = divmod(budget, len(unmet))
        for turn, place in enumerate(unmet):
            given = min(part + (turn < odd), needs[place] - parts[place])
            parts[place] += given
            budget -= given
        unmet = [place for place in unmet if parts[place] < needs[place]]
    return parts
