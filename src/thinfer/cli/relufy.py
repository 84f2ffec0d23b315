"""``thinfer relufy``: turn a dense model into a ReLU model by training."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError


class Loss(StrEnum):
    """What is made small."""

    lm = "lm"
    distill = "distill"


class Train(StrEnum):
    """What is trained."""

    ffn = "ffn"
    blocks = "blocks"
    all = "all"


class Precision(StrEnum):
    """Precision of the arithmetic."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class SaveDtype(StrEnum):
    """Precision of the saved weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def relufy(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="Instead of -m.")] = None,
    model: opt.Model = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder to write.")] = None,
    stage: Annotated[
        int, typer.Option("--stage", min=1, max=2, help="1: ReLU in the FFNs. 2: behind the norms too.")
    ] = 1,
    shift: Annotated[float, typer.Option("--shift", metavar="B", help="max(x - B, 0) instead of max(x, 0).")] = 0.0,
    progressive: Annotated[
        bool, typer.Option("--progressive", help="Fade the old activation into ReLU instead of swapping at once.")
    ] = False,
    ramp: Annotated[float, typer.Option("--ramp", help="Share of the steps that fading takes.")] = 0.5,
    loss: Annotated[
        Loss, typer.Option("--loss", help="distill: the distance to the dense model. lm: the likelihood of the text.")
    ] = Loss.distill,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="MODEL", help="The dense model. [default: the model itself]")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to train on.")] = 100_000,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="UTF-8 text or .jsonl to train on. [default: an excerpt that ships with thinfer]"),
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
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the adapters.")] = 32,
    alpha: Annotated[float, typer.Option("--alpha", help="The adapters' scale is alpha / rank.")] = 64.0,
    l1: Annotated[float, typer.Option("--l1", help="Penalty on neurons, for more zeros; try 0.05.")] = 0.0,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Highest learning rate. [default: 4e-4; 1e-3 for adapters]")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows of one step.")] = 4,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", min=1, help="Windows in memory together; divides --batch.")
    ] = 1,
    seqlen: Annotated[int, typer.Option("--seqlen", min=2, help="Tokens of a window.")] = 256,
    warmup: Annotated[float, typer.Option("--warmup", help="Fraction of the steps in which the rate rises.")] = 0.05,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="AdamW's, on matrices.")] = 0.0,
    kl: Annotated[float, typer.Option("--kl-weight", help="Distill: of the dense model's predictions.")] = 1.0,
    hidden: Annotated[
        float | None,
        typer.Option("--hidden-weight", help="Distill: of its hidden states. [default: 1 if of one shape, else 0]"),
    ] = None,
    lm: Annotated[float, typer.Option("--lm-weight", help="Distill: of the text's own likelihood.")] = 0.0,
    temperature: Annotated[float, typer.Option("--temperature", help="Distill: of the predictions.")] = 1.0,
    precision: Annotated[
        Precision, typer.Option("--precision", help="Of the arithmetic; what is trained stays float32.")
    ] = Precision.float32,
    compile_models: Annotated[bool, typer.Option("--compile", help="Compile the models; pays on a GPU.")] = False,
    save_dtype: Annotated[
        SaveDtype, typer.Option("--save-dtype", help="Of the saved weights. auto: as the model is stored.")
    ] = SaveDtype.auto,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of adapters, written text, order of windows.")] = 0,
    eval_text: Annotated[
        Path | None,
        typer.Option("--eval-text", help="Perplexity is measured there. [default: shipped chapters not trained on]"),
    ] = None,
    eval_ctx: Annotated[int, typer.Option("--eval-ctx", min=2, help="Tokens of a window there.")] = 512,
    eval_windows: Annotated[int, typer.Option("--eval-windows", min=1, help="Windows there.")] = 8,
    eval_stride: Annotated[int, typer.Option("--eval-stride", min=1, help="Take every so many of them.")] = 1,
    eval_points: Annotated[int, typer.Option("--eval-points", min=1, help="How often, on the way.")] = 10,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an unfinished run; begins when there is none.")
    ] = False,
    checkpoint_minutes: Annotated[
        float, typer.Option("--checkpoint-minutes", min=0, help="Time between two saved states.")
    ] = 5.0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    threads: opt.Threads = None,
    quiet: opt.Quiet = False,
) -> None:
    """Turn a model with SiLU or GELU into one with ReLU, most of whose neurons are exactly zero.

    Swaps the activation, fits the down matrices to the dense model, then trains. Writes an ordinary model folder
    (stage 2: one that thinfer reads), which appears whole; stdout and its report.json have perplexity and zeros of
    every step of the way, and learning-curve.png shows them. Ctrl-C keeps the state; --resume continues with it.
    """
    reference, rest = opt.one_model(model, arguments or [], "relufy")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; the folder to write is given with -o DIR")
    if out is None:
        raise UsageError("where to write? -o DIR")
    from thinfer.pruning.checkpoint import require_torch

    require_torch()
    import torch

    from thinfer.activation.relufy import relufy as run
    from thinfer.activation.relufy_options import RelufyOptions
    from thinfer.pruning.recovery.recover import Evaluation

    if threads is not None:
        torch.set_num_threads(threads)
    options = RelufyOptions(
        stage=1 if stage == 1 else 2,
        shift=shift,
        progressive=progressive,
        ramp=ramp,
        loss=loss.value,
        tokens=tokens,
        train=train.value,
        lora=lora,
        rank=rank,
        alpha=alpha,
        l1=l1,
        generated=generated,
        refit=refit,
        lr=lr,
        batch=batch,
        micro_batch=micro_batch,
        seqlen=seqlen,
        warmup=warmup,
        weight_decay=weight_decay,
        kl=kl,
        hidden=hidden,
        lm=lm,
        temperature=temperature,
        precision=precision.value,
        compile=compile_models,
        save_dtype=save_dtype.value,
        seed=seed,
        eval_points=eval_points,
        checkpoint_minutes=checkpoint_minutes,
    )
    try:
        with opt.status() as progress:
            report = run(
                reference,
                out,
                options,
                teacher=teacher,
                text=text,
                evaluation=Evaluation(eval_text, eval_ctx, eval_windows, eval_stride),
                resume=resume,
                device=device,
                progress=progress,
            )
    except KeyboardInterrupt:
        opt.say(["interrupted; the same command with --resume continues"])
        raise
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if not quiet:
        opt.say([*(f"note: {note}" for note in report["notes"]), *_lines(report), f"wrote {out}"])


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
