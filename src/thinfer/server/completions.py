"""/v1/completions: texts or token ids in, their continuations out; with `echo` the prompts' log-probabilities too."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from thinfer.core.sampling import SamplingParams
from thinfer.server.failures import json_response
from thinfer.server.generate import Job, Output, answer, event_stream, head, timings
from thinfer.server.logprobs import TextLogprobs
from thinfer.server.loop import Prompt
from thinfer.server.protocol import CompletionRequest
from thinfer.server.replies import FAILURES, Completion
from thinfer.server.state import ServedModel, ServerState, state_of

router = APIRouter()
_DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", responses={200: {"model": Completion}, **FAILURES}, tags=["generation"])
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue one or several prompts; with `stream` as server-sent events."""
    state = state_of(request)
    model = state.require_model(body.model)
    given = body.prompts()
    model.loop.check_room(len(given) * (body.n or 1))
    ids, params = await asyncio.to_thread(_prepare, model, body, given)
    texts = _Texts(state, model, body, given, ids)
    prompts = [
        Prompt(each, settings, continues=bool(item))
        for item, each in zip(given, ids, strict=True)
        for settings in params
    ]
    job = Job(
        state,
        model,
        prompts,
        choices=len(params),
        streamed=bool(body.stream),
        scores_only=body.max_tokens == 0,
    )
    if body.stream:
        await job.admitted()
        return event_stream(state, job, texts.events(job))
    return json_response(await answer(request, state, job, texts.whole(job)))


def _prepare(
    model: ServedModel, body: CompletionRequest, given: list[str | list[int]]
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Token ids of the prompts, and the settings of the choices of each."""
    special = body.add_special_tokens is not False
    ids = []
    for item in given:
        if isinstance(item, str):
            model.check_texts([item])
            ids.append(model.llm.tokenizer.encode(item, add_special=special, parse_special=True))
        else:
            model.check_ids(item, "prompt")
            ids.append(item)
    wanted = body.response_format.schema_wanted if body.response_format is not None else None
    allowed = model.grammars.json_schema(wanted, "response_format") if wanted is not None else None
    params = []
    for choice in range(body.n or 1):
        settings = body.to_sampling(
            model.llm.default_params,
            choice,
            max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1),
            logprobs=body.logprobs,
            allowed=allowed,
        )
        params.append(replace(settings, prompt_logprobs=body.logprobs if body.echo else None))
    return ids, params


class _Texts:
    """Writes the answer of one request, whole or as events."""

    def __init__(
        self,
        state: ServerState,
        model: ServedModel,
        body: CompletionRequest,
        given: list[str | list[int]],
        ids: list[list[int]],
    ) -> None:
        self._tokenizer = model.llm.tokenizer
        self._body = body
        self._name = state.name
        self._ids = [each for each in ids for _ in range(body.n or 1)]
        spelled = [item if isinstance(item, str) else self._tokenizer.decode(item) for item in given]
        self._prompts = [text for text in spelled for _ in range(body.n or 1)]
        # Nothing of the one token that must be generated is shown where none was asked for.
        self._none = body.max_tokens == 0
        self._begun: dict[int, TextLogprobs] = {}

    async def whole(self, job: Job) -> dict[str, Any]:
        await job.admitted()
        outputs = await job.collect()
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        result = head("text_completion", "cmpl", self._name) | {"choices": choices, "usage": job.usage()}
        if len(outputs) == 1 and outputs[0].timings is not None:
            result["timings"] = timings(outputs[0].timings)
        return result

    async def events(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        start = head("text_completion", "cmpl", self._name)
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        running = options is not None and bool(options.continuous_usage_stats)
        async with aclosing(job.stream()) as pieces:
            async for index, output in pieces:
                choice = self._choice(index, output)
                if not (choice["text"] or choice["logprobs"] or choice["finish_reason"]):
                    continue
                shown = start | {"choices": [choice]}
                if running:
                    shown["usage"] = job.usage()
                if output.timings is not None and len(self._ids) == 1:
                    shown["timings"] = timings(output.timings)
                yield shown
        if with_usage:
            yield start | {"choices": [], "usage": job.usage()}

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        """A choice, or a piece of one; the first piece of a choice holds the echo."""
        body = self._body
        text, ids, entries = output.text, output.token_ids, output.logprobs
        if self._none:
            text, ids, entries = "", (), ()
        first = index not in self._begun
        prompt = self._prompts[index] if body.echo else ""
        logprobs = self._begun.setdefault(index, TextLogprobs(self._tokenizer, prompt))
        values = None
        if body.logprobs is not None:
            before = self._ids[index] if body.echo and first else []
            scores = output.prompt_logprobs or () if before else ()
            values = logprobs.add([*before, *ids], [*scores, *entries])
        return {
            "index": index,
            "text": prompt + text if first else text,
            "logprobs": values,
            "finish_reason": output.finish_reason,
        }
