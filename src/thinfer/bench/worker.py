"""A worker process of a benchmark: one engine, asked over its stdin, answering on its stdout, one JSON line each."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from thinfer.errors import PeerError, ThinferError


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed round of one engine.

    Attributes:
        seconds: wall-clock time of the round, without tokenisation and sampling.
        density: fraction of the block linears' weights that were multiplied.
        bytes_per_token: weight bytes read for one token; None when the engine does not count them.
        operations: time and bytes by kind of node, when asked for.
    """

    seconds: float
    density: float
    bytes_per_token: float | None
    operations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class StreamsSample:
    """One timed round of several streams, a token of each in every step.

    Attributes:
        step_seconds: wall-clock time of every step.
        answers: token ids of every stream: the one that followed its prompt, then one a step.
        density: fraction of the block linears' weights that were multiplied.
        bytes_per_token: weight bytes read for one token; None when the engine does not count them.
        agreement: fraction of the answers' tokens that the engine finds the likeliest; None where it was not asked.
    """

    step_seconds: Sequence[float]
    answers: Sequence[Sequence[int]]
    density: float
    bytes_per_token: float | None
    agreement: float | None = None


class Worker:
    """One engine in its own process, so that memory and threads of several engines stay apart.

    The process answers ``{"do": ...}`` lines: ``load`` (with the options) gives facts about the model, ``prefill``,
    ``decode`` and ``streams`` one timed round, ``rss`` the peak resident bytes of that process (VmHWM, its mapped files
    included).

    Example:
        >>> with Worker.ours() as worker:  # doctest: +SKIP
        ...     worker.load({"model": "model.gguf", "threads": 2})
        ...     worker.prefill([1, 2, 3]).seconds
    """

    def __init__(self, command: Sequence[str], name: str) -> None:
        self.name = name
        # A file and not a pipe: an engine that talks a lot must not stop because nobody reads.
        self._talk = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._talk, text=True
            )
        except OSError as error:
            self._talk.close()
            raise PeerError(f"{name}: cannot start {command[0]}: {error.strerror}") from error

    @classmethod
    def ours(cls) -> "Worker":
        """A worker that runs thinfer's engine."""
        return cls([sys.executable, "-m", "thinfer.bench.engine_worker"], "thinfer")

    def load(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Open the model; returns facts about it, and raises what the engine raised."""
        return self._ask({"do": "load", **options})

    def prefill(self, tokens: Sequence[int], *, operations: bool = False) -> Sample:
        """Run the tokens as one prompt in an empty context."""
        return _sample(self._ask({"do": "prefill", "tokens": list(tokens), "operations": operations}))

    def decode(self, start: Sequence[int], tokens: Sequence[int], *, operations: bool = False) -> Sample:
        """Run ``start`` as a prompt, untimed, then each of the tokens in a step of its own."""
        request = {"do": "decode", "start": list(start), "tokens": list(tokens), "operations": operations}
        return _sample(self._ask(request))

    def streams(
        self,
        prompts: Sequence[Sequence[int]],
        steps: int,
        *,
        answers: Sequence[Sequence[int]] | None = None,
        check: bool = False,
    ) -> StreamsSample:
        """Run the prompts, untimed, then so many steps of one token of each.

        Args:
            prompts: token ids of every stream.
            steps: timed steps.
            answers: the tokens to run, as another engine chose them; None: the engine chooses, greedily.
            check: also say how many of these tokens are the engine's own choice; its times then mean nothing.
        """
        request = {"do": "streams", "prompts": prompts, "steps": steps, "answers": answers, "check": check}
        answer = self._ask(request)
        fields = ("step_seconds", "answers", "density", "bytes_per_token", "agreement")
        return StreamsSample(*(answer[name] for name in fields))

    def prune(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """One pruning run, timed, by a process of `thinfer.bench.pruning_worker`; its row."""
        return self._ask({"do": "prune", **settings})

    def rss_bytes(self) -> int:
        """Peak resident bytes of the process so far."""
        return int(self._ask({"do": "rss"})["rss_bytes"])

    def close(self) -> None:
        """End the process; nothing happens when it has ended already."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._talk.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        # Both are pipes: Popen was asked for them.
        requests, answers = cast("IO[str]", self._process.stdin), cast("IO[str]", self._process.stdout)
        try:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise PeerError(f"{self.name}: the process ended with {code} at {request['do']!r}{self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"{self.name}: unexpected answer {line.strip()[:200]}")
        if "error" in answer:
            raise _error(answer, self.name)
        return answer

    def _last_words(self) -> str:
        self._talk.seek(0)
        lines = [line for line in self._talk.read().splitlines() if line.strip()]
        return "".join(f"\n  {line}" for line in lines[-8:])


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be the process of a `Worker`: answer its requests until stdin ends."""
    # Whatever prints on stdout must not get between the answers: they have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            try:
                reply = answer(json.loads(line))
            except ThinferError as error:
                reply = {"error": str(error), "exit_code": error.exit_code}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


def peak_rss_bytes() -> int:
    """Peak resident bytes of this process: VmHWM, which unlike ru_maxrss starts anew with the program."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _sample(answer: Mapping[str, Any]) -> Sample:
    return Sample(
        float(answer["seconds"]),
        float(answer["density"]),
        answer["bytes_per_token"],
        tuple(answer.get("operations", ())),
    )


def _error(answer: Mapping[str, Any], name: str) -> ThinferError:
    """The exception that the worker reported: ours keep their exit code, a peer's become PeerError."""
    if "exit_code" not in answer:
        return PeerError(f"{name}: {answer['error']}")
    error = ThinferError(str(answer["error"]))
    error.exit_code = int(answer["exit_code"])
    return error
