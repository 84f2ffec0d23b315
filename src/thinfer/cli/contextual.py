"""``thinfer contextual``: how few heads and neurons a token would need."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError


class Output(StrEnum):
    """Format of the result on stdout."""

    text = "text"
    json = "json"


def contextual(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Instead of -m.")] = None,
    model: opt.Model = None,
    what: Annotated[
        str, typer.Option("--what", metavar="LIST", help="What is left out: heads, neurons, both.")
    ] = "heads,neurons,both",
    keep: Annotated[
        str, typer.Option("--keep", metavar="LIST", help="Shares that are kept, such as 0.5,0.25.")
    ] = "0.75,0.5,0.35,0.25,0.15,0.1",
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="UTF-8 text. [default: an excerpt that ships with thinfer]")
    ] = None,
    ctx: Annotated[int, typer.Option("--ctx", "-c", min=2, help="Tokens of a window.")] = 256,
    windows: Annotated[int, typer.Option("--windows", min=1, help="How many windows.")] = 4,
    stride: Annotated[int, typer.Option("--stride", min=1, help="Take every K-th window.")] = 1,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format on stdout.")] = Output.text,
) -> None:
    """Two passes over a text: note which heads and neurons add the most, then recompute with only those.

    Shows the loss in quality at each share kept, with the choice made in hindsight: what a perfect predictor could do.
    Runs in NumPy, so it takes some seconds for each pass even of a small model.
    """
    reference, rest = opt.one_model(model, arguments or [], "contextual")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; the text is given with -f FILE")
    try:
        shares = tuple(float(part) for part in keep.split(","))
    except ValueError as error:
        raise UsageError(f"--keep {keep}: write shares with commas, such as 0.5,0.25") from error

    from thinfer.activation.contextual import ContextualOptions
    from thinfer.activation.contextual import contextual as measure

    kinds: Any = tuple(part.strip() for part in what.split(","))
    settings = ContextualOptions(what=kinds, keep=shares, ctx=ctx, windows=windows, stride=stride)
    with opt.status() as progress:
        result = measure(reference, text=file, progress=progress, options=settings)
    sys.stdout.write((json.dumps(result, indent=2) if output is Output.json else _table(result)) + "\n")


def _table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    lines = [
        f"{rows[0]['tokens']} tokens, {result['windows']} windows of {result['ctx']}; dense perplexity "
        f"{rows[0]['ppl_dense']:.3f}",
        f"{'what':8} {'kept':>6} {'ppl':>9} {'rise, nats':>18} {'KL mean':>9} {'same best':>10}",
    ]
    lines += [
        f"{row['what']:8} {row['kept']:6.1%} {row['ppl']:9.3f} {row['rise']:9.4f} ± {row['rise_stderr']:.4f} "
        f"{row['kl_mean']:9.4f} {row['top1_agreement']:10.1%}"
        for row in rows
    ]
    return "\n".join(lines)
