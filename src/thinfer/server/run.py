"""Runs a server until a signal ends it: the port first, then the model, and at the end what is under way."""

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn

from thinfer.errors import UsageError
from thinfer.server.app import create_app
from thinfer.server.limits import MAX_HEADER_BYTES, PatientProtocol
from thinfer.server.state import LAST_WORDS_SECONDS, ServerState

_KEEP_ALIVE_SECONDS = 30


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        UsageError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error


def serve(state: ServerState, listener: socket.socket, *, drain_seconds: int = 30) -> None:
    """Serve until SIGTERM or SIGINT; then take no more requests and give those under way time to end.

    Args:
        state: settings, and how the model is loaded.
        listener: from `bind`.
        drain_seconds: longest time that requests under way get; a second signal ends them at once.

    Raises:
        ThinferError: what loading the model failed with.
        KeyboardInterrupt: after a SIGINT.
    """
    server = Server(state, drain_seconds=drain_seconds)
    # uvicorn raises the signal again when it is done, and a served SIGTERM is a success.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)
    if state.failed is not None:
        raise state.failed


class Server(uvicorn.Server):
    """uvicorn with the limits of this server; its end is known to the state, which can also bring it about.

    Example:
        >>> Server(state).run(sockets=[bind("127.0.0.1", 0)])  # doctest: +SKIP
    """

    def __init__(self, state: ServerState, *, drain_seconds: int = 30) -> None:
        # Malformed requests are their clients' affair; uvicorn would write a line for each.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        super().__init__(
            uvicorn.Config(
                create_app(state),
                http=PatientProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                # Whoever does not read why it ends is cut off after that.
                timeout_graceful_shutdown=drain_seconds + int(LAST_WORDS_SECONDS),
            )
        )
        self._drain_seconds = drain_seconds
        self._state = state
        state.stop = self.end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end on a signal; end at once on a second SIGINT."""
        self._state.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what is under way; end it with a proper answer when its time is over."""
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._state.cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def end(self) -> None:
        """Take no more requests, and end once those under way have."""
        self._state.drain()
        self.should_exit = True
