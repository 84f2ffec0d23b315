"""LLM: prompts in, text out. The Python interface of thinfer."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from thinfer.core.config import ModelConfig
from thinfer.core.request import RequestOutput, StreamChunk
from thinfer.core.sampling import SamplingParams
from thinfer.engine.artifacts import find_artifact
from thinfer.engine.options import EngineOptions
from thinfer.engine.predictor_cost import without_costly
from thinfer.engine.request import Request
from thinfer.engine.runtime import Cancel, Engine, is_cancelled
from thinfer.engine.scheduler import Scheduler
from thinfer.errors import CheckpointError, UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from thinfer.text.stream import StopMatcher, StreamDecoder
from thinfer.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from thinfer.text.chat import ChatTemplate

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate.

    Thresholds and predictors in a thinfer folder, or beside the model, act at decode unless ``sparsity=False``; those
    made for other weights raise ArtifactError. Use it as a context manager, or call `close`, to give the memory back.
    Threads may share a model: their steps take turns, and none changes what another gets.

    Attributes:
        engine: steps, counters, `describe`.
        tokenizer: text to token ids and back.
        config: sizes of the model.
        default_params: the model's own sampling settings (see `sampling_defaults`).

    Example:
        >>> llm = LLM("model.gguf", threads=2)  # doctest: +SKIP
        >>> llm.generate("Once upon a time", SamplingParams(temperature=0.0)).text  # doctest: +SKIP
    """

    def __init__(self, model: str | Path, *, chat_template: str | None = None, **options: Any) -> None:
        """Open the model and pack its weights.

        Args:
            model: a .gguf file, a Hugging Face folder, a thinfer folder, or a hub id.
            chat_template: Jinja text used instead of the model's own template.
            options: fields of EngineOptions.
        """
        self.options = EngineOptions.from_keywords(options)
        if chat_template is not None and not isinstance(chat_template, str):
            raise UsageError(f"chat_template must be the text of a Jinja template, not {chat_template!r:.60}")
        self._checkpoint = open_checkpoint(model)
        try:
            loaded = load_model(self._checkpoint)
            found = find_artifact(self._checkpoint, self.options)
            neurons, left_out = without_costly(found.neurons, loaded, self.options)
            self.tokenizer = Tokenizer.from_checkpoint(self._checkpoint)
            self._chat_template = chat_template
            self.default_params = sampling_defaults(self._checkpoint.generation_config)
            self.engine = Engine(
                loaded, self.options, selector=found.selector, neurons=neurons, notes=(*found.notes, *left_out)
            )
        except BaseException:
            self._checkpoint.close()
            raise

    @property
    def config(self) -> ModelConfig:
        """Sizes and special tokens of the model."""
        return self.engine.config

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text: the configuration's and the tokenizer's."""
        ids = (*self.config.eos_token_ids, *self.tokenizer.eos_ids)
        return frozenset(token for token in ids if 0 <= token < self.config.vocab_size)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, with the model's begin token; ids stay as they are."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        given: Any = prompt
        if isinstance(given, bytes | bytearray):
            raise UsageError("a prompt is text or token ids, not bytes; decode them first")
        try:
            ids: list[Any] = list(given)
        except TypeError:
            ids = [None]
        if not all(isinstance(token, Integral) for token in ids):
            raise UsageError(
                f"a prompt is text or a sequence of token ids, not {type(prompt).__name__}: {prompt!r:.60}"
            )
        return [int(token) for token in ids]

    @overload
    def generate(
        self, prompts: Prompt, params: SamplingParams | None = None, *, cancel: Cancel | None = None
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cancel: Cancel | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cancel: Cancel | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Generate to the end; many prompts run together, each with the result it would have alone.

        A text is continued: what comes begins with a space where the model put one. After token ids, a chat's among
        them, the text stands by itself, without the space that SentencePiece puts before every text.

        Args:
            prompts: a text, token ids, or a list of either.
            params: for all prompts or one each; None: `default_params`.
            cancel: asked between steps; what is unfinished then ends with reason "cancelled".

        Returns:
            One output, or one a prompt in their order.

        Raises:
            ResourceError: a prompt does not fit the context; it is never cut.
        """
        several = isinstance(prompts, list | tuple) and not (prompts and isinstance(prompts[0], Integral))
        items: list[Any] = list(prompts) if several else [prompts]
        each = self._params_for(params, len(items))
        scheduler = self.scheduler()
        requests: list[Request] = []
        try:
            for prompt, settings in zip(items, each, strict=True):
                requests.append(scheduler.add(self.encode(prompt), settings, continues=_continues(prompt)))
            while scheduler.busy and not is_cancelled(cancel):
                for _, chunk in scheduler.step():
                    if chunk.error is not None:
                        raise chunk.error
        finally:
            for request in requests:
                scheduler.cancel(request)
        outputs = [_output(request) for request in requests]
        return outputs if several else outputs[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cancel: Cancel | None = None
    ) -> Iterator[StreamChunk]:
        """Generate one text piece by piece; the last chunk alone has a finish_reason and timings.

        A chunk's text may be empty while a character or a possible stop string is incomplete. Closing the iterator
        ends the request.
        """
        scheduler = self.scheduler()
        (settings,) = self._params_for(params, 1)
        request = scheduler.add(self.encode(prompt), settings, continues=_continues(prompt))
        return self._stream(scheduler, request, cancel)

    @cached_property
    def chat_template(self) -> "ChatTemplate":
        """The model's chat template, or the one that was given.

        Raises:
            UnsupportedError: the model has none; pass ``chat_template``.
        """
        # Templates bring jinja2, which plain generation does not need.
        from thinfer.text.chat import ChatTemplate

        return ChatTemplate.from_checkpoint(self._checkpoint, self.tokenizer, self._chat_template)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; control tokens come from the template alone.

        Raises:
            UnsupportedError: the model has no chat template; pass ``chat_template``.
        """
        return self.chat_template.encode(messages)

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, cancel: Cancel | None = None
    ) -> RequestOutput:
        """The assistant's answer to messages with "role" and "content"."""
        return self.generate(self.chat_prompt(messages), params, cancel=cancel)

    def scheduler(self) -> Scheduler:
        """A new scheduler on this model, for a loop that runs many requests; its requests end with text as here."""
        return Scheduler(self.engine, self._text_sink, self.eos_ids)

    def describe(self) -> list[str]:
        """Lines for start-up: what was chosen, what it costs, what was ignored."""
        return self.engine.describe()

    def close(self) -> None:
        """Give memory, threads and files back."""
        self.engine.close()
        self._checkpoint.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _text_sink(self, params: SamplingParams, continues: bool) -> "_TextSink":
        return _TextSink(StreamDecoder(self.tokenizer, continuation=continues), params.stop)

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.default_params] * count
        given: Sequence[object] = params if isinstance(params, list | tuple) else [params]
        wrong = [each for each in given if not isinstance(each, SamplingParams)]
        if wrong:
            raise UsageError(f"params must be SamplingParams, not {wrong[0]!r:.60}")
        if len(params) != count:
            raise UsageError(f"{len(params)} sampling parameters for {count} prompts; give one for all or one each")
        return params

    @staticmethod
    def _stream(scheduler: Scheduler, request: Request, cancel: Cancel | None) -> Iterator[StreamChunk]:
        try:
            while request.finish_reason is None:
                if is_cancelled(cancel):
                    yield scheduler.cancel(request)
                    return
                for _, chunk in scheduler.step():
                    if chunk.error is not None:
                        raise chunk.error
                    yield chunk
        finally:
            scheduler.cancel(request)


