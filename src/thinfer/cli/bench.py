"""``thinfer bench``: prefill and decode speed, alone or against another engine; ``bench kernels``.

``bench ffn`` is in bench_ffn.py.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.engine.cores import MAX_THREADS
from thinfer.errors import UnsupportedError, UsageError

app = typer.Typer(rich_markup_mode=None, help="Measure speed.")


class Output(StrEnum):
    """Format of the rows on stdout."""

    md = "md"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Format of the rows on stdout.")]
Against = Annotated[str | None, typer.Option("--against", help="Another engine on the same file: llama.cpp.")]
PeerPython = Annotated[
    str | None,
    typer.Option(
        "--peer-python", envvar="THINFER_PEER_PYTHON", help="A Python that has llama-cpp-python. [default: this one]"
    ),
]


@app.callback(invoke_without_command=True)
@opt.with_engine_options()
def bench(
    *,
    context: typer.Context,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help=opt.MODEL_HELP + " Repeat to interleave.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option("--n-prompt", "-p", metavar="N[,N...]", help="Lengths of prompts to time; 0: none.")
    ] = "512",
    decode_tokens: Annotated[
        str, typer.Option("--n-gen", "-n", metavar="N[,N...]", help="Numbers of decode steps to time; 0: none.")
    ] = "128",
    rounds: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Timed rounds of each test.")] = 5,
    output: OutputOption = Output.md,
    per_op: Annotated[bool, typer.Option("--per-op", help="Add time, bytes and bandwidth by kind of node.")] = False,
    against: Against = None,
    peer_python: PeerPython = None,
    engine: dict[str, Any],
    quiet: opt.Quiet = False,
) -> None:
    """Time prompts (pp) and decode steps (tg) as llama-bench does, without tokenisation and sampling.

    Every engine runs in a process of its own, in interleaved rounds; rss_bytes is the peak of that process, mapped
    files included. Medians and standard deviations are over the rounds.
    """
    if context.invoked_subcommand is not None:
        return
    if not model:
        raise UsageError("which model? thinfer bench -m MODEL")
    model = [opt.named(reference, "-m") for reference in model]
    from thinfer.bench.peers import open_peers
    from thinfer.bench.report import as_md
    from thinfer.bench.throughput import Test, measure, open_contender

    tests = [Test("pp", n) for n in counts(prompt_tokens, "-p")]
    tests += [Test("tg", n) for n in counts(decode_tokens, "-n")]
    if not tests:
        raise UsageError("nothing to time: -p and -n are both 0")
    with ExitStack() as open_workers:
        contenders = []
        for reference in model:
            contenders.append(open_contender(reference, engine, tests))
            open_workers.callback(contenders[-1].worker.close)
            if not quiet:
                opt.say(contenders[-1].notes)
        if against is not None:
            for peer in open_peers(against, peer_python, list(contenders), engine, tests):
                contenders.append(peer)
                open_workers.callback(peer.worker.close)
        with opt.status() as progress:
            rows = measure(contenders, tests, rounds, operations=per_op, progress=progress)
    print_rows(rows, output, as_md)


def counts(text: str, option: str) -> list[int]:
    """Numbers separated by commas, without the zeros; UsageError names the option."""
    try:
        given = [int(part) for part in text.split(",")]
    except ValueError:
        given = [-1]
    if min(given) < 0:
        raise UsageError(f"{option} {text}: whole numbers are wanted, separated by commas")
    return [number for number in given if number]


def print_rows(rows: list[dict[str, Any]], output: Output, as_md: Callable[[list[dict[str, Any]]], str]) -> None:
    """Print rows in the chosen format; ``as_md`` makes the table."""
    from thinfer.bench import report

    writers: dict[Output, Callable[[list[dict[str, Any]]], str]] = {
        Output.md: as_md,
        Output.json: report.as_json,
        Output.jsonl: report.as_jsonl,
        Output.csv: report.as_csv,
    }
    sys.stdout.write(writers[output](rows) + "\n")


class Codec(StrEnum):
    """Codecs of the kernel experiment."""

    u4 = "u4"
    u5 = "u5"
    u6 = "u6"
    i8 = "i8"
    u4_k = "u4_k"


@app.command("kernels")
def kernels(
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="Matrices whose name holds this, as smollm2 or down; may be repeated."),
    ] = None,
    codec: Annotated[
        list[Codec] | None, typer.Option("--codec", help="May be repeated. [default: u4, u5, u6, i8]")
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            "--threads",
            "-t",
            min=1,
            max=MAX_THREADS,
            envvar="THINFER_THREADS",
            help="May be repeated. [default: 1 and all cores]",
        ),
    ] = None,
    output: OutputOption = Output.md,
    quiet: opt.Quiet = False,
) -> None:
    """Time the packed layouts at real shapes: codecs, densities, rows of a batch, threads. All of it takes minutes.

    A line is printed as soon as it is measured; -o json prints its list at the end.
    """
    if find_spec("thinfer._core") is None:
        raise UnsupportedError("the native part is not built: run `make setup`")
    from thinfer.bench import kernels as experiment
    from thinfer.engine.layout_choice import largest_cache

    wanted = [each for each in experiment.SHAPES if _matches(each.model, shape)]
    if not wanted:
        names = ", ".join(each.model for each in experiment.SHAPES)
        raise UsageError(f"--shape {' '.join(shape or [])}: no matrix has that in its name; there are {names}")
    if not quiet:
        size, cache = experiment.set_bytes() >> 20, largest_cache() >> 20
        held = "more than" if size > cache else "not more than, so some stay in,"
        opt.say([f"weights   {size} MiB of copies of each matrix, {held} the largest cache ({cache} MiB)"])
    with opt.status() as progress:
        rows = experiment.measure(
            shapes=wanted,
            codecs=[each.value for each in codec] if codec else experiment.CODECS,
            threads=threads,
            progress=progress,
        )
        for line in lines(rows, output, experiment.COLUMNS):
            print(line, flush=True)


def _matches(name: str, parts: list[str] | None) -> bool:
    return not parts or any(part.lower() in name.lower() for part in parts)


def lines(rows: Iterator[dict[str, Any]], output: Output, columns: Mapping[str, int]) -> Iterator[str]:
    """Lines of the output, each as soon as it is known."""
    from thinfer.bench import report

    if output is Output.md:
        yield from report.stream_md(rows, columns)
    elif output is Output.csv:
        yield from report.stream_csv(rows, list(columns))
    elif output is Output.jsonl:
        yield from (report.as_jsonl([row]) for row in rows)
    else:
        yield report.as_json(list(rows))
