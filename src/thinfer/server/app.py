"""The application: routes, failures and limits around one server's state."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from thinfer import __version__
from thinfer.server import chat, completions, failures, service
from thinfer.server.limits import Guard
from thinfer.server.live import live_router
from thinfer.server.loop import EngineLoop
from thinfer.server.page import page_router
from thinfer.server.state import ServedModel, ServerState, state_of

T = TypeVar("T")


def create_app(state: ServerState) -> FastAPI:
    """The application of one server; its model is loaded once the application runs.

    Example:
        >>> app = create_app(ServerState(ServerSettings(("tiny",)), lambda: LLM("tiny")))  # doctest: +SKIP
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(_load(state))
        yield
        loading.cancel()
        if state.model is not None:
            await state.model.loop.stop()
            await asyncio.to_thread(state.model.llm.close)

    app = FastAPI(
        title="thinfer",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        # Their pages load scripts from elsewhere; /openapi.json stays.
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    failures.install(app)
    for room in (chat, completions, service):
        app.include_router(room.router)
    app.include_router(live_router(lambda request: state_of(request).require_model().live))
    app.include_router(page_router())
    app.add_middleware(Guard, state=state)
    if state.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(state.settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


async def _load(state: ServerState) -> None:
    """Open the model and start its engine thread; what fails ends the server."""
    try:
        llm = await _in_thread(state.load)
    except Exception as error:
        state.failed = error
        state.stop()
        return
    loop = EngineLoop(llm, max_waiting=state.settings.max_waiting)
    loop.start()
    state.metrics.facts = lambda: loop.facts
    state.model = ServedModel(llm, loop, int(time.time()))
    state.ready(llm)


def _in_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """The result of a function, run in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.cancelled():
            outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, work())
        except Exception as error:
            outcome = partial(future.set_exception, error)
        # Nobody waits any more when the server ended in the meantime.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="thinfer-load", daemon=True).start()
    return future
