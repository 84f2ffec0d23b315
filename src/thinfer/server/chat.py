"""/v1/chat/completions: messages in, the assistant's answer out."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from thinfer.core.sampling import SamplingParams, TokenConstraint
from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.server.failures import ApiError, json_response
from thinfer.server.generate import Job, Output, answer, event_stream, head, timings
from thinfer.server.logprobs import chat_logprobs
from thinfer.server.loop import Prompt
from thinfer.server.protocol import ChatRequest, Message, NamedTool, Tool
from thinfer.server.replies import FAILURES, ChatCompletion
from thinfer.server.state import ServedModel, ServerState, state_of
from thinfer.server.tools import Call, CallParser, call_schema

router = APIRouter()
_RESERVED = ("self", "messages", "add_generation_prompt", "tools", "continue_final")


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}, **FAILURES}, tags=["generation"])
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    state = state_of(request)
    model = state.require_model(body.model)
    model.loop.check_room(body.n or 1)
    # Rendering, tokenizing and compiling a grammar take their time, and other requests' tokens must not wait for it.
    ids, params = await asyncio.to_thread(_prepare, model, body)
    continues = bool(body.continue_final_message)
    prompts = [Prompt(ids, each, continues) for each in params]
    job = Job(state, model, prompts, choices=len(params), streamed=bool(body.stream))
    chat = _Chat(state, model, body, job)
    if body.stream:
        await job.admitted()
        return event_stream(state, job, chat.events())
    return json_response(await answer(request, state, job, chat.whole()))


def _prepare(model: ServedModel, body: ChatRequest) -> tuple[list[int], list[SamplingParams]]:
    tools = _tools(body)
    ids = prompt_ids(
        model,
        body.messages,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final=bool(body.continue_final_message),
        variables=body.chat_template_kwargs or {},
        check=model.check_texts,
    )
    most = body.max_completion_tokens or body.max_tokens
    params = [
        body.to_sampling(
            model.llm.default_params,
            choice,
            max_tokens=most or model.room(len(ids)),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            allowed=_constraint(model, body, tools),
        )
        for choice in range(body.n or 1)
    ]
    return ids, params


def _tools(body: ChatRequest) -> list[Tool]:
    """The tools that may be called."""
    if not body.tools or body.tool_choice == "none":
        return []
    if isinstance(body.tool_choice, NamedTool):
        wanted = body.tool_choice.function.name
        return [tool for tool in body.tools if tool.function.name == wanted]
    return body.tools


def _constraint(model: ServedModel, body: ChatRequest, tools: list[Tool]) -> Callable[[], TokenConstraint] | None:
    wanted = body.response_format.schema_wanted if body.response_format is not None else None
    if tools and body.tool_choice not in (None, "auto"):
        return model.grammars.json_schema(call_schema(tools), "tools")
    if wanted is None:
        return None
    return model.grammars.json_schema(call_schema(tools, wanted) if tools else wanted, "response_format")


def prompt_ids(
    model: ServedModel,
    messages: list[Message],
    *,
    tools: list[Tool],
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    variables: Mapping[str, Any],
    check: Callable[[Sequence[str]], None] = lambda _: None,
) -> list[int]:
    """Token ids of a conversation, by the model's template; `check` may refuse its text before the tokens are made.

    Raises:
        ApiError: the model has no template, or one without tools; the template fails on these messages.
    """
    try:
        template = model.llm.chat_template
    except UnsupportedError as error:
        raise ApiError(
            400, "the model has no chat template; use /v1/completions, or start the server with --chat-template FILE"
        ) from error
    if tools and "tools" not in template.source:
        raise ApiError(400, "the chat template of this model knows no tools; send no tools", param="tools")
    clash = next((name for name in variables if name in _RESERVED), None)
    if clash is not None:
        raise ApiError(400, f"chat_template_kwargs: {clash} has a field of its own", param="chat_template_kwargs")
    try:
        pieces = template.render(
            [_message(message) for message in messages],
            add_generation_prompt,
            [tool.model_dump(exclude_none=True) for tool in tools] or None,
            continue_final=continue_final,
            **variables,
        )
    except CheckpointError as error:
        raise ApiError(400, f"the chat template fails on these messages: {_cause(error)}", param="messages") from error
    check(pieces)
    return template.encode_pieces(pieces)


def _cause(error: BaseException) -> str:
    # The message of the error itself names the file of the template.
    return str(error.__cause__ or "check their order and roles")[:300]


def _message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: plain text, and arguments of calls as objects."""
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    shown["content"] = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            shown[name] = getattr(message, name)
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                **({"id": call.id} if call.id is not None else {}),
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return shown


