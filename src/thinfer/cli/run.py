"""``thinfer run``: text from a model, streamed, as JSON, or as a chat on a terminal."""

import json
import sys
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError

if TYPE_CHECKING:
    from thinfer import LLM, SamplingParams


class Output(StrEnum):
    """What `run` writes on stdout."""

    text = "text"
    json = "json"


@opt.with_engine_options()
def run(
    *,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL PROMPT", help="Instead of -m and -p.", show_default=False)
    ] = None,
    model: opt.Model = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue; - reads stdin.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message: apply the template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message; implies --chat.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Most new tokens. [default: 256; in a chat 1024]")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", "-s", min=0, help="Makes sampling repeatable.")] = None,
    temperature: Annotated[float | None, typer.Option("--temp", "--temperature", help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="0: off.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="1: off.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", help="0: off.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", "--repeat-penalty", help="1: off.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option("--presence-penalty", help="0: off.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option("--frequency-penalty", help="0: off.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the text.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="json: one object after the end.")] = Output.text,
    engine: dict[str, Any],
    chat_template: opt.ChatTemplate = None,
    quiet: opt.Quiet = False,
) -> None:
    """Continue a text, answer a message (--chat), or chat when there is no prompt and stdin is a terminal.

    Sampling: the flags given here, then the model's generation_config, then neutral values (temperature 1, no cuts).
    """
    reference, rest = opt.one_model(model, arguments or [], "run")
    prompt = _prompt(prompt, rest)
    if prompt is None and output is Output.json:
        raise UsageError("-o json needs a prompt: -p TEXT, or text on stdin")

    from thinfer import LLM, SamplingParams

    given: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
        "ignore_eos": ignore_eos or None,
        "max_tokens": max_tokens if max_tokens is not None else (1024 if prompt is None else 256),
    }
    given = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**given)  # a wrong value is refused here, not after a minute of loading

    llm = LLM(
        reference,
        chat_template=opt.template_text(chat_template),
        **engine,
    )
    if not quiet:
        opt.say(llm.describe())
    params = replace(llm.default_params, **given)
    if prompt is None:
        from thinfer.cli.chat import converse

        converse(llm, params, system)
        return
    request: str | list[int] = prompt
    if chat or system is not None:
        start = [{"role": "system", "content": system}] if system is not None else []
        request = llm.chat_prompt([*start, {"role": "user", "content": prompt}])
    if output is Output.json:
        _print_json(llm, request, params)
    else:
        _stream(llm, request, params, quiet)


def _prompt(option: str | None, rest: list[str]) -> str | None:
    """The prompt from -p, the positional argument or a stdin that is no terminal; None means chat."""
    if len(rest) > (1 if option is None else 0):
        raise UsageError(f"unexpected argument {rest[-1]!r}: one MODEL and one PROMPT; quote a prompt of several words")
    prompt = rest[0] if rest else option
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin: not UTF-8 at byte {error.start}; convert it first") from error
    if prompt is None and not sys.stdout.isatty():
        raise UsageError("a chat needs a terminal: give a prompt with -p TEXT")
    return prompt


def _stream(llm: "LLM", request: str | list[int], params: "SamplingParams", quiet: bool) -> None:
    timings = None
    for chunk in llm.stream(request, params):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        timings = chunk.timings or timings
    sys.stdout.write("\n")
    if timings is not None and not quiet:
        opt.say([describe_timings(timings.to_dict())])


def describe_timings(timings: dict[str, Any]) -> str:
    """One line of talk about the speed of a request."""
    return (
        f"prompt {timings['prompt_tokens']} tokens at {timings['prompt_tokens_per_second']:.1f} t/s, "
        f"decode {timings['decode_tokens']} tokens at {timings['decode_tokens_per_second']:.1f} t/s"
    )


def _print_json(llm: "LLM", request: str | list[int], params: "SamplingParams") -> None:
    result = llm.generate(request, params)
    row = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "timings": result.timings.to_dict(),
    }
    print(json.dumps(row, ensure_ascii=False))
