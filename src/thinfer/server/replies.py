"""The answers of the API as its OpenAPI document shows them; handlers write plain objects of these shapes."""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """Every failure."""

    error: ErrorObject


class Usage(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class TimingsReply(BaseModel):
    """llama.cpp's timings, in milliseconds, with the wait in the queue."""

    prompt_n: int
    cache_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queue_ms: float


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    timings: TimingsReply | None = None


class AssistantMessage(BaseModel):
    """What the model said and which tools it called."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Answer):
    """Answer of /v1/chat/completions; a stream has chunks with `delta` in place of `message`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(BaseModel):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    """Answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(BaseModel):
    """Answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Answer of /tokenizer_info: what lm-eval asks of a server's tokenizer."""

    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None
    max_model_len: int


class Health(BaseModel):
    """Answer of /health."""

    status: Literal["ok"]


FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": text}
    for status, text in (
        (400, "Wrong or unsupported field, or a prompt longer than the context"),
        (401, "Missing or wrong API key"),
        (404, "No such model"),
        (408, "The body did not arrive in time"),
        (413, "The body is too large"),
        (429, "The queue is full; Retry-After says when to come back"),
        (500, "The server failed"),
        (503, "The model is being loaded, or the server ends"),
        (504, "The request took too long"),
    )
}
# Without it FastAPI would announce its own form of validation errors, which this API never sends.
FAILURES["default"] = {"model": Failure, "description": "Any other failure"}
