"""The client of a load test: sends planned requests to an OpenAI-compatible server and times what comes back."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from thinfer.bench.workload import PlannedRequest
from thinfer.errors import ThinferError

_CONNECT_SECONDS = 10.0


class ServerFailure(ThinferError):
    """The server of a load test cannot be reached, or answers with an error."""


@dataclass(slots=True)
class Timed:
    """One request as its client saw it, in seconds.

    Attributes:
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens of the answer, as the server counts them.
        cached_tokens: tokens of the prompt that the server did not compute.
        started: when it was sent, from the beginning of the test.
        first: from there to the first piece of the answer.
        between: from each piece to the next.
        whole: from sending to the end.
        error: why it failed; None when it succeeded.
    """

    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    started: float = 0.0
    first: float = 0.0
    between: list[float] = field(default_factory=list)
    whole: float = 0.0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Mean seconds of a token after the first (TPOT); None where there is no second one."""
        return (self.whole - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says of the model that it serves."""

    name: str
    context: int | None


class LoadClient:
    """Talks to one server; use it as an async context manager.

    Args:
        url: of the server, with or without ``/v1``.
        model: which of its models; None: the first.
        api_key: sent as ``Authorization: Bearer``.
        timeout: seconds for one request.

    Example:
        >>> async with LoadClient("http://127.0.0.1:8737") as client:  # doctest: +SKIP
        ...     await client.open()
        ...     timed = await client.run(planned)
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No limit on connections: waiting for one would look like a slow server.
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> "LoadClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def open(self) -> ServedModel:
        """Find the model; ServerFailure where the server is not there or does not have it."""
        listed = (await self._json("GET", "/v1/models")).get("data") or []
        found = next((entry for entry in listed if self._model in (None, entry.get("id"))), None)
        if found is None:
            names = ", ".join(str(entry.get("id")) for entry in listed) or "none"
            raise ServerFailure(f"the server has no model {self._model!r}; it has {names}")
        self._model = str(found["id"])
        return ServedModel(self._model, found.get("max_model_len"))

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, by the server's own tokenizer."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in (await self._json("POST", "/tokenize", body))["tokens"]]

    async def run(
        self,
        planned: Sequence[PlannedRequest],
        *,
        max_concurrency: int | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> list[Timed]:
        """Send every request at its time, or as soon as a place is free; returns them in the order of the plan.

        Args:
            planned: from `plan`.
            max_concurrency: most requests under way; one that waits for a place is timed from when it gets it.
            progress: told how many have ended.
        """
        begin = time.perf_counter()
        places = asyncio.Semaphore(max_concurrency or max(len(planned), 1))
        done = 0

        async def one(request: PlannedRequest) -> Timed:
            nonlocal done
            await asyncio.sleep(max(begin + request.start - time.perf_counter(), 0))
            async with places:
                timed = await self.send(request, since=begin)
            done += 1
            progress(f"{done} of {len(planned)} requests")
            return timed

        return list(await asyncio.gather(*(one(request) for request in planned)))

    async def send(self, request: PlannedRequest, *, since: float | None = None) -> Timed:
        """One streamed completion of exactly the planned number of tokens; what fails is in its ``error``."""
        timed = Timed(len(request.prompt))
        begin = time.perf_counter()
        timed.started = begin - (begin if since is None else since)
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    timed.error = _reason(response.status_code, await response.aread())
                else:
                    await self._read(events(response), timed, begin)
        except httpx.HTTPError as error:
            timed.error = f"{type(error).__name__}: {error}"
        except (ValueError, TypeError, LookupError, AttributeError):
            timed.error = "the answer is no stream of OpenAI's form"
        timed.whole = time.perf_counter() - begin
        return timed

    @staticmethod
    async def _read(answer: AsyncIterator[Mapping[str, Any]], timed: Timed, begin: float) -> None:
        last = begin
        ended = False
        async for item in answer:
            now = time.perf_counter()
            if "error" in item:
                timed.error = str(item["error"])
                return
            if item.get("choices"):
                if last == begin:
                    timed.first = now - begin
                else:
                    timed.between.append(now - last)
                last = now
                ended = ended or item["choices"][0].get("finish_reason") is not None
            if item.get("usage"):
                timed.output_tokens = int(item["usage"]["completion_tokens"])
                details = item["usage"].get("prompt_tokens_details") or {}
                timed.cached_tokens = int(details.get("cached_tokens") or 0)
        if not ended:
            timed.error = "the answer broke off"

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerFailure(
                f"{self._http.base_url}: {type(error).__name__}: {error}; is `thinfer serve` running there?"
            ) from error
        if response.status_code != 200:
            raise ServerFailure(f"{method} {path}: {_reason(response.status_code, response.content)}")
        try:
            answer = response.json()
        except ValueError as error:
            raise ServerFailure(f"{method} {path}: the answer is no JSON") from error
        if not isinstance(answer, dict):
            raise ServerFailure(f"{method} {path}: the answer is no JSON object")
        return answer


async def events(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to ``[DONE]``; comments are left out."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def _reason(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"HTTP {status}: {message}"
