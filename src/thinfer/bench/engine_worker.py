"""The other end of a `Worker` for thinfer: ``python -m thinfer.bench.engine_worker``."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from thinfer.bench.worker import peak_rss_bytes, serve
from thinfer.data import evaluation_text
from thinfer.errors import ResourceError, ThinferError, UnsupportedError

if TYPE_CHECKING:
    from thinfer import LLM
    from thinfer.engine.runtime import Engine


def load(request: dict[str, Any]) -> tuple["LLM", dict[str, Any]]:
    """Open the model and tokenise ``text_tokens`` tokens of the shipped text, from its start, repeated if short."""
    from thinfer import LLM

    options = {name: value for name, value in request.items() if name not in ("do", "model", "text_tokens")}
    llm = LLM(request["model"], **options)
    if request["text_tokens"] > llm.engine.max_model_len:
        raise ResourceError(
            f"the longest test takes {request['text_tokens']} tokens and the context holds {llm.engine.max_model_len}; "
            f"lower -p or -n, or raise --max-model-len (the model allows {llm.config.max_position_embeddings})"
        )
    ids = llm.tokenizer.encode(evaluation_text(), add_special=False)
    facts = {
        "backend": backend(llm.engine),
        "threads": llm.engine.options.thread_count(),
        "notes": llm.engine.describe(),
        "tokens": list(islice(cycle(ids), request["text_tokens"])),
    }
    return llm, facts


def backend(engine: "Engine") -> str:
    """What computes: ``cpu-avx2``, ``reference``."""
    if engine.executor.name != "cpu":
        return engine.executor.name
    from thinfer import _core

    return f"cpu-{engine.options.isa or _core.default_isa()}"


@contextlib.contextmanager
def profiled(engine: "Engine", wanted: bool) -> Iterator[list[dict[str, Any]]]:
    """A list that is filled with time and bytes by kind of node while the block ran; UnsupportedError without them."""
    operations: list[dict[str, Any]] = []
    if not wanted:
        yield operations
        return
    if not isinstance(engine.executor, Profiled):
        raise UnsupportedError(f"executor {engine.executor.name} does not time its nodes; --per-op needs executor cpu")
    engine.executor.set_profiling(True)
    yield operations
    operations += engine.executor.operations()
    engine.executor.set_profiling(False)


@runtime_checkable
class Profiled(Protocol):
    """An executor that can time its nodes."""

    def set_profiling(self, on: bool) -> None:
        """Switch the timing of every node."""
        ...

    def operations(self) -> list[dict[str, Any]]:
        """Rows of kind, calls, seconds and bytes since the last reset."""
        ...


def prefill(engine: "Engine", tokens: Sequence[int]) -> dict[str, Any]:
    """One timed prompt in an empty context, its last logits computed."""
    from thinfer.engine.runtime import Work

    sequence = engine.new_sequence()
    engine.reset_usage()
    sparse = engine.selector is not None and engine.selector.prefill
    begin = time.perf_counter()
    engine.step([Work(sequence, tokens, logits="last", sparse=sparse)])
    seconds = time.perf_counter() - begin
    engine.free(sequence)
    return _reply(engine, seconds)


def decode(
    engine: "Engine",
    start: Sequence[int],
    tokens: Sequence[int],
    before: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """An untimed prompt, then one timed step for each token, each with its logits.

    ``before`` gets a step's number, from 0, before the step; its time counts.
    """
    from thinfer.engine.runtime import Work

    sequence = engine.new_sequence()
    engine.step([Work(sequence, start, logits="none")])
    engine.reset_usage()
    begin = time.perf_counter()
    for number, token in enumerate(tokens):
        before(number)
        engine.step([Work(sequence, [token], logits="last", sparse=True)])
    seconds = time.perf_counter() - begin
    engine.free(sequence)
    return _reply(engine, seconds)


def streams(llm: "LLM", prompts: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
    """Greedy streams through the scheduler as a server runs them, sampling and text included; their decode is timed."""
    from thinfer import SamplingParams

    scheduler = llm.scheduler()
    # Prompts that do not fit one step get their first tokens one after another, so some answers are a little longer.
    params = SamplingParams(temperature=0, max_tokens=2 * (steps + 1), ignore_eos=True)
    requests = [scheduler.add(prompt, params) for prompt in prompts]
    while not all(request.generated for request in requests):
        scheduler.step()
    starts = [len(request.generated) - 1 for request in requests]
    llm.engine.reset_usage()
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        scheduler.step()
        seconds.append(time.perf_counter() - begin)
    usage = llm.engine.usage()
    answers = [request.generated[start:] for start, request in zip(starts, requests, strict=True)]
    for request in requests:
        scheduler.cancel(request)
    if any(len(answer) != steps + 1 for answer in answers):
        raise ResourceError("the streams do not fit the KV pool together; lower --streams or -n")
    return {
        "step_seconds": seconds,
        "answers": answers,
        "density": usage.density,
        "bytes_per_token": usage.bytes_per_token,
        "agreement": None,
    }


def _reply(engine: "Engine", seconds: float) -> dict[str, Any]:
    usage = engine.usage()
    return {"seconds": seconds, "density": usage.density, "bytes_per_token": usage.bytes_per_token}


class Server:
    """Answers requests one by one; `load` comes first."""

    def __init__(self) -> None:
        self._llm: LLM | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to one request of `Worker`."""
        if request["do"] == "load":
            self._llm, facts = load(request)
            return facts
        if request["do"] == "rss":
            return {"rss_bytes": peak_rss_bytes()}
        if self._llm is None:
            raise ThinferError("load comes first")
        if request["do"] == "streams":
            return streams(self._llm, request["prompts"], request["steps"])
        engine = self._llm.engine
        with profiled(engine, request["operations"]) as operations:
            if request["do"] == "prefill":
                reply = prefill(engine, request["tokens"])
            else:
                reply = decode(engine, request["start"], request["tokens"])
        return reply | {"operations": operations}


if __name__ == "__main__":
    serve(Server().answer)
