"""Starts a real server on a free port, in a thread, for the tests of this folder."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from thinfer import LLM
from thinfer.server.run import Server, bind
from thinfer.server.state import ServerSettings, ServerState

ENGINE = {"executor": "reference", "threads": 1}


@contextmanager
def running_server(
    folder: Path | str, *, engine: dict[str, Any] | None = None, wait: bool = True, **settings: Any
) -> Iterator[str]:
    """The address of a server on a model folder; it has ended, and its thread too, when the block is left."""
    state = ServerState(
        ServerSettings(settings.pop("names", ("tiny",)), **settings), lambda: LLM(folder, **(ENGINE | (engine or {})))
    )
    with serving(state, wait=wait) as url:
        yield url


@contextmanager
def serving(state: ServerState, *, wait: bool = True, drain_seconds: int = 10) -> Iterator[str]:
    """The address of a server with this state."""
    listener = bind("127.0.0.1", 0)
    server = Server(state, drain_seconds=drain_seconds)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        if wait:
            until(lambda: httpx.get(url + "/health").status_code == 200)
        yield url
    finally:
        server.end()
        thread.join(30)
        listener.close()
        assert not thread.is_alive(), "the server did not end"


def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait for a condition; fail after a while."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.02)


def metric(url: str, name: str) -> float:
    """The value of a metric without labels."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))
