"""``thinfer bench prune``: how long pruning takes, against the products that it cannot do without."""

from typing import Annotated

import typer

from thinfer.cli import options as opt
from thinfer.cli.bench import Output, OutputOption, print_rows
from thinfer.errors import UsageError


def prune(
    model: opt.Model = None,
    method: Annotated[
        str, typer.Option("--method", metavar="LIST", help="Methods that zero weights, with commas.")
    ] = "wanda,sparsegpt",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Calibration windows, of the shipped text.")] = 32,
    seqlen: Annotated[int, typer.Option("--seqlen", min=2, help="Tokens of a window.")] = 512,
    sparsity: Annotated[float, typer.Option("--sparsity", help="Fraction of weights to zero.")] = 0.5,
    threads: opt.Threads = None,
    output: OutputOption = Output.md,
) -> None:
    """Prune a model with each method in a process of its own, and throw the results away.

    floor_seconds is what the passes over the text must multiply, at the rate measured on a float32 product of the
    model's largest matrix; peak_rss_bytes is the peak of the process. The scratch folder lies where TMPDIR says.
    """
    if model is None:
        raise UsageError("which model? thinfer bench prune -m MODEL")
    methods = [part.strip() for part in method.split(",")]
    from thinfer.pruning.base import names

    if unknown := [name for name in methods if name.replace("_", "-") not in names()]:
        raise UsageError(f"--method {', '.join(unknown)}: choose from {', '.join(names())}")
    if not 0 <= sparsity < 1:
        raise UsageError(f"--sparsity {sparsity:g}: a fraction from 0 to below 1 is wanted")
    from thinfer.bench.pruning import as_md, measure
    from thinfer.pruning.checkpoint import require_torch

    require_torch()
    with opt.status() as progress:
        rows = measure(
            opt.named(model, "-m"),
            methods,
            samples=samples,
            seqlen=seqlen,
            sparsity=sparsity,
            threads=threads,
            progress=progress,
        )
    print_rows(rows, output, as_md)