class _TextSink:
    """Whole characters first, stop strings second."""

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stop)

    def push(self, token: int) -> tuple[str, bool]:
        text = self._matcher.push(self._decoder.push(token))
        return text, self._matcher.stopped is not None

    def finish(self) -> str:
        text = self._matcher.push(self._decoder.finish())
        return text + self._matcher.finish()


def _continues(prompt: object) -> bool:
    return isinstance(prompt, str) and prompt != ""


def sampling_defaults(generation_config: Mapping[str, object]) -> SamplingParams:
    """The sampling settings of a generation_config.json; neutral values for all that it does not say.

    ``do_sample: false`` means greedy. Fields that SamplingParams does not know are left out.

    Example:
        >>> sampling_defaults({"temperature": 0.7, "top_p": 0.8}).top_p
        0.8
    """
    given: dict[str, Any] = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = generation_config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"generation_config.json: {name} is {value!r}, not a number; correct or remove it")
        given[name] = value
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams(**given)
    except UsageError as error:
        raise CheckpointError(f"generation_config.json: {error}; correct or remove it") from error


def _output(request: Request) -> RequestOutput:
    return RequestOutput(
        text=request.text,
        token_ids=tuple(request.generated),
        prompt_tokens=len(request.prompt),
        finish_reason=request.finish_reason or "cancelled",
        timings=request.timings,
        seed=request.sampler.seed,
        logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
        prompt_logprobs=tuple(request.prompt_logprobs) if request.params.prompt_logprobs is not None else None,
    )
