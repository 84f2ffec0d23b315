"""``thinfer calibrate``: find the thresholds under which a model skips input channels."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError


class Method(StrEnum):
    """How a channel is scored."""

    teal = "teal"
    wina = "wina"


class Allocation(StrEnum):
    """How the sparsity is spread over the inputs."""

    uniform = "uniform"
    greedy = "greedy"


@opt.with_places("calibrate", what="Folder to write; it points to MODEL.", shown="<path>")
@opt.with_observing_options()
def calibrate(
    *,
    places: opt.Places,
    method: Annotated[
        Method, typer.Option("--method", help="teal scores |x|; wina |x| times the norm of the channel's weights.")
    ] = Method.teal,
    sparsity: Annotated[
        float | None, typer.Option("--sparsity", help="Fraction of input channels to skip, 0 to below 1.")
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option("--max-ppl-increase", metavar="PERCENT", help="Instead: save the most bytes inside this, as 2%."),
    ] = None,
    allocation: Annotated[
        Allocation, typer.Option("--allocation", help="greedy: more where it costs least, found by measurement.")
    ] = Allocation.uniform,
    depth_parts: Annotated[
        int,
        typer.Option("--depth-parts", min=1, help="Rates of their own for so many parts of the depth, also measured."),
    ] = 1,
    text: Annotated[
        Path | None, typer.Option("--text", help="UTF-8 text to observe. [default: an excerpt that ships with thinfer]")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Windows of the text to observe.")] = 16,
    seq_len: Annotated[int, typer.Option("--seqlen", min=2, help="Tokens of a window.")] = 512,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Which windows.")] = 0,
    prefill: Annotated[bool, typer.Option("--prefill", help="Skip in prompts too, not only at decode.")] = False,
    engine: dict[str, Any],
    quiet: opt.Quiet = False,
) -> None:
    """Observe the inputs of every linear layer on a text and store one threshold for each distinct input.

    Writes thinfer.json and thinfer.safetensors, tied to the weights by hash; stdout has the report as JSON. Then
    `thinfer run -m DIR` skips at decode; --sparsity 0 there runs dense.
    """
    if (sparsity is None) == (max_ppl_increase is None):
        raise UsageError("give one of --sparsity 0.4 and --max-ppl-increase 2%")
    if sparsity is not None and not 0 <= sparsity < 1:
        raise UsageError(f"--sparsity {sparsity:g}: the fraction that is skipped, from 0 to below 1")
    budget = fraction(max_ppl_increase) if max_ppl_increase is not None else None

    from thinfer.activation.threshold import calibrate as make

    with opt.status() as progress:
        report = make(
            places.model,
            places.out,
            progress=progress,
            method=method.value,
            sparsity=sparsity,
            max_ppl_increase=budget,
            allocation=allocation.value,
            depth_parts=depth_parts,
            text=text,
            samples=samples,
            seq_len=seq_len,
            seed=seed,
            prefill=prefill,
            **engine,
        )
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if not quiet:
        opt.say([f"wrote {places.out}; run it with: thinfer run -m {places.out}"])


def fraction(text: str) -> float:
    """``2%`` and ``0.02`` as 0.02; UsageError for anything that is not between 0 and 100 %."""
    percent = text.strip().endswith("%")
    try:
        value = float(text.strip().removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise UsageError(f"--max-ppl-increase {text}: write 2% or 0.02")
    return value
