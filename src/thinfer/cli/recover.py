"""``thinfer recover``: train a pruned model again without losing its zeros."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError


class Method(StrEnum):
    """What is trained."""

    masklora = "masklora"
    lora = "lora"
    full = "full"


class Loss(StrEnum):
    """What is made small."""

    lm = "lm"
    distill = "distill"


class Precision(StrEnum):
    """Precision of the arithmetic."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def recover(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="DIR", help="The pruned model; instead of -m.")
    ] = None,
    model: opt.Model = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR2", help="Folder to write.")] = None,
    method: Annotated[
        Method,
        typer.Option(
            "--method",
            help="masklora: adapters under the mask. lora: quicker, for models without zeros, as structured ones. "
            "full: every weight, under the mask.",
        ),
    ] = Method.masklora,
    loss: Annotated[
        Loss, typer.Option("--loss", help="lm: the likelihood of the text. distill: the distance to --teacher.")
    ] = Loss.lm,
    teacher: Annotated[
        str | None, typer.Option("--teacher", metavar="MODEL", help="The dense model, for --loss distill.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to train on.")] = 100_000,
    text: Annotated[
        Path | None,
        typer.Option("--text", help="UTF-8 text or .jsonl to train on. [default: an excerpt that ships with thinfer]"),
    ] = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Highest learning rate. [default: 5e-4 for adapters, 2e-5 for full]")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows of one step.")] = 4,
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", min=1, help="Windows in memory together; divides --batch.")
    ] = 1,
    seqlen: Annotated[int, typer.Option("--seqlen", min=2, help="Tokens of a window.")] = 512,
    warmup: Annotated[float, typer.Option("--warmup", help="Fraction of the steps in which the rate rises.")] = 0.05,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="AdamW's, on matrices.")] = 0.0,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the adapters.")] = 8,
    alpha: Annotated[float, typer.Option("--alpha", help="The adapters' scale is alpha / rank.")] = 16.0,
    dropout: Annotated[float, typer.Option("--dropout", help="Of lora.")] = 0.05,
    kl: Annotated[float, typer.Option("--kl-weight", help="Distill: of the teacher's predictions.")] = 1.0,
    hidden: Annotated[
        float | None,
        typer.Option(
            "--hidden-weight", help="Distill: of the teacher's hidden states. [default: 1 if of one shape, else 0]"
        ),
    ] = None,
    lm: Annotated[float, typer.Option("--lm-weight", help="Distill: of the text's own likelihood.")] = 0.0,
    temperature: Annotated[float, typer.Option("--temperature", help="Distill: of the predictions.")] = 1.0,
    precision: Annotated[
        Precision, typer.Option("--precision", help="Of the arithmetic; what is trained stays float32.")
    ] = Precision.float32,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of adapters, dropout and the order of windows.")] = 0,
    eval_text: Annotated[
        Path | None,
        typer.Option("--eval-text", help="Perplexity before and after. [default: shipped chapters not trained on]"),
    ] = None,
    eval_ctx: Annotated[int, typer.Option("--eval-ctx", min=2, help="Tokens of a window there.")] = 512,
    eval_windows: Annotated[int, typer.Option("--eval-windows", min=1, help="Windows there.")] = 16,
    eval_stride: Annotated[int, typer.Option("--eval-stride", min=1, help="Take every so many of them.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an unfinished run; begins when there is none.")
    ] = False,
    checkpoint_minutes: Annotated[
        float, typer.Option("--checkpoint-minutes", min=0, help="Time between two saved states.")
    ] = 10.0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    threads: opt.Threads = None,
    quiet: opt.Quiet = False,
) -> None:
    """Train a pruned model so that it gets back what it lost, with every zero kept and checked.

    Writes an ordinary model folder, which appears whole; stdout and its report.json have perplexity and sparsity
    before and after, all settings, and the curve of the loss. Ctrl-C keeps the state; --resume continues with it.
    """
    reference, rest = opt.one_model(model, arguments or [], "recover")
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; the folder to write is given with -o DIR2")
    if out is None:
        raise UsageError("where to write? -o DIR2")
    from thinfer.pruning.checkpoint import require_torch

    require_torch()
    import torch

    from thinfer.pruning.recovery.recover import Evaluation, RecoverOptions
    from thinfer.pruning.recovery.recover import recover as run

    if threads is not None:
        torch.set_num_threads(threads)
    options = RecoverOptions(
        method=method.value,
        loss=loss.value,
        tokens=tokens,
        lr=lr,
        batch=batch,
        micro_batch=micro_batch,
        seqlen=seqlen,
        warmup=warmup,
        weight_decay=weight_decay,
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        kl=kl,
        hidden=hidden,
        lm=lm,
        temperature=temperature,
        precision=precision.value,
        seed=seed,
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
        before, after = report["before"], report["after"]
        opt.say(
            [
                *(f"note: {note}" for note in report["notes"]),
                f"perplexity {before['ppl']:.3f} before, {after['ppl']:.3f} after; "
                f"sparsity {report['sparsity_before']:.4f} before, {report['sparsity_after']:.4f} after",
                f"wrote {out}",
            ]
        )
