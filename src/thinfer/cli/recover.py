"""``thinfer recover``: train a pruned model again without losing its zeros."""

from enum import StrEnum
from typing import Annotated

import typer

from thinfer.cli import options as opt
from thinfer.cli.training import Training, with_training_options
from thinfer.pruning.recovery.options import RecoverOptions


class Method(StrEnum):
    """What is trained."""

    masklora = "masklora"
    lora = "lora"
    full = "full"


@opt.with_places("recover", metavar="DIR2", source="DIR")
@with_training_options(RecoverOptions, rates="5e-4 for adapters, 2e-5 for full", eval_windows=16)
def recover(
    *,
    places: opt.Places,
    method: Annotated[
        Method,
        typer.Option(
            "--method",
            help="masklora: adapters under the mask. lora: quicker, for models without zeros, as structured ones. "
            "full: every weight, under the mask.",
        ),
    ] = Method.masklora,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="MODEL", help="The dense model, for --loss distill.")
    ] = None,
    dropout: Annotated[float, typer.Option("--dropout", help="Of lora.")] = 0.05,
    training: Training,
    quiet: opt.Quiet = False,
) -> None:
    """Train a pruned model so that it gets back what it lost, with every zero kept and checked.

    Writes an ordinary model folder, which appears whole; stdout and its report.json have perplexity and sparsity
    before and after, all settings, and the curve of the loss. Ctrl-C keeps the state; --resume continues with it.
    """
    training.prepare()
    from thinfer.pruning.recovery.recover import recover as run

    options = RecoverOptions(method=method.value, dropout=dropout, **training.options)
    report = training.run(run, places, options, teacher)
    if not quiet:
        before, after = report["before"], report["after"]
        opt.say(
            [
                *(f"note: {note}" for note in report["notes"]),
                f"perplexity {before['ppl']:.3f} before, {after['ppl']:.3f} after; "
                f"sparsity {report['sparsity_before']:.4f} before, {report['sparsity_after']:.4f} after",
                f"wrote {places.out}",
            ]
        )
