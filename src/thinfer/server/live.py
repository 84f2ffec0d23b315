"""The live view: what the engine read for the last tokens, layer by layer, as server-sent events."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from thinfer.core.request import StreamChunk
from thinfer.engine import request as engine_request
from thinfer.engine.llm import LLM
from thinfer.engine.runtime import Usage
from thinfer.server.loop import EngineLoop, LoopFacts
from thinfer.server.sse import EventStream

# Reading the counters of 30 layers takes 0.8 ms: under a hundredth of the engine's time this way.
FRAME_SECONDS = 0.1
_SEND_SECONDS = 0.2
_QUIET_SECONDS = 1.0
# What a reader may fall behind: 12 seconds of frames.
_KEPT_FRAMES = 120

Frame = dict[str, Any]


class LiveFeed:
    """Frames of what an engine loop does; counters are read only while somebody looks.

    A frame sums up the steps of at least `frame_seconds`: `at` and `seconds` (its end since the feed began, its
    length), `steps`, `rows` (tokens that went through the model), `tokens` (those that were generated),
    `density` (fraction of the block linears' weights that were multiplied), `layers` (the same by layer),
    `kinds` (by kind of linear), `bytes` (read) and `dense_bytes` (what these passes read without thresholds).

    Args:
        llm: the loop's model.
        loop: the loop that runs it.
        frame_seconds: shortest frame; the last one before a rest may be shorter.
        clock: seconds.

    Example:
        >>> feed = LiveFeed(llm, loop)  # doctest: +SKIP
        >>> async for event in feed.events():  # doctest: +SKIP
        ...     print([frame["density"] for frame in event["frames"]])
    """

    def __init__(
        self,
        llm: LLM,
        loop: EngineLoop,
        *,
        frame_seconds: float = FRAME_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._llm = llm
        self._loop = loop
        self._frame_seconds = frame_seconds
        self._clock = clock
        self._begin = clock()
        self._frames: deque[Frame] = deque(maxlen=_KEPT_FRAMES)
        self._made = 0
        self._readers = 0
        self._unwatch: Callable[[], None] | None = None
        self._closed = False
        # The frame that is being filled; the engine thread's own.
        self._before: Usage | None = None
        self._since = 0.0
        self._steps = 0
        self._tokens = 0
        # What the loop said when it last had nothing to do.
        self._rest: LoopFacts | None = None

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """What is known of the model, then several times a second the new frames and the state of the queue.

        With nothing new the state alone comes once a second. Ends when the feed is closed.
        """
        async with self._reading():
            seen = self._made
            sent = self._clock()
            yield {"model": self._model(), "frames": [], "now": self._now()}
            while not self._closed:
                await asyncio.sleep(_SEND_SECONDS)
                frames = list(self._frames)
                made = self._made
                new = frames[-(made - seen) :] if made > seen else []
                if new or self._clock() - sent >= _QUIET_SECONDS:
                    seen, sent = made, self._clock()
                    yield {"frames": new, "now": self._now()}

    def close(self) -> None:
        """End all readers, so that a server may stop; there are no frames afterwards."""
        self._closed = True

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        self._readers += 1
        try:
            if self._unwatch is None:
                # The engine gives its counters between two steps: waiting for that is nothing for the event loop.
                usage = await asyncio.to_thread(self._llm.engine.usage)
                if self._unwatch is None:
                    self._before = usage
                    self._start(self._clock())
                    self._unwatch = self._loop.watch(self._after_step)
            yield
        finally:
            self._readers -= 1
            if not self._readers and self._unwatch is not None:
                self._unwatch()
                self._unwatch = None

    def _now(self) -> dict[str, Any]:
        facts = self._loop.facts
        return {
            "running": facts.running,
            "waiting": facts.waiting,
            "kv_used": round(facts.kv_used, 4),
            "kv_cached": round(facts.kv_cached, 4),
            "preemptions": facts.preemptions,
            "recall": None if facts.recall is None else round(facts.recall, 4),
        }

    def _model(self) -> dict[str, Any]:
        engine = self._llm.engine
        layout, selector = engine.pool.layout, engine.selector
        sparse = None
        if selector is not None:
            sparse = {
                "method": selector.method,
                "thresholds": len(selector.thresholds),
                "sink_tokens": selector.sink_tokens,
                "prefill": selector.prefill,
            }
        return {
            "type": engine.config.model_type,
            "layers": engine.config.num_hidden_layers,
            "context": engine.max_model_len,
            "kv_tokens": layout.num_blocks * layout.block_size,
            "max_sequences": engine.options.max_sequences,
            "sparse": sparse,
        }

    # ---- in the engine thread

    def _after_step(self, chunks: Sequence[tuple[engine_request.Request, StreamChunk]]) -> None:
        now = self._clock()
        self._steps += 1
        self._tokens += sum(len(chunk.token_ids) for _, chunk in chunks)
        facts = self._loop.facts
        if facts.running == 0 and facts is not self._rest:
            # The first step after a rest: when it began is not known, so time counts from its end.
            self._rest = facts
            self._since = now
            return
        ended = any(chunk.finish_reason is not None for _, chunk in chunks)
        if now - self._since < self._frame_seconds and not ended:
            return
        usage = self._llm.engine.usage()
        self._frames.append(self._frame(now, usage.since(self._before)))
        self._made += 1
        self._before = usage
        self._start(now)

    def _start(self, now: float) -> None:
        self._since = now
        self._steps = self._tokens = 0

    def _frame(self, now: float, usage: Usage) -> Frame:
        layers, kinds = densities(usage, self._llm.config.num_hidden_layers)
        return {
            "at": round(now - self._begin, 3),
            "seconds": round(now - self._since, 4),
            "steps": self._steps,
            "rows": usage.rows,
            "tokens": self._tokens,
            "density": round(usage.density, 4),
            "layers": layers,
            "kinds": kinds,
            "bytes": sum(count.bytes for count in usage.sites.values()),
            "dense_bytes": sum(count.dense_bytes for count in usage.sites.values()),
        }


def densities(usage: Usage, num_layers: int) -> tuple[list[float], dict[str, float]]:
    """Fractions of the weights that were multiplied, by layer and by kind of block linear; 1 where nothing ran.

    Example:
        >>> from thinfer.engine.executor import LinearCount
        >>> usage = Usage(1, {"layers.0.o": LinearCount(2, 8)}, {"layers.0.o": 8})
        >>> densities(usage, 2)
        ([0.25, 1.0], {'o': 0.25})
    """
    layers = [[0, 0] for _ in range(num_layers)]
    kinds: dict[str, list[int]] = {}
    for site, count in usage.sites.items():
        place, _, kind = site.removeprefix("layers.").rpartition(".")
        if not place.isdecimal():
            continue
        for sums in (layers[int(place)], kinds.setdefault(kind, [0, 0])):
            sums[0] += count.active * usage.widths[site]
            sums[1] += count.total * usage.widths[site]
    return (
        [round(active / total, 3) if total else 1.0 for active, total in layers],
        {kind: round(active / total, 3) if total else 1.0 for kind, (active, total) in kinds.items()},
    )


def live_router(get_feed: Callable[[Request], LiveFeed]) -> APIRouter:
    """The route /v1/live.

    Args:
        get_feed: the feed of the request's app; may raise while there is none.

    Example: `app.include_router(live_router(lambda request: request.app.state.live))`.
    """
    router = APIRouter()

    # A stream without an end is nothing for a schema of requests and answers.
    @router.get("/v1/live", include_in_schema=False)
    async def live(request: Request) -> Response:
        return EventStream(get_feed(request).events())

    return router
