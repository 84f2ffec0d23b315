"""Server-sent events: an answer that comes in pieces, with pings, and that ends when its reader goes."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = "[DONE]"
PING_SECONDS = 10.0
_PING = b": ping\n\n"


def to_json(content: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates become question marks, NaN and infinity are not written."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


def event(item: Mapping[str, Any] | str) -> bytes:
    r"""One event: an object as JSON, text as it is.

    Example:
        >>> event({"a": 1})
        b'data: {"a":1}\n\n'
    """
    data = item.encode() if isinstance(item, str) else to_json(item)
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends what an async generator gives, an event each, and a comment where nothing came for a while.

    When the client goes away the generator is closed.

    Args:
        items: objects and texts of events.
        on_end: called once when the answer ends, however it does. A generator that was not begun, because the client
            went before, runs no ``finally`` of its own.
        ping_seconds: longest silence.
        time_limit: seconds for the whole answer, after which the connection is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        items: AsyncGenerator[Mapping[str, Any] | str, None],
        *,
        on_end: Callable[[], None] = lambda: None,
        ping_seconds: float = PING_SECONDS,
        time_limit: float | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # An answer of unknown length has none.
        del self.headers["content-length"]
        self._items = items
        self._on_end = on_end
        self._ping_seconds = ping_seconds
        self._time_limit = time_limit
        self._silent = True
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the items end or the client is gone."""
        sender = asyncio.create_task(self._send(send))
        pinger = asyncio.create_task(self._ping(send))
        watcher = asyncio.create_task(until_disconnect(receive))
        try:
            # The limit frees a sender that waits for a reader who does not read.
            await asyncio.wait({sender, watcher}, timeout=self._time_limit, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                await sender
        finally:
            self._on_end()
            for task in (sender, pinger, watcher):
                task.cancel()
            await asyncio.gather(sender, pinger, watcher, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # Headers go out at once, so that a client knows its request was taken while the prompt is computed.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        async with aclosing(self._items) as items:
            # The next one is asked for when this one is sent: what comes while a slow reader blocks can be joined.
            async for item in items:
                await send({"type": "http.response.body", "body": event(item), "more_body": True})
                self._silent = False
        # From here on a ping would come after the end.
        self._ended = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        while True:
            self._silent = True
            await asyncio.sleep(self._ping_seconds)
            if self._ended:
                return
            if self._silent:
                await send({"type": "http.response.body", "body": _PING, "more_body": True})


async def until_disconnect(receive: Receive) -> None:
    """Return when the client is gone; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
