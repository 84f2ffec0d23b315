"""``thinfer relufy``: turn a dense model into a ReLU model by training."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from thinfer.activation.relufy_options import RelufyOptions
from thinfer.cli import options as opt
from thinfer.cli.training import Training, with_training_options


class Train(StrEnum):
    """What is trained."""

    ffn = "ffn"
    blocks = "blocks"
    all = "all"


class SaveDtype(StrEnum):
    """Precision of the saved weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@opt.with_places("relufy")
@with_training_options(RelufyOptions, rates="4e-4; 1e-3 for adapters", eval_windows=8)
def relufy(
    *,
    places: opt.Places,
    stage: Annotated[
        int, typer.Option("--stage", min=1, max=2, help="1: ReLU in the FFNs. 2: behind the norms too.")
    ] = 1,
    shift: Annotated[float, typer.Option("--shift", metavar="B", help="max(x - B, 0) instead of max(x, 0).")] = 0.0,
    progressive: Annotated[
        bool, typer.Option("--progressive", help="Fade the old activation into ReLU instead of swapping at once.")
    ] = False,
    ramp: Annotated[float, typer.Option("--ramp", help="Share of the steps that fading takes.")] = 0.5,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="MODEL", help="The dense model. [default: the model itself]")
    ] = None,
    generated: Annotated[
        float, typer.Option("--generated", help="Share of the windows that the dense model writes itself.")
    ] = 0.0,
    refit: Annotated[
        int | None,
        typer.Option(
            "--refit", min=0, help="Windows the down matrices are fitted on first. [default: 32; 0 if progressive]"
        ),
    ] = None,
    train: Annotated[Train, typer.Option("--train", help="What is trained; norms always are.")] = Train.blocks,
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters of the blocks' matrices instead.")] = False,
    l1: Annotated[float, typer.Option("--l1", help="Penalty on neurons, for more zeros; try 0.05.")] = 0.0,
    compile_models: Annotated[bool, typer.Option("--compile", help="Compile the models; pays on a GPU.")] = False,
    save_dtype: Annotated[
        SaveDtype, typer.Option("--save-dtype", help="Of the saved weights. auto: as the model is stored.")
    ] = SaveDtype.auto,
    eval_points: Annotated[
        int, typer.Option("--eval-points", min=1, help="How often perplexity is measured on the way.")
    ] = 10,
    training: Training,
    quiet: opt.Quiet = False,
) -> None:
    """Turn a model with SiLU or GELU into one with ReLU, most of whose neurons are exactly zero.

    Swaps the activation, fits the down matrices to the dense model, then trains. Writes an ordinary model folder
    (stage 2: one that thinfer reads), which appears whole; stdout and its report.json have perplexity and zeros of
    every step of the way, and learning-curve.png shows them. Ctrl-C keeps the state; --resume continues with it.
    """
    training.prepare()
    from thinfer.activation.relufy import relufy as run

    options = RelufyOptions(
        stage=1 if stage == 1 else 2,
        shift=shift,
        progressive=progressive,
        ramp=ramp,
        train=train.value,
        lora=lora,
        l1=l1,
        generated=generated,
        refit=refit,
        compile=compile_models,
        save_dtype=save_dtype.value,
        eval_points=eval_points,
        **training.options,
    )
    report = training.run(run, places, options, teacher)
    if not quiet:
        opt.say([*(f"note: {note}" for note in report["notes"]), *_lines(report), f"wrote {places.out}"])


def _lines(report: dict[str, Any]) -> list[str]:
    after = report["after"]
    way = [f"{report['dense']['ppl']:.3f} dense", f"{report['swapped']['ppl']:.3f} right after the swap"]
    if report["fitted"]:
        way.append(f"{report['start']['ppl']:.3f} fitted")
    return [
        f"perplexity {', '.join(way)}, {after['ppl']:.3f} after {report['tokens']} tokens",
        f"neurons at zero: {100 * after['sparsity']:.1f} %, by layer "
        f"{100 * min(after['sparsity_by_layer']):.1f} to {100 * max(after['sparsity_by_layer']):.1f} %",
    ]
