"""Event streams below HTTP: what happens when a client goes at the wrong moment."""

import asyncio

from thinfer.server.sse import EventStream


def test_a_client_that_goes_before_the_first_event_ends_the_work_too():
    """A generator that was not begun runs no code when it is closed."""
    ended = []

    async def items():
        yield {"a": 1}

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        # A full buffer: an earlier answer on the connection was not read.
        await asyncio.sleep(60)

    asyncio.run(EventStream(items(), on_end=lambda: ended.append(1))({}, receive, send))
    assert ended == [1]
