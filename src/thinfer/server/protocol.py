"""The requests of the API: OpenAI's fields and the extensions of vLLM that thinfer has, each checked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from thinfer.core.sampling import SamplingParams
from thinfer.server.failures import ApiError, FieldError

MOST_LOGPROBS = 20
MOST_CHOICES = 128
_MOST_TOKENS = 1 << 30

# Fields of OpenAI, vLLM and llama.cpp that would change the answer and are not there: values that change nothing are
# accepted, anything else is refused by name rather than ignored.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "function_call": (),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "media_io_kwargs": ({},),
    "min_tokens_to_keep": (1,),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "n_predict": (),
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "return_tokens_as_token_ids": (False,),
    "samplers": ([],),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "top_n_sigma": (-1, 0),
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "xtc_probability": (0,),
}
# These only name the caller or help caches elsewhere: an answer is the same with and without them.
_WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "user")


# A list of a million wrong items must not become a million complaints.
_Ids = Annotated[list[int], Field(fail_fast=True)]
_MOST_BIASES = 4096


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    """What a stream says beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Nothing is padded either way.")


class Sampling(_Strict):
    """Fields that both endpoints have."""

    model: str | None = Field(None, description="The served model; may be left out.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = Field(None, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST_TOKENS)] | None = Field(None, description="0 or -1: off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id to a number between -100 and 100.")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        """Take out the fields without effect and refuse those that are known and not supported."""
        if not isinstance(given, dict):
            return given
        biases = given.get("logit_bias")
        if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
            raise FieldError("logit_bias", f"logit_bias holds {len(biases)} tokens; at most {_MOST_BIASES} are taken")
        kept = {}
        for name, value in given.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in _UNSUPPORTED:
                if value is not None and not any(value == neutral for neutral in _UNSUPPORTED[name]):
                    raise FieldError(name, f"{name} is not supported; remove it", "unsupported_field")
            elif name not in _WITHOUT_EFFECT:
                kept[name] = value
        return kept

    def to_sampling(self, defaults: SamplingParams, choice: int, **further: Any) -> SamplingParams:
        """The settings of one choice: the request's, then the model's own, then neutral ones.

        Args:
            defaults: the model's own.
            choice: index among ``n``; each has a seed of its own where the request has one.
            further: fields of SamplingParams that the endpoint decides.
        """
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
                *("ignore_eos", "min_tokens"),
            )
        }
        given["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        given["seed"] = None if self.seed is None else (self.seed + choice) % 2**64
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        given["stop_token_ids"] = tuple(self.stop_token_ids or ())
        given["logit_bias"] = _biases(self.logit_bias or {})
        base = {
            name: getattr(defaults, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        }
        chosen = {name: value for name, value in (given | further).items() if value is not None}
        return SamplingParams(**(base | chosen))


class TextPart(_Strict):
    """One part of a message; images and audio are not supported."""

    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    """A call that the assistant made earlier."""

    name: str
    arguments: str | dict[str, Any] = Field("{}", description="A JSON object, as text or as it is; empty: none.")
    # What clients add to calls that they read; nothing of it reaches the model.
    parsed_arguments: Any = None


class ToolCall(_Strict):
    """A call with the id that its result refers to."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    # Streams number calls, and clients send back what they put together from them.
    index: int | None = None


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # What answers carry, or clients add to them, and send back; nothing of it reaches the model.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None


class Function(_Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = Field(None, description="Arguments always follow the schema where a call is required.")


class Tool(_Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class FunctionName(_Strict):
    """Names a function."""

    name: str


class NamedTool(_Strict):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(_Strict):
    """A schema with the name it goes by."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """The form of the answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("response_format", "response_format: json_schema goes with type json_schema, and only so")
        return self

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must follow."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatRequest(Sampling):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MOST_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=256)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise FieldError("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise FieldError("add_generation_prompt", "continue_final_message excludes add_generation_prompt")
            if self.messages[-1].role != "assistant":
                raise FieldError("messages", "continue_final_message needs a last message of the assistant")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise FieldError("tool_choice", "tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in names:
                raise FieldError("tool_choice", f"tool_choice names a function that is not among {', '.join(names)}")
        return self


class CompletionRequest(Sampling):
    """Body of /v1/completions."""

    prompt: str | Annotated[list[str], Field(fail_fast=True)] | _Ids | Annotated[list[_Ids], Field(fail_fast=True)] = (
        Field(description="Texts, or token ids of one or several.")
    )
    max_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None = Field(None, description="Default: 16.")
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = Field(None, description="Whether texts get the model's begin token.")
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _agree(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "max_tokens: 0 makes sense with echo alone; ask for at least 1")
        if self.echo and self.response_format is not None and self.response_format.type != "text":
            raise FieldError("echo", "echo and response_format exclude each other")
        if not self.prompt and not isinstance(self.prompt, str):
            raise FieldError("prompt", "prompt: an empty list; give at least one prompt or token")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]


class TokenizeRequest(_Strict):
    """Body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give one of prompt and messages")
        return self


class DetokenizeRequest(_Strict):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in given):
        raise ApiError(400, 'logit_bias: its keys must be token ids, such as "1234"', param="logit_bias")
    return {int(key): value for key, value in given.items()}
