"""A crowd of good, bad, slow and vanishing clients for one server, and what must hold of it meanwhile and after."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

KEY = "soak-key"
_COMPLETIONS = "/v1/completions"
_REFUSED_ON_THE_WAY = (429, 503)


@dataclass(frozen=True)
class Question:
    """A request and the text that the model gives for it alone."""

    body: dict
    answer: str


@dataclass
class ServerProcess:
    """A server in a process of its own, so that its memory is its own."""

    process: subprocess.Popen
    url: str

    @property
    def rss_bytes(self) -> int:
        """Resident bytes now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(re.search(r"^VmRSS:\s+(\d+)", status, re.M).group(1)) * 1024

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)

    def metric(self, name: str) -> float:
        text = self.get("/metrics").text
        return float(re.search(rf"^{name} (\S+)$", text, re.M).group(1))

    def until_ready(self, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if self.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < end, "the server did not become ready"
            time.sleep(0.05)

    def end(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def server_process(model: str, options: Sequence[str]) -> Iterator[ServerProcess]:
    """`thinfer serve` on a free port; killed when the block is left with it still running."""
    command = [sys.executable, "-m", "thinfer", "serve", model, "--port", "0", "-q", *options]
    environment = {**os.environ, "THINFER_API_KEY": KEY}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + process.stderr.read()
        yield ServerProcess(process, found.group())
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


@dataclass
class Crowd:
    """Clients that do one thing after another, each chosen at random, until the time is over.

    Attributes:
        server: the server.
        questions: what is asked, with the right answers.
        context: tokens of the server's context.
        clients: how many there are at once; more than the server runs and lets wait.
        seed: of what they do.
        done: how often each thing was done, and with what status.
        wrong: what must not have happened.
    """

    server: ServerProcess
    questions: Sequence[Question]
    context: int
    clients: int
    seed: int = 0
    done: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> list[int]:
        """Go on for so long; returns the server's resident bytes, taken ten times a second."""
        return asyncio.run(self._run(seconds))

    async def _run(self, seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        async with httpx.AsyncClient(
            base_url=self.server.url, headers=headers, timeout=60 + seconds, limits=limits
        ) as http:
            # All at once first: together they are more than the KV cache holds.
            await asyncio.gather(*(self._ask(http, question) for question in self.questions))
            clients = [asyncio.create_task(self._client(http, number, end)) for number in range(self.clients)]
            sizes = []
            while time.monotonic() < end:
                sizes.append(self.server.rss_bytes)
                await asyncio.sleep(0.1)
            await asyncio.gather(*clients)
        return sizes

    async def _client(self, http: httpx.AsyncClient, number: int, end: float) -> None:
        numbers = random.Random(self.seed * 1000 + number)
        things = {
            self._asks: 8,
            self._streams: 8,
            self._leaves_a_stream: 4,
            self._gives_up: 3,
            self._reads_slowly: 1,
            self._sends_nonsense: 2,
            self._asks_too_much: 2,
            self._has_a_wrong_key: 1,
            self._sends_half_a_request: 1,
            self._looks_around: 1,
        }
        while time.monotonic() < end:
            (thing,) = numbers.choices(list(things), list(things.values()))
            try:
                await thing(http, numbers)
            except httpx.HTTPError as error:
                self.wrong.append(f"{thing.__name__}: {type(error).__name__}: {error}")

    def _count(self, name: str, response: httpx.Response, *expected: int) -> bool:
        """Whether the status is the first expected one; any other must be expected too, and in OpenAI's form."""
        status = response.status_code
        self.done[f"{name} {status}"] += 1
        if status not in (*expected, *_REFUSED_ON_THE_WAY):
            self.wrong.append(f"{name}: {status} {response.text[:200]}")
        elif status >= 400 and set(response.json()["error"]) != {"message", "type", "param", "code"}:
            self.wrong.append(f"{name}: {status} in another form: {response.text[:200]}")
        elif status == 429 and int(response.headers["retry-after"]) < 1:
            self.wrong.append(f"{name}: 429 without a time")
        return status == expected[0]

    async def _asks(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        await self._ask(http, numbers.choice(self.questions))

    async def _ask(self, http: httpx.AsyncClient, question: Question) -> None:
        response = await http.post(_COMPLETIONS, json=question.body)
        if self._count("asks", response, 200):
            self._compare(question, response.json()["choices"][0]["text"])

    async def _streams(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        question = numbers.choice(self.questions)
        async with http.stream("POST", _COMPLETIONS, json=question.body | {"stream": True}) as response:
            if response.status_code != 200:
                await response.aread()
                self._count("streams", response, 200)
                return
            self.done["streams 200"] += 1
            text, last = "", ""
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    last = line.removeprefix("data: ")
                    if last != "[DONE]":
                        text += json.loads(last)["choices"][0]["text"]
            if last != "[DONE]":
                self.wrong.append("a stream ended without [DONE]")
            self._compare(question, text)

    def _compare(self, question: Question, text: str) -> None:
        if text != question.answer:
            self.wrong.append(f"{question.body}: {text!r} instead of {question.answer!r}")

    async def _leaves_a_stream(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        body = self._long(numbers) | {"stream": True}
        async with http.stream("POST", _COMPLETIONS, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._count("leaves", response, 200)
                return
            self.done["leaves 200"] += 1
            lines = response.aiter_lines()
            for _ in range(numbers.randrange(20)):
                if await anext(lines, None) is None:
                    return

    async def _gives_up(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        try:
            response = await http.post(_COMPLETIONS, json=self._long(numbers), timeout=numbers.uniform(0.01, 0.3))
        except httpx.TimeoutException:
            self.done["gives up"] += 1
        else:
            self._count("gives up", response, 200)

    async def _reads_slowly(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        """Ask for much and read little of it, in small pieces; then go."""
        reader, writer = await self._raw(self._long(numbers) | {"stream": True, "logprobs": 5})
        try:
            for _ in range(10):
                await asyncio.wait_for(reader.read(64), 60)
                await asyncio.sleep(0.1)
            self.done["reads slowly"] += 1
        finally:
            writer.close()

    async def _sends_nonsense(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        bodies = (b"", b"{", b"[1,2]", b'{"prompt": 5}', b'{"prompt": "x", "temperature": -1}', numbers.randbytes(50))
        headers = {"Content-Type": "application/json"}
        path = numbers.choice((_COMPLETIONS, "/v1/chat/completions", "/tokenize"))
        self._count("nonsense", await http.post(path, content=numbers.choice(bodies), headers=headers), 400)

    async def _asks_too_much(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        if numbers.random() < 0.5:
            response = await http.post(_COMPLETIONS, json={"prompt": [5] * (self.context + numbers.randrange(50))})
            self._count("too long", response, 400)
        else:
            # The answer may come before all of the body is sent; then the connection ends.
            try:
                response = await http.post(_COMPLETIONS, json={"prompt": "x" * (2 << 20)})
            except httpx.TransportError:
                self.done["too large, cut off"] += 1
            else:
                self._count("too large", response, 413)

    async def _has_a_wrong_key(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        headers = {"Authorization": f"Bearer {numbers.choice(('x', KEY[:-1], KEY + 'x'))}"}
        self._count("wrong key", await http.post(_COMPLETIONS, json={"prompt": "x"}, headers=headers), 401)

    async def _sends_half_a_request(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        _, writer = await self._raw({"prompt": "x" * 200}, part=numbers.random())
        await asyncio.sleep(numbers.uniform(0, 0.2))
        writer.close()
        self.done["half a request"] += 1

    async def _looks_around(self, http: httpx.AsyncClient, numbers: random.Random) -> None:
        path, status = numbers.choice((("/health", 200), ("/metrics", 200), ("/v1/models", 200), ("/nothing", 404)))
        self._count(path, await http.get(path), status)

    def _long(self, numbers: random.Random) -> dict:
        room = self.context // 2
        prompt = [numbers.randrange(200) for _ in range(numbers.randrange(1, room))]
        return {"prompt": prompt, "max_tokens": numbers.randrange(room // 2, room), "ignore_eos": True}

    async def _raw(self, body: dict, part: float = 1.0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which a part of a request was sent."""
        place = urlsplit(self.server.url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 12)
        content = json.dumps(body).encode()
        head = (
            f"POST {_COMPLETIONS} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        request = head.encode() + content
        writer.write(request[: round(part * len(request))])
        await writer.drain()
        return reader, writer


def growth(sizes: Sequence[int]) -> float:
    """How much larger the last quarter's median is than the second quarter's; the first one is for warming up."""
    quarter = len(sizes) // 4
    before, after = (sorted(part)[quarter // 2] for part in (sizes[quarter : 2 * quarter], sizes[-quarter:]))
    return after / before - 1
