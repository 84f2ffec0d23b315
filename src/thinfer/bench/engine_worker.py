"""The other end of a `Worker` for thinfer: ``python -m thinfer.bench.engine_worker``."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from thinfer.bench.worker import peak_rss_bytes
from thinfer.data import evaluation_text
from thinfer.errors import ThinferError

if TYPE_CHECKING:
    from thinfer import LLM
    from thinfer.engine.runtime import Engine


def load(request: dict[str, Any]) -> tuple["LLM", dict[str, Any]]:
    """Open the model and tokenise ``text_tokens`` tokens of the shipped text, from its start, repeated if short."""
    from thinfer import LLM

    options = {name: value for name, value in request.items() if name not in ("do", "model", "text_tokens")}
    llm = LLM(request["model"], **options)
    ids = llm.tokenizer.encode(evaluation_text(), add_special=False)
    facts = {
        "backend": llm.engine.executor.name,
        "threads": llm.engine.options.thread_count(),
        "notes": llm.engine.describe(),
        "tokens": list(islice(cycle(ids), request["text_tokens"])),
    }
    return llm, facts


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


def decode(engine: "Engine", start: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
    """An untimed prompt, then one timed step for each token, each with its logits."""
    from thinfer.engine.runtime import Work

    sequence = engine.new_sequence()
    engine.step([Work(sequence, start, logits="none")])
    engine.reset_usage()
    begin = time.perf_counter()
    for token in tokens:
        engine.step([Work(sequence, [token], logits="last", sparse=True)])
    seconds = time.perf_counter() - begin
    engine.free(sequence)
    return _reply(engine, seconds)


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
        engine = self._llm.engine
        if request["do"] == "prefill":
            return prefill(engine, request["tokens"])
        return decode(engine, request["start"], request["tokens"])


def main() -> None:
    """Answer until stdin ends."""
    # Whatever prints on stdout must not get between the answers: they have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    server = Server()
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            try:
                reply = server.answer(json.loads(line))
            except ThinferError as error:
                reply = {"error": str(error), "exit_code": error.exit_code}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    main()
