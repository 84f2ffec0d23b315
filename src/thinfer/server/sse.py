"""Server-sent events: an answer that comes in pieces, with pings, and that ends when its reader goes."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
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
    """Sends what an async iterator gives, an event each, and a comment where nothing came for a while.

    When the client goes away, or the iterator ends, the iterator is closed: what it holds it frees in its own
    ``finally``.

    Args:
        items: objects and texts of events.
        ping_seconds: longest silence.
        time_limit: seconds for the whole answer, after which the connection is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        items: AsyncIterator[Mapping[str, Any] | str],
        *,
        ping_seconds: float = PING_SECONDS,
        time_limit: float | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # An answer of unknown length has none.
        del self.headers["content-length"]
        self._items = items
        self._ping_seconds = ping_seconds
        self._time_limit = time_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the items end or the client is gone."""
        sender = asyncio.create_task(self._send(send))
        watcher = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait({sender, watcher}, timeout=self._time_limit, return_when=asyncio.FIRST_COMPLETED)
            # Frees a sender that waits for a reader who does not read.
            if sender.done():
                await sender
        finally:
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)
            close = getattr(self._items, "aclose", None)
            if close is not None:
                with suppress(RuntimeError):
                    await close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # Headers go out at once, so that a client knows its request was taken while the prompt is computed.
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        following = asyncio.ensure_future(anext(self._items, None))
        try:
            while True:
                done, _ = await asyncio.wait({following}, timeout=self._ping_seconds)
                if not done:
                    await send({"type": "http.response.body", "body": _PING, "more_body": True})
                    continue
                item = following.result()
                if item is None:
                    break
                # The next item is asked for only now: while a slow reader blocks, what comes is joined into one event.
                await send({"type": "http.response.body", "body": event(item), "more_body": True})
                following = asyncio.ensure_future(anext(self._items, None))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if not following.done():
                following.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await following


async def until_disconnect(receive: Receive) -> None:
    """Return when the client is gone; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
