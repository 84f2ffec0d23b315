"""``thinfer info``: what this machine and this model run with."""

import typer

from thinfer.cli import options as opt


def info(model: opt.Model = None, threads: opt.Threads = None) -> None:
    """Show instruction sets, threads, read bandwidth, and a model's facts, codecs, layouts and plan."""
    if model is not None:
        from thinfer.formats.checkpoint import open_checkpoint

        open_checkpoint(model)
    raise typer.Exit(1)
