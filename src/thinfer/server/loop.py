"""EngineLoop: one thread runs the scheduler; coroutines post requests to it and get their chunks back."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from thinfer.core.request import StreamChunk
from thinfer.core.sampling import SamplingParams
from thinfer.engine.llm import LLM
from thinfer.engine.request import Request
from thinfer.server.failures import ApiError

Watcher = Callable[[Sequence[tuple[Request, StreamChunk]]], None]

_log = logging.getLogger("thinfer.server")
_FACTS_SECONDS = 0.5
# What a stream says may wait so long for more of it. A wake-up costs about 0.3 ms of a core that decoding wants, an
# eighth of a small model's step; half a screen's frame is nothing that anybody sees.
_HOLD_SECONDS = 0.008


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """What the engine did lately, read between two steps.

    Attributes:
        running: requests that take part in steps.
        waiting: requests that wait for their first step or for blocks.
        kv_used: fraction of the KV blocks that requests hold.
        kv_cached: fraction that nobody holds and the prefix cache remembers.
        density: fraction of the block linears' weights multiplied since the last facts; 1 is dense.
        bytes_per_token: weight bytes read a token since then; 0 when nothing ran.
        tokens_per_second: generated tokens a second since then; 0 when idle.
        preemptions: how often a request had to give its blocks back, since the start.
        rows: tokens that went through the model, since the start.
        bytes_read: weight bytes read for them.
        density_sum: their densities added up.
        recall: fraction of the neurons that fired which their predictors had named, of the last samples; None without
            predictors or before the first sample.
        needed: neurons that fired in samples, since the start.
        found: of them those that the predictors had named.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    kv_cached: float = 0.0
    density: float = 1.0
    bytes_per_token: float = 0.0
    tokens_per_second: float = 0.0
    preemptions: int = 0
    rows: int = 0
    bytes_read: float = 0.0
    density_sum: float = 0.0
    recall: float | None = None
    needed: int = 0
    found: int = 0


class RecentRecall:
    """Recall over the last `steps` to twice as many steps: layers are sampled in turn, and a part of a turn misleads.

    Example:
        >>> recent = RecentRecall(64)
        >>> recent.add(64, needed=10, found=9)
        0.9
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        # Steps, needed and found when two turns began: the one under way and the one before.
        self._turns = deque([(0, 0, 0)], maxlen=2)

    def add(self, step: int, needed: int, found: int) -> float | None:
        """The recall now, from counts since the start; None when there was no sample lately."""
        if step - self._turns[-1][0] >= self._steps:
            self._turns.append((step, needed, found))
        _, needed_before, found_before = self._turns[0]
        return (found - found_before) / (needed - needed_before) if needed > needed_before else None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and their settings; `continues` says whether the answer goes on with the prompt's text."""

    ids: list[int]
    params: SamplingParams
    continues: bool = False


@dataclass(eq=False)
class Ticket:
    """One prompt in the engine, seen from the event loop; iterate over it for its chunks.

    What is not read waits here, and is never more than the request's own tokens.

    Attributes:
        prompt: what was asked for.
        engine: where it was submitted.
        streamed: whether chunks are wanted as they come; if not they may all come with the last.
        request: the scheduler's; None before it took it.
        ended: whether the last chunk came.
    """

    prompt: Prompt
    engine: "EngineLoop"
    streamed: bool = True
    request: Request | None = None
    ended: bool = False
    _chunks: deque[tuple[float, StreamChunk]] = field(default_factory=deque)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _admitted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def admitted(self) -> None:
        """Return once the scheduler took the request; raise what it has against it."""
        await self._admitted

    async def take(self) -> list[tuple[float, StreamChunk]]:
        """All chunks since the last call and when the engine had each, at least one; empty after the last."""
        while not self._chunks and not self.ended:
            self._news.clear()
            await self._news.wait()
        chunks = list(self._chunks)
        self._chunks.clear()
        return chunks

    def cancel(self) -> None:
        """Stop generating for it, whatever state it is in; calling again does nothing."""
        self.engine.cancel(self)

    def put(self, at: float, chunk: StreamChunk) -> None:
        """Add what the engine gave and when, in seconds of `time.perf_counter`; called in the event loop."""
        self._chunks.append((at, chunk))
        if chunk.finish_reason is not None:
            self.ended = True
        self._news.set()

    def settle(self, error: Exception | None) -> None:
        """The scheduler took the request, or has something against it; called in the event loop."""
        if self._admitted.done():
            return
        if error is None:
            self._admitted.set_result(None)
        else:
            self.ended = True
            self._news.set()
            self._admitted.set_exception(error)
            # Somebody who no longer waits is no reason for a warning.
            self._admitted.exception()


