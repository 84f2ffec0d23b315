"""``thinfer info``: what this machine and this model run with."""

import typer

from thinfer.cli import options as opt


def info(model: opt.Model = None, threads: opt.Threads = None) -> None:
    """Show instruction sets, threads, read bandwidth, and a model's facts, codecs, layouts and plan."""
    raise typer.Exit(1)
