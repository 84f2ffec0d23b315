"""What every request must pass: host, key, size and time of its body; and connections that never get to a request."""

import asyncio
import hmac
import logging
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from thinfer.server.failures import ApiError, as_api_error
from thinfer.server.sse import to_json
from thinfer.server.state import ServerState

MAX_HEADER_BYTES = 32 << 10
HEADER_SECONDS = 15.0

_log = logging.getLogger("thinfer.server")
# The page must load before a key can be typed into it, and whoever restarts servers has none.
_OPEN_PATHS = ("/", "/health")
_OPEN_FOLDER = "/page/"


class Guard:
    """ASGI middleware: wants the API key, reads the body within its limits, and answers what fails unexpectedly.

    Args:
        app: what is guarded.
        state: the server.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; anything but HTTP passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                if message["status"] >= 400:
                    self._state.metrics.refused(message["status"])
            await send(message)

        try:
            _check_headers(scope)
            self._check_host(scope)
            self._check_key(scope)
            await self._app(scope, await self._with_body(scope, receive), watched)
        except Exception as error:
            failure = as_api_error(error)
            if begun:
                _log.error("an answer broke off: %s", failure.message)
                raise
            response = failure.response()
            if failure.status in (408, 413, 431):
                # The rest of the body is not read, so the connection cannot go on.
                response.headers["Connection"] = "close"
            await response(scope, receive, watched)

    def _check_host(self, scope: Scope) -> None:
        """Refuse names that are not this server's: a page whose name is made to point here could call it otherwise."""
        names = self._state.settings.host_names
        if names is None:
            return
        host = (_header(scope, b"host") or b"").decode("latin-1")
        # The port counts for nothing; an IPv6 address is in brackets.
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() not in names and not _is_local(name.lower()):
            raise ApiError(403, f"this server is not called {name!r:.200}; start it with --allowed-host for that name")

    def _check_key(self, scope: Scope) -> None:
        key, path = self._state.settings.api_key, scope["path"]
        if key is None or (
            scope["method"] in ("GET", "HEAD") and (path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER))
        ):
            return
        given = _header(scope, b"authorization") or b""
        kind, _, value = given.partition(b" ")
        # Compared in constant time: how long it takes tells nothing of the key.
        if kind.lower() != b"bearer" or not hmac.compare_digest(value.strip(), key.encode()):
            raise ApiError(401, "missing or wrong API key; send the header Authorization: Bearer KEY")

    async def _with_body(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body; what is returned gives it out once more, and then what the connection says."""
        limit = self._state.settings.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit} bytes; send less")
        length = _header(scope, b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        gone: Message | None = None

        async def read() -> None:
            nonlocal size, gone
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    gone = message
                    return
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large
                more = message.get("more_body", False)

        seconds = self._state.settings.body_seconds
        try:
            await asyncio.wait_for(read(), seconds)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None
        pending: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]
        if gone is not None:
            pending = [gone]

        async def replay() -> Message:
            return pending.pop(0) if pending else await receive()

        return replay


def _check_headers(scope: Scope) -> None:
    # The parser's own limit holds for headers that come in several reads alone.
    if sum(len(key) + len(value) for key, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes; send less")


def _is_local(name: str) -> bool:
    """Whether a host needs no name service to be found: an address or localhost."""
    if not name or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request headers do not come in time.

    uvicorn limits how long a connection is idle after an answer, not how long a client may take over its headers.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take bytes; wait no longer once they make a request, and begin to wait with the first ones of another."""
        super().data_received(data)
        if self._serves:
            self._wait_no_more()
        elif self._deadline is None:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the form of all other failures, and close."""
        message = f"the request is not valid HTTP/1.1, or its headers are larger than {MAX_HEADER_BYTES} bytes"
        body = to_json(ApiError(400, message, code="invalid_http").body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        start = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        # In the middle of another answer there is no place for it.
        with suppress(h11.LocalProtocolError):
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._too_slow)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self._serves and not self.transport.is_closing():
            self.transport.close()

    @property
    def _serves(self) -> bool:
        """Whether a request came and is not yet answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete
