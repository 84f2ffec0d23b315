"""``thinfer eval``: how good a model is on a text."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError

if TYPE_CHECKING:
    from thinfer import LLM

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Measure quality.")


class Output(StrEnum):
    """Format of the result on stdout."""

    text = "text"
    json = "json"


@app.callback()
def evaluate() -> None:
    """Measure quality."""


@app.command("perplexity")
@opt.with_engine_options(without=("max_model_len",))
def perplexity(
    *,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Instead of -m.")] = None,
    model: opt.Model = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="UTF-8 text. [default: an excerpt that ships with thinfer]")
    ] = None,
    ctx: Annotated[int, typer.Option("--ctx", "-c", min=2, help="Tokens of a window.")] = 1024,
    windows: Annotated[int | None, typer.Option("--windows", min=1, help="How many windows. [default: all]")] = None,
    stride: Annotated[int, typer.Option("--stride", min=1, help="Take every K-th window.")] = 1,
    kl_against: Annotated[
        str | None, typer.Option("--kl-against", metavar="MODEL2", help="Compare every prediction with this model's.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Let the sparsity act as it does at decode.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format on stdout.")] = Output.text,
    engine: dict[str, Any],
    quiet: opt.Quiet = False,
) -> None:
    r"""Perplexity over windows in a row from the start of the text, each in an empty context.

    Every token but the first of a window is scored. BOS is put before each window if the model's metadata says so.
    A file's \r\n is read as \n. With --kl-against: kl_mean and kl_p99 in nats of MODEL2's predictions relative to
    these, and how often both have the same best token.
    """
    reference, rest = opt.one_model(model, arguments or [], "eval perplexity")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; the text is given with -f FILE")
    options = engine | {"max_model_len": ctx}
    from thinfer import LLM
    from thinfer.calibration.text import cut_windows, read_text
    from thinfer.data import evaluation_text
    from thinfer.evals.perplexity import perplexity as measure

    text = read_text(str(file)) if file is not None else evaluation_text()
    llm = LLM(reference, **options)
    if not quiet:
        opt.say(llm.describe())
    ids = llm.tokenizer.encode(text, add_special=False)
    cut = cut_windows(ids, ctx, windows, stride)
    other = _other(kl_against, llm, ids, text, options) if kl_against is not None else None
    with opt.status() as progress:
        result = measure(
            llm.engine,
            cut,
            bos_id=llm.tokenizer.bos_id if llm.tokenizer.adds_bos else None,
            decode=decode,
            reference=other.engine if other is not None else None,
            progress=progress,
        )
    sys.stdout.write((json.dumps(result.to_dict()) if output is Output.json else _describe(result.to_dict())) + "\n")


def _other(reference: str, llm: "LLM", ids: list[int], text: str, options: dict[str, Any]) -> "LLM":
    """The model to compare with; its tokenizer must give the same ids for the text."""
    from thinfer import LLM

    other = LLM(reference, **options)
    if other.config.vocab_size != llm.config.vocab_size or other.tokenizer.encode(text, add_special=False) != ids:
        raise UsageError(
            f"--kl-against {reference}: its tokenizer gives other ids for this text; compare like with like"
        )
    return other


def _describe(result: dict[str, Any]) -> str:
    lines = [
        f"ppl {result['ppl']:.4f} ± {result['ppl_stderr']:.4f}  ({result['tokens']} tokens, {result['windows']} "
        f"windows of {result['ctx']}, {'with' if result['bos'] else 'no'} BOS)"
    ]
    if "kl_mean" in result:
        lines.append(
            f"KL mean {result['kl_mean']:.5f}, 99th percentile {result['kl_p99']:.5f}, "
            f"same best token {100 * result['top1_agreement']:.2f} %"
        )
    return "\n".join(lines)
