"""Prompts through the engine, for both endpoints: started together, collected or streamed, ended with their client."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from thinfer import __version__
from thinfer.core.request import FinishReason, StreamChunk, Timings, TokenLogprob
from thinfer.server.failures import ApiError, as_api_error
from thinfer.server.loop import Prompt, Ticket
from thinfer.server.metrics import RequestClock
from thinfer.server.sse import DONE, EventStream, until_disconnect
from thinfer.server.state import LAST_WORDS_SECONDS, ServedModel, ServerState

T = TypeVar("T")


@dataclass(slots=True)
class Output:
    """What came for one prompt: all of it, or what came at once in a stream."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    timings: Timings | None = None

    @classmethod
    def joined(cls, chunks: Sequence[tuple[float, StreamChunk]], clock: RequestClock) -> "Output":
        """Several chunks as one; what failed in the engine is raised."""
        output = cls()
        for at, chunk in chunks:
            clock.see(chunk, at)
            if chunk.error is not None:
                raise chunk.error
            output.text += chunk.text
            output.token_ids += chunk.token_ids
            output.logprobs += chunk.logprobs or ()
            output.prompt_logprobs = chunk.prompt_logprobs or output.prompt_logprobs
            output.finish_reason = chunk.finish_reason
            output.timings = chunk.timings
        return output


class Job:
    """All prompts of one HTTP request, in the engine.

    Args:
        state: the server.
        model: its model.
        prompts: every prompt so many times in a row as it has choices.
        choices: how often each prompt is there.
        streamed: `stream` will be called, not `collect`.
        scores_only: nothing is to be generated; the one token that comes all the same is not counted.

    Raises:
        ApiError: 400 for a prompt that does not fit the context, 429 when the queue is full.
    """

    def __init__(
        self,
        state: ServerState,
        model: ServedModel,
        prompts: Sequence[Prompt],
        *,
        choices: int,
        streamed: bool,
        scores_only: bool = False,
    ) -> None:
        for prompt in prompts:
            if len(prompt.ids) >= model.context:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt.ids)} tokens and the context {model.context}, which must also hold "
                    "the answer; shorten the prompt or start the server with a larger --max-model-len",
                    code="context_length_exceeded",
                )
        self._choices = choices
        self._scores_only = scores_only
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts[::choices])
        self._generated = 0
        self._cached = 0
        self._tickets = model.loop.submit(prompts, streamed=streamed)
        self._clocks = [state.metrics.clock() for _ in prompts]
        self._why: ApiError | None = None
        self._jobs = state.jobs
        self._jobs.add(self)

    async def admitted(self) -> None:
        """Wait until the engine took all prompts; end them and raise what it has against one."""
        try:
            for ticket in self._tickets:
                await ticket.admitted()
        except BaseException:
            self.cancel()
            raise

    async def collect(self) -> list[Output]:
        """All outputs in the order of the prompts."""
        return [self._read(index, await self._rest(ticket)) for index, ticket in enumerate(self._tickets)]

    @staticmethod
    async def _rest(ticket: Ticket) -> list[tuple[float, StreamChunk]]:
        chunks: list[tuple[float, StreamChunk]] = []
        while new := await ticket.take():
            chunks += new
        return chunks

    async def stream(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Index of the prompt and what came for it, as it comes; what came while nobody asked comes as one piece."""
        if len(self._tickets) == 1:
            # The usual case, without a task for every token.
            while chunks := await self._tickets[0].take():
                yield 0, self._read(0, chunks)
            return
        waits = {asyncio.ensure_future(ticket.take()): index for index, ticket in enumerate(self._tickets)}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waits.pop(task)
                    chunks = task.result()
                    if chunks:
                        yield index, self._read(index, chunks)
                        waits[asyncio.ensure_future(self._tickets[index].take())] = index
        finally:
            for task in waits:
                task.cancel()

    def cancel(self) -> None:
        """End what still runs, for a client that is gone or has all it wanted."""
        self._jobs.discard(self)
        for ticket in self._tickets:
            ticket.cancel()

    def stop(self, why: ApiError) -> None:
        """End what still runs; whoever waits for it is told why."""
        self._why = self._why or why
        self.cancel()

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object for what was read so far; a prompt counts once, whatever its choices."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt_tokens + self._generated,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }

    def _read(self, index: int, chunks: Sequence[tuple[float, StreamChunk]]) -> Output:
        output = Output.joined(chunks, self._clocks[index])
        if output.finish_reason == "cancelled" and self._why is not None:
            raise self._why
        self._generated += 0 if self._scores_only else len(output.token_ids)
        if output.timings is not None and index % self._choices == 0:
            self._cached += output.timings.cached_tokens
        return output


async def answer(request: Request, state: ServerState, job: Job, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine over a job; the job ends when the client goes away or the time is over."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_disconnect(request.receive))
    timer = _limit(state, job)
    try:
        done, _ = await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        raise ApiError(408, "the client went away")
    finally:
        timer.cancel()
        job.cancel()
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def event_stream(state: ServerState, job: Job, events: AsyncGenerator[dict[str, Any], None]) -> Response:
    """Events of a job, then ``[DONE]``; a failure is an event of its own."""
    timer = _limit(state, job)

    async def guarded() -> AsyncGenerator[dict[str, Any] | str, None]:
        try:
            async with aclosing(events) as source:
                async for item in source:
                    yield item
        except Exception as error:
            yield as_api_error(error).body()
        yield DONE

    def end() -> None:
        timer.cancel()
        job.cancel()

    # Who does not even read the failure is cut off a little later.
    limit = state.settings.request_seconds + LAST_WORDS_SECONDS
    return EventStream(guarded(), on_end=end, ping_seconds=state.settings.ping_seconds, time_limit=limit)


def _limit(state: ServerState, job: Job) -> asyncio.TimerHandle:
    """Stop a job when its time is over, whatever it waits for then."""
    seconds = state.settings.request_seconds
    why = ApiError(504, f"the request took longer than {seconds:g} s; ask for fewer tokens")
    return asyncio.get_running_loop().call_later(seconds, job.stop, why)


def head(kind: str, prefix: str, name: str) -> dict[str, Any]:
    """The fields with which every answer and every event begins."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": name,
        "system_fingerprint": f"thinfer-{__version__}",
    }


def timings(of: Timings) -> dict[str, Any]:
    """llama.cpp's timings object, in milliseconds, with the wait in the queue.

    Example:
        >>> timings(Timings(4, 0.5, 1, 0.25))["prompt_per_second"]
        8.0
    """
    return {
        "prompt_n": of.prompt_tokens - of.cached_tokens,
        "cache_n": of.cached_tokens,
        "prompt_ms": of.prompt_seconds * 1e3,
        "prompt_per_second": of.prompt_tokens_per_second,
        "predicted_n": of.decode_tokens + 1,
        "predicted_ms": of.decode_seconds * 1e3,
        "predicted_per_second": of.decode_tokens_per_second,
        "queue_ms": of.queue_seconds * 1e3,
    }