class EngineLoop:
    """Runs one scheduler in a thread of its own.

    `submit` and `cancel` are called in the event loop that `start` was called in. All that the engine has to say of a
    step goes there in one call, so that many streams cost one wake-up.

    Args:
        llm: the model.
        max_waiting: most requests that wait for their first step; more are refused with 429.

    Attributes:
        facts: the engine's figures, renewed while it works.

    Example:
        >>> loop = EngineLoop(llm)  # doctest: +SKIP
        >>> loop.start()  # doctest: +SKIP
        >>> (ticket,) = loop.submit([Prompt([1, 2, 3], SamplingParams())])  # doctest: +SKIP
    """

    def __init__(self, llm: LLM, *, max_waiting: int = 128) -> None:
        self._llm = llm
        self._most = llm.options.max_sequences + max_waiting
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._scheduler = llm.scheduler()
        self._tickets: dict[Request, Ticket] = {}
        self._open = 0
        self._watchers: list[Watcher] = []
        self._outbox: list[Callable[[], None]] = []
        self._due = math.inf
        self._generated = 0
        self._steps = 0
        self._recall = RecentRecall(llm.options.recall_steps)
        self._facts_at = time.perf_counter()
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="thinfer-engine", daemon=True)
        self.facts = LoopFacts()

    def start(self) -> None:
        """Start the thread; what it gives goes to the running event loop."""
        self._asyncio = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Cancel what is left and end the thread."""
        if self._thread.is_alive():
            self._inbox.put(None)
            await asyncio.to_thread(self._thread.join)

    @property
    def num_open(self) -> int:
        """Requests that were taken and have not ended."""
        return self._open

    def check_room(self, count: int) -> None:
        """Raise what `submit` of so many prompts would, before they are prepared.

        Raises:
            ApiError: 429 when the queue has no room for them now, 400 when it never has.
        """
        if count > self._most:
            raise ApiError(400, f"the request holds {count} prompts and choices; at most {self._most} may run and wait")
        if self._open + count > self._most:
            waiting = max(self._open - self._llm.options.max_sequences, 0)
            raise ApiError(
                429,
                f"{waiting} requests wait already and {count} more do not fit the queue; try again later",
                retry_after=max(1, min(60, waiting // 4)),
            )

    def submit(self, prompts: Sequence[Prompt], *, streamed: bool = True) -> list[Ticket]:
        """Queue prompts, all or none; raises as `check_room`."""
        self.check_room(len(prompts))
        tickets = [Ticket(prompt, self, streamed) for prompt in prompts]
        self._open += len(tickets)
        for ticket in tickets:
            self._inbox.put(partial(self._add, ticket))
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        """End a request at the next step."""
        if not ticket.ended:
            self._inbox.put(partial(self._cancel, ticket))

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Have a function called in the engine thread with the chunks of every step; returns what ends that.

        Every stream waits for it, so it must be quick. One that raises is not called again.
        """
        self._watchers.append(watcher)

        def remove() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return remove

    # ---- in the engine thread

    def _run(self) -> None:
        while self._turn():
            pass
        for ticket in list(self._tickets.values()):
            self._cancel(ticket)
        self._flush()

    def _turn(self) -> bool:
        """Take what was asked for and run one step; False when the thread shall end."""
        try:
            idle = not self._scheduler.busy
            if idle:
                self._renew_facts(idle=True)
                self._flush()
            if not self._take(block=idle):
                return False
            if self._scheduler.busy:
                began = time.perf_counter()
                self._step()
                if self._may_hold(time.perf_counter() - began):
                    return True
        except Exception as error:
            # What fails for all: everyone is told, and the next request starts on a new scheduler.
            _log.error("the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
            self._restart(error)
        self._flush()
        return True

    def _take(self, block: bool) -> bool:
        """Do what was asked for; False when the thread shall end."""
        while True:
            try:
                task = self._inbox.get(block)
            except Empty:
                return True
            if task is None:
                return False
            task()
            block = False

    def _add(self, ticket: Ticket) -> None:
        error: Exception | None = None
        try:
            prompt = ticket.prompt
            ticket.request = self._scheduler.add(prompt.ids, prompt.params, continues=prompt.continues)
        except Exception as problem:
            error = problem
            self._say(self._close_one)
        else:
            self._tickets[ticket.request] = ticket
        self._say(partial(ticket.settle, error))

    def _cancel(self, ticket: Ticket) -> None:
        request = ticket.request
        if request is not None and request in self._tickets:
            self._deliver(request, self._scheduler.cancel(request))

    def _step(self) -> None:
        chunks = self._scheduler.step()
        self._steps += 1
        for request, chunk in chunks:
            self._generated += len(chunk.token_ids)
            self._deliver(request, chunk)
        for watcher in list(self._watchers):
            try:
                watcher(chunks)
            except Exception as error:
                _log.error("a watcher of the engine failed and was removed", exc_info=error)
                self._watchers.remove(watcher)
        self._renew_facts()

    def _may_hold(self, seconds: float) -> bool:
        """Whether what was said can wait for another step of so many seconds."""
        return self._scheduler.busy and time.perf_counter() + seconds < self._due

    def _restart(self, error: Exception) -> None:
        old, self._scheduler = self._scheduler, self._llm.scheduler()
        for request in list(self._tickets):
            old.cancel(request)
            self._deliver(request, StreamChunk("", (), "error", request.timings, error=error))

    def _deliver(self, request: Request, chunk: StreamChunk) -> None:
        ticket = self._tickets.get(request)
        if ticket is None:
            return
        at = time.perf_counter()
        due = at + _HOLD_SECONDS if ticket.streamed else math.inf
        if chunk.finish_reason is not None:
            del self._tickets[request]
            self._say(self._close_one)
        elif ticket.streamed and len(request.generated) <= len(chunk.token_ids):
            # Nobody shall wait longer for the first one.
            due = at
        self._say(partial(ticket.put, at, chunk), due)

    def _say(self, news: Callable[[], None], due: float = 0.0) -> None:
        """Have the event loop do something, at that time at the latest."""
        self._outbox.append(news)
        self._due = min(self._due, due)

    def _flush(self) -> None:
        """Hand what was said to the event loop, in one wake-up."""
        self._due = math.inf
        if not self._outbox:
            return
        news, self._outbox = self._outbox, []

        def deliver() -> None:
            for tell in news:
                tell()

        assert self._asyncio is not None  # noqa: S101  (set before the thread starts)
        try:
            self._asyncio.call_soon_threadsafe(deliver)
        except RuntimeError:
            # The event loop is closed: nobody listens any more.
            return

    def _close_one(self) -> None:
        self._open -= 1

    def _renew_facts(self, *, idle: bool = False) -> None:
        now = time.perf_counter()
        seconds = now - self._facts_at
        if not idle and seconds < _FACTS_SECONDS:
            return
        engine, scheduler, before = self._llm.engine, self._scheduler, self.facts
        pool, usage = engine.pool, engine.usage()
        total = pool.layout.num_blocks
        rows = usage.rows - before.rows
        active, read = usage.density * usage.rows, usage.bytes_per_token * usage.rows
        needed, found = usage.needed, usage.found
        recall = self._recall.add(self._steps, needed, found)
        self.facts = LoopFacts(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_used=1 - pool.num_free / total,
            kv_cached=pool.num_cached / total,
            density=(active - before.density_sum) / rows if rows > 0 else before.density,
            bytes_per_token=(read - before.bytes_read) / rows if rows > 0 else before.bytes_per_token,
            tokens_per_second=0.0 if idle else self._generated / seconds,
            preemptions=scheduler.preemptions,
            rows=usage.rows,
            bytes_read=read,
            density_sum=active,
            recall=before.recall if recall is None else recall,
            needed=needed,
            found=found,
        )
        self._generated = 0
        self._facts_at = now