def _arguments(given: str | dict[str, Any]) -> dict[str, Any]:
    try:
        value = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "the arguments of a tool call must be the text of a JSON object", param="messages")
    return value


class _Chat:
    """Writes the answer of one request, whole or as events."""

    def __init__(self, state: ServerState, model: ServedModel, body: ChatRequest, job: Job) -> None:
        self._tokenizer = model.llm.tokenizer
        self._body = body
        self._job = job
        self._names = {tool.function.name for tool in _tools(body)}
        self._one_call = body.parallel_tool_calls is False
        self._name = state.name

    async def whole(self) -> dict[str, Any]:
        await self._job.admitted()
        outputs = await self._job.collect()
        choices = []
        for index, output in enumerate(outputs):
            said, calls = self._separated(output.text)
            message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
            if calls:
                message |= {"content": said or None, "tool_calls": [call.to_dict() for call in calls]}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": chat_logprobs(self._tokenizer, output.logprobs) if self._body.logprobs else None,
                    "finish_reason": _reason(output, bool(calls)),
                }
            )
        result = head("chat.completion", "chatcmpl", self._name) | {"choices": choices, "usage": self._job.usage()}
        if len(outputs) == 1 and outputs[0].timings is not None:
            result["timings"] = timings(outputs[0].timings)
        return result

    def _separated(self, text: str) -> tuple[str, list[Call]]:
        if not self._names:
            return text, []
        parser = CallParser(self._names)
        parts = parser.push(text) + parser.finish()
        calls = [part for part in parts if isinstance(part, Call)]
        said = "".join(part for part in parts if isinstance(part, str))
        return (said.strip() if calls else said), calls[:1] if self._one_call else calls

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        start = head("chat.completion.chunk", "chatcmpl", self._name)
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        running = options is not None and bool(options.continuous_usage_stats)
        choices = [_ChoiceEvents(index, self._names, self._one_call) for index in range(self._body.n or 1)]

        def event(choice: dict[str, Any] | None, **further: Any) -> dict[str, Any]:
            shown = start | {"choices": [] if choice is None else [choice]} | further
            if running or choice is None:
                shown["usage"] = self._job.usage()
            elif with_usage:
                shown["usage"] = None
            return shown

        async with aclosing(self._job.stream()) as pieces:
            async for index, output in pieces:
                logprobs = chat_logprobs(self._tokenizer, output.logprobs) if self._body.logprobs else None
                for choice in choices[index].of(output, logprobs):
                    ends = choice["finish_reason"] is not None and len(choices) == 1 and output.timings is not None
                    yield event(choice, **({"timings": timings(output.timings)} if ends and output.timings else {}))
        if with_usage:
            yield event(None)


class _ChoiceEvents:
    """The deltas of one choice: its role, then text and calls, then the reason of its end."""

    def __init__(self, index: int, names: set[str], one_call: bool) -> None:
        self._index = index
        self._parser = CallParser(names) if names else None
        self._one_call = one_call
        self._begun = False
        self._calls = 0

    def of(self, output: Output, logprobs: dict[str, Any] | None) -> list[dict[str, Any]]:
        """The deltas that an output gives."""
        deltas: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            deltas.append({"role": "assistant", "content": ""})
        parts: list[str | Call] = [output.text] if output.text else []
        if self._parser is not None:
            parts = self._parser.push(output.text)
            if output.finish_reason is not None:
                parts += self._parser.finish()
        for part in parts:
            deltas += [{"content": part}] if isinstance(part, str) else self._called(part)
        if logprobs is not None and not parts:
            deltas.append({"content": ""})
        choices = [self._choice(delta) for delta in deltas]
        if logprobs is not None:
            choices[-1]["logprobs"] = logprobs
        if output.finish_reason is not None:
            choices.append(self._choice({}, _reason(output, self._calls > 0)))
        return choices

    def _called(self, call: Call) -> list[dict[str, Any]]:
        if self._one_call and self._calls:
            return []
        place = self._calls
        self._calls += 1
        whole = call.to_dict()
        arguments = whole["function"]["arguments"]
        whole["function"]["arguments"] = ""
        return [
            {"tool_calls": [{"index": place, **whole}]},
            {"tool_calls": [{"index": place, "function": {"arguments": arguments}}]},
        ]

    def _choice(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _reason(output: Output, called: bool) -> str | None:
    return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason
