"""Failures over HTTP: every one is an OpenAI error object with a proper status, and none names a path of the host."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from thinfer.errors import ResourceError, UnsupportedError, UsageError
from thinfer.server.sse import to_json

_log = logging.getLogger("thinfer.server")

_KINDS = {
    400: ("invalid_request_error", "invalid_value"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "timeout"),
    431: ("invalid_request_error", "headers_too_large"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "queue_full"),
    501: ("not_implemented_error", "not_implemented"),
    503: ("service_unavailable_error", "unavailable"),
    504: ("timeout_error", "timeout"),
}
_INTERNAL = "the server failed on this request; its log says why"


class ApiError(Exception):
    """A failure with a status of its own.

    Args:
        status: HTTP status.
        message: what is wrong and what helps; it must not name paths.
        param: the field of the request that is meant.
        code: OpenAI's code; None: the usual one of the status.
        retry_after: seconds after which the client may try again.

    Example:
        >>> ApiError(404, "no model named x", param="model").body()["error"]["type"]
        'not_found_error'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind, code = _KINDS.get(self.status, ("server_error", "internal_error"))
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or code},
        }

    def response(self) -> Response:
        """The whole answer."""
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in UTF-8; lone surrogates, which a request may hold and a message repeat, become question marks."""
    return Response(to_json(content), status, headers=headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception: its message when the request is to blame, else that the log has it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ResourceError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, UsageError | UnsupportedError):
        return ApiError(400, str(error))
    if isinstance(error, RecursionError):
        # What of ours recurses does it over a client's JSON.
        return ApiError(400, "the body is nested too deeply")
    _log.error("request failed: %s: %s", type(error).__name__, error, exc_info=error)
    return ApiError(500, _INTERNAL)


def install(app: FastAPI) -> None:
    """Answer everything that fails below `app` in OpenAI's form."""

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)  # noqa: S101  (registered for this class)
        return _of_validation(error, request).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101  (registered for this class)
        answer = _of_http(error, request)
        response = answer.response()
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    async def other(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    for kind in (ApiError, ResourceError, UsageError, UnsupportedError, RecursionError):
        app.add_exception_handler(kind, other)


def _of_http(error: HTTPException, request: Request) -> ApiError:
    path = request.url.path[:200]
    if error.status_code == 404:
        return ApiError(404, f"there is no {path}; /openapi.json lists what there is")
    if error.status_code == 405:
        return ApiError(405, f"{path} does not take {request.method[:20]}")
    if error.status_code == 400:
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    return ApiError(error.status_code, str(error.detail))


def _of_validation(error: RequestValidationError, request: Request) -> ApiError:
    """The complaint that goes deepest, with its place in the body as `param`."""
    # A union complains once a member: the deepest one is about the form that was meant.
    first = max(error.errors(), key=lambda each: len(each.get("loc", ())))
    if first.get("loc") == ("body",) and "json" not in request.headers.get("content-type", ""):
        return ApiError(400, "send the body as JSON, with the header Content-Type: application/json")
    if first.get("type") == "model_attributes_type":
        return ApiError(400, "the body must be a JSON object")
    if first.get("type") == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    fields = [str(part) for part in first.get("loc", ())[1:] if isinstance(part, int) or _is_field(part)]
    param = ".".join(fields) or None
    message = str(first.get("msg", "invalid")).removeprefix("Value error, ")
    if first.get("type") == "extra_forbidden":
        return ApiError(400, f"{param} is not a known field; remove it", param=param, code="unknown_field")
    if first.get("type") == "missing":
        return ApiError(400, f"{param or 'the body'} is missing", param=param, code="missing_field")
    cause = (first.get("ctx") or {}).get("error")
    if isinstance(cause, FieldError):
        return ApiError(400, str(cause), param=cause.param, code=cause.code)
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


def _is_field(part: str) -> bool:
    """Whether a part of a place is a field; the others name members of unions, such as ``str`` and ``list[int]``."""
    return part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool")


class FieldError(ValueError):
    """Raised by the checks of a request's fields: which one, why, and OpenAI's code."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code
