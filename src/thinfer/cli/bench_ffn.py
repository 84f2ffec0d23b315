"""``thinfer bench ffn``: one FFN, dense against skipping the neurons that do not fire."""

from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated

import typer

from thinfer.cli import options as opt
from thinfer.cli.bench import Output, OutputOption, lines
from thinfer.errors import UnsupportedError, UsageError


class StoredType(StrEnum):
    """Stored types of the weights."""

    q4_0 = "q4_0"
    q4_1 = "q4_1"
    q4_k = "q4_k"
    q6_k = "q6_k"
    q8_0 = "q8_0"
    f16 = "f16"


class ListKind(StrEnum):
    """Who says which neurons are computed."""

    exact = "exact"
    given = "given"
    predictor = "predictor"


class LayoutRule(StrEnum):
    """How the layouts of the weights are found."""

    auto = "auto"
    skip = "skip"


def ffn(
    hidden: Annotated[int, typer.Option("--hidden", min=256, help="Width of the model; a multiple of 256.")] = 4096,
    intermediate: Annotated[int, typer.Option("--intermediate", min=256, help="Neurons; a multiple of 256.")] = 11008,
    gated: Annotated[bool, typer.Option("--gated/--plain", help="With a gate, or up and down alone.")] = True,
    stored: Annotated[list[StoredType] | None, typer.Option("--type", help="May be repeated. [default: q4_0]")] = None,
    sparsity: Annotated[
        str, typer.Option("--sparsity", metavar="S[,S...]", help="Fractions of neurons that do not fire.")
    ] = "0,0.5,0.9",
    kind: Annotated[
        list[ListKind] | None,
        typer.Option(
            "--list", help="exact: those that fire; given: a list; predictor: one made in time. May be repeated."
        ),
    ] = None,
    layout: Annotated[
        LayoutRule,
        typer.Option(
            "--layout", help="auto: timed at each level, as the engine does at load; skip: those of skipping."
        ),
    ] = LayoutRule.auto,
    threads: opt.Threads = None,
    rounds: Annotated[
        int, typer.Option("--repetitions", "-r", min=1, help="Timed rounds, dense and sparse by turns.")
    ] = 7,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of weights and of the neurons that fire.")] = 0,
    output: OutputOption = Output.md,
    quiet: opt.Quiet = False,
) -> None:
    """Time one FFN, dense and with most neurons skipped, the weights read from memory.

    Neurons fire by a power law (26 % make 80 % of what fires), scattered. The rows' byte_ceiling is what skipping could
    gain if nothing but the weights of active neurons were read; layout names how up and down lie; ran is exact where a
    predictor would read more than it saves, and was left out. Results are compared with dense bit for bit.
    """
    if find_spec("thinfer._core") is None:
        raise UnsupportedError("the native part is not built: run `make setup`")
    from thinfer.bench import ffn as experiment
    from thinfer.engine.cores import usable_cores

    for name, value in (("--hidden", hidden), ("--intermediate", intermediate)):
        if value % 256:
            raise UsageError(f"{name} {value}: a multiple of 256 is wanted, as K types store blocks of 256")
    levels = _fractions(sparsity)
    count = usable_cores() if threads is None else threads
    if not quiet:
        opt.say(
            [f"ffn       {hidden} x {intermediate}, {count} threads, seed {seed}; weights are evicted before each run"]
        )
    with opt.status() as progress:
        rows = (
            row
            for each in stored or [StoredType.q4_0]
            for chosen in kind or [ListKind.exact]
            for row in experiment.measure(
                experiment.FfnShape(hidden, intermediate, each.value.upper(), gated),
                kind=chosen.value,
                sparsities=levels,
                threads=count,
                layout=layout.value,
                rounds=rounds,
                seed=seed,
                progress=progress,
            )
        )
        for line in lines(rows, output, experiment.COLUMNS):
            print(line, flush=True)


def _fractions(text: str) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",")]
    except ValueError:
        levels = [-1.0]
    if not all(0 <= level < 1 for level in levels):
        raise UsageError(f"--sparsity {text}: fractions from 0 to below 1 are wanted, separated by commas")
    return levels
