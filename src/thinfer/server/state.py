"""What a running server holds: its settings, and its model once that is loaded."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import Request

from thinfer.engine.llm import LLM
from thinfer.server.constrain import Grammars
from thinfer.server.failures import ApiError
from thinfer.server.live import LiveFeed
from thinfer.server.loop import EngineLoop
from thinfer.server.metrics import Metrics

# What clients get to read why their answer ends before its time.
LAST_WORDS_SECONDS = 5.0


class Stoppable(Protocol):
    """Work for one request that can be ended before its time."""

    def stop(self, why: ApiError) -> None:
        """End it; its client is told why."""
        ...


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server behaves.

    Attributes:
        names: what the model is called in requests and answers; the first is the one that answers carry.
        api_key: wanted as ``Authorization: Bearer``; None asks for none.
        max_waiting: most requests that wait for their first step; more are refused with 429.
        max_body_bytes: longest body of a request.
        request_seconds: longest time for one request, its wait included.
        body_seconds: longest time for the body of a request to arrive.
        ping_seconds: silence in a stream after which a comment is sent.
        cors_origins: origins whose pages may call this server; ("*",) is all.
        host_names: what the server may be called in the Host header, beside addresses and localhost; None: anything.
    """

    names: tuple[str, ...]
    api_key: str | None = None
    max_waiting: int = 128
    max_body_bytes: int = 4 << 20
    request_seconds: float = 600.0
    body_seconds: float = 30.0
    ping_seconds: float = 10.0
    cors_origins: tuple[str, ...] = ()
    host_names: tuple[str, ...] | None = None


class ServedModel:
    """A loaded model behind the engine thread.

    Attributes:
        llm: the model.
        loop: its engine thread.
        grammars: makes constraints for its vocabulary.
        live: what the page shows of its engine.
        created: Unix seconds of when it was ready.
    """

    def __init__(self, llm: LLM, loop: EngineLoop, created: int) -> None:
        self.llm = llm
        self.loop = loop
        self.grammars = Grammars(llm.tokenizer, llm.eos_ids, llm.config.vocab_size)
        self.live = LiveFeed(llm, loop)
        self.created = created
        self._longest_token = llm.tokenizer.longest_token

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self.llm.engine.max_model_len

    def room(self, prompt_tokens: int) -> int:
        """Most tokens of an answer to a prompt of so many."""
        layout = self.llm.engine.pool.layout
        return max(min(self.context, layout.num_blocks * layout.block_size) - prompt_tokens, 1)

    def check_texts(self, texts: Iterable[str]) -> None:
        """Refuse a prompt that is too long however it is cut into tokens, before the work of cutting it.

        Raises:
            ApiError: 400 that names both lengths.
        """
        size = sum(len(text.encode(errors="replace")) for text in texts)
        least = -(-size // self._longest_token)
        if least >= self.context:
            raise ApiError(
                400,
                f"the prompt has {size} bytes, which are at least {least} tokens, and the context {self.context}, "
                "which must also hold the answer; shorten the prompt or start the server with a larger --max-model-len",
                code="context_length_exceeded",
            )

    def check_ids(self, ids: Iterable[int], param: str) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            ApiError: 400 that names the field and the id.
        """
        vocab = self.llm.config.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ApiError(400, f"{param}: token {wrong} is outside the vocabulary of {vocab}", param=param)


@dataclass
class ServerState:
    """The server as its handlers see it.

    Attributes:
        settings: how it behaves.
        load: opens the model; called in a thread once the port is open.
        model: the model; None while it loads.
        metrics: the figures of `/metrics`.
        failed: what loading failed with.
        draining: whether the server ends once its requests have.
        jobs: what runs for requests.
        ready: called with the model once it is loaded.
        stop: called to end the server when loading failed.
    """

    settings: ServerSettings
    load: Callable[[], LLM]
    model: ServedModel | None = None
    metrics: Metrics = field(default_factory=Metrics)
    failed: Exception | None = None
    draining: bool = False
    jobs: set[Stoppable] = field(default_factory=set)
    ready: Callable[[LLM], None] = lambda _: None
    stop: Callable[[], None] = lambda: None

    def drain(self) -> None:
        """Take no more requests, and end the readers who would stay for ever."""
        self.draining = True
        if self.model is not None:
            self.model.live.close()

    def cut_off(self) -> None:
        """End what still runs, because the server does."""
        for job in list(self.jobs):
            job.stop(ApiError(503, "the server ended before the answer was complete", code="draining"))

    @property
    def name(self) -> str:
        """What answers call the model."""
        return self.settings.names[0]

    def require_model(self, name: str | None = None) -> ServedModel:
        """The model of a request.

        Raises:
            ApiError: 503 while it loads and while the server ends, 404 when the request names another.
        """
        if self.draining:
            raise ApiError(503, "the server is ending; try again later", code="draining", retry_after=10)
        if self.model is None:
            raise ApiError(503, "the model is being loaded; try again in a few seconds", code="loading", retry_after=5)
        if name is not None and name not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise ApiError(
                404, f"no model named {name!r:.200}; there is {known}", param="model", code="model_not_found"
            )
        return self.model


def state_of(request: Request) -> ServerState:
    """The server that a request came to."""
    state: ServerState = request.app.state.server
    return state
