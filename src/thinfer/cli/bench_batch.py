"""``thinfer bench batch``: decode speed of several streams together."""

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.cli.bench import Against, Output, OutputOption, PeerPython, counts, print_rows
from thinfer.errors import UsageError


@opt.with_engine_options()
def batch(
    *,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", help=opt.MODEL_HELP + " Repeat to interleave.")
    ] = None,
    streams: Annotated[
        str, typer.Option("--streams", metavar="N[,N...]", help="Numbers of streams that decode together.")
    ] = "1,4,8,16",
    decode_tokens: Annotated[int, typer.Option("--n-gen", "-n", min=1, help="Tokens of every stream to time.")] = 128,
    rounds: Annotated[
        int, typer.Option("--repetitions", "-r", min=1, help="Timed rounds of each number of streams.")
    ] = 5,
    output: OutputOption = Output.md,
    against: Against = None,
    peer_python: PeerPython = None,
    engine: dict[str, Any],
    quiet: opt.Quiet = False,
) -> None:
    """Time streams that decode together, as the server runs them, sampling and text included.

    t/s counts the tokens of all streams. llama.cpp runs the tokens that ours chose as the sequences of one batch,
    without sampling; agree is the fraction of them that it would have chosen too.
    """
    if not model:
        raise UsageError("which model? thinfer bench batch -m MODEL")
    model = [opt.named(reference, "-m") for reference in model]
    levels = counts(streams, "--streams")
    if not levels:
        raise UsageError(f"--streams {streams}: at least one stream is wanted")
    from thinfer.bench.batch import engine_needs, measure_streams
    from thinfer.bench.peers import open_peers
    from thinfer.bench.report import as_streams_md
    from thinfer.bench.throughput import Test, open_contender

    tests = [Test("tg", decode_tokens)]
    with ExitStack() as open_workers:
        contenders = []
        for reference in model:
            contenders.append(open_contender(reference, engine | engine_needs(levels, decode_tokens), tests))
            open_workers.callback(contenders[-1].worker.close)
            if not quiet:
                opt.say(contenders[-1].notes)
        if against is not None:
            for peer in open_peers(against, peer_python, list(contenders), engine, tests):
                contenders.append(peer)
                open_workers.callback(peer.worker.close)
        with opt.status() as progress:
            rows = measure_streams(contenders, levels, decode_tokens, rounds, progress=progress)
    print_rows(rows, output, as_streams_md)
