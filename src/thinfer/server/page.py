"""The page at /: static files of this package, with headers that let nothing else in."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_FILES = (
    "index.html",
    "style.css",
    "chat.css",
    "live.css",
    "icon.svg",
    "theme.js",
    "app.js",
    "api.js",
    "chat.js",
    "live.js",
    "heat.js",
    "markdown.js",
    "message.js",
    "settings.js",
    "store.js",
    "vendor/uplot.js",
    "vendor/uplot.css",
    "vendor/uplot-LICENSE.txt",
)
# No inline script or style, nothing from elsewhere, and nobody may frame the page.
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def page_router() -> APIRouter:
    """Routes / and /page/NAME; the files are read once, here, and nothing else of the host is ever reached.

    Browsers keep a file and ask whether it is still the one: 304.

    Example: `app.include_router(page_router())`.
    """
    known = {name: _read(name) for name in _FILES}
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _answer(request, known["index.html"])

    for name in _FILES:
        router.add_api_route(f"/page/{name}", _endpoint(known[name]), methods=["GET", "HEAD"])
    return router


def _endpoint(file: _File) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return _answer(request, file)

    return serve


def _answer(request: Request, file: _File) -> Response:
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _CSP,
        "ETag": file.etag,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def _read(name: str) -> _File:
    content = files("thinfer.server").joinpath("page", *name.split("/")).read_bytes()
    return _File(content, _TYPES[name.rsplit(".", 1)[-1]], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
