"""``thinfer bench``: prefill and decode speed, alone or against another engine; ``bench kernels``."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UnsupportedError, UsageError

app = typer.Typer(rich_markup_mode=None, help="Measure speed.")


class Output(StrEnum):
    """Format of the rows on stdout."""

    md = "md"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Format of the rows on stdout.")]


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
    against: Annotated[
        str | None, typer.Option("--against", help="Another engine on the same file: llama.cpp.")
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(
            "--peer-python",
            envvar="THINFER_PEER_PYTHON",
            help="A Python that has llama-cpp-python. [default: this one]",
        ),
    ] = None,
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
    from thinfer.bench import report
    from thinfer.bench.peers import open_peers
    from thinfer.bench.throughput import Test, measure, open_contender

    tests = [Test("pp", n) for n in _lengths(prompt_tokens, "-p")]
    tests += [Test("tg", n) for n in _lengths(decode_tokens, "-n")]
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
    _print(rows, output, report.as_md)


def _lengths(text: str, option: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = [-1]
    if min(lengths) < 0:
        raise UsageError(f"{option} {text}: numbers of tokens are wanted, separated by commas")
    return [length for length in lengths if length]


def _print(rows: list[dict[str, Any]], output: Output, as_md: Callable[[list[dict[str, Any]]], str]) -> None:
    from thinfer.bench import report

    writers = {Output.md: as_md, Output.json: report.as_json, Output.jsonl: report.as_jsonl, Output.csv: report.as_csv}
    sys.stdout.write(writers[output](rows) + "\n")


@app.command("kernels")
def kernels(
    threads: opt.Threads = None,
    output: OutputOption = Output.md,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and rounds.")] = False,
) -> None:
    """Time the packed layouts at real shapes: codecs, densities, rows of a batch, threads."""
    if find_spec("thinfer._core") is None:
        raise UnsupportedError("the native part is not built: run `make setup`")
    from thinfer.bench import kernels as bench_kernels
    from thinfer.bench import report

    with opt.status() as progress:
        rows = bench_kernels.measure(threads=threads, quick=quick, progress=progress)
    _print(rows, output, report.as_plain_md)
