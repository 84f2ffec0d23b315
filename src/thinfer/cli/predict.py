"""``thinfer predict``: small networks that say ahead of time which neurons and heads a token needs."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.errors import UsageError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Predict active neurons and heads.")


class Kind(StrEnum):
    """Form of the predictors."""

    lowrank = "lowrank"
    mlp = "mlp"


@app.callback()
def predict() -> None:
    """Predict active neurons and heads."""


@app.command("train")
@opt.with_places("predict train", what="Folder to write; it points to MODEL.", shown="<path>")
@opt.with_observing_options()
def train(
    *,
    places: opt.Places,
    targets: Annotated[
        str, typer.Option("--targets", metavar="LIST", help="What is predicted: neurons, heads.")
    ] = "neurons",
    kind: Annotated[
        Kind, typer.Option("--kind", help="lowrank: two matrices. mlp: with a ReLU between.")
    ] = Kind.lowrank,
    lookahead: Annotated[
        int, typer.Option("--lookahead", min=0, max=1, help="1: read the input of the layer before.")
    ] = 0,
    recall: Annotated[
        float,
        typer.Option(
            "--recall", help="Share of what is needed that each shall find; on held-out text expect a little less."
        ),
    ] = 0.96,
    bits: Annotated[int, typer.Option("--bits", help="8 or 4, of the stored matrices.")] = 8,
    budget: Annotated[
        float, typer.Option("--budget", help="All predictors together, as a fraction of the model's parameters.")
    ] = 0.1,
    label_share: Annotated[
        float | None,
        typer.Option("--label-share", help="Without exact zeros: the share of neurons that counts as needed."),
    ] = None,
    head_share: Annotated[float, typer.Option("--head-share", help="The share of heads that counts as needed.")] = 0.5,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="LIST", help="Such as 0,4-7. [default: all]")
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="UTF-8 text. [default: an excerpt that ships with thinfer]")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to learn from.")] = 16384,
    held_out: Annotated[int, typer.Option("--held-out", min=1, help="Further tokens to measure on.")] = 4096,
    seq_len: Annotated[int, typer.Option("--seqlen", min=8, help="Tokens of a window.")] = 256,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Most passes over the tokens for each size.")] = 8,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Tokens of a step.")] = 512,
    lr: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 2e-3,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of windows and order.")] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N, for the training.")] = "cpu",
    engine: dict[str, Any],
    quiet: opt.Quiet = False,
) -> None:
    """Train a predictor for every layer, as large as that layer needs, and measure it on held-out text.

    Writes thinfer.json and thinfer.safetensors, tied to the weights by hash; stdout has the report as JSON. A
    predictor counts only with a recall of at least 0.95 at 1.5 times the true density at most; others are stored and
    not used.
    """
    from thinfer.activation.predictor_training import require_training

    require_training(device)
    if engine["threads"] is not None:
        import torch

        torch.set_num_threads(engine["threads"])
    from thinfer.activation.predictor import train_predictors

    with opt.status() as progress:
        report = train_predictors(
            places.model,
            places.out,
            text=text,
            progress=progress,
            targets=tuple(part.strip() for part in targets.split(",")),
            kind=kind.value,
            lookahead=lookahead,
            recall=recall,
            bits=bits,
            budget=budget,
            label_share=label_share,
            head_share=head_share,
            layers=numbers(layers) if layers is not None else None,
            tokens=tokens,
            held_out=held_out,
            seq_len=seq_len,
            epochs=epochs,
            batch=batch,
            lr=lr,
            seed=seed,
            device=device,
            **engine,
        )
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if not quiet:
        opt.say([*_table(report), f"wrote {places.out}"])


def numbers(text: str) -> list[int]:
    """The numbers of a list such as ``0,4-7``; UsageError when it is none.

    Example:
        >>> numbers("0,4-6")
        [0, 4, 5, 6]
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise UsageError(f"--layers {text}: write numbers and ranges, such as 0,4-7")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _table(report: dict[str, Any]) -> list[str]:
    lines = [f"{'':12} {'rank':>5} {'recall':>7} {'precision':>9} {'density':>8} {'true':>6} {'kB':>8}"]
    lines += [
        f"{row['target'] + ' ' + str(row['layer']):12} {row['rank']:5d} {row['recall']:7.3f} {row['precision']:9.3f} "
        f"{row['density']:8.3f} {row['true_density']:6.3f} {row['bytes'] / 1e3:8.1f}"
        + ("" if row["counts"] else "  does not count")
        for row in report["predictors"]
    ]
    lines.append(f"together {report['parameters_share']:.1%} of the model's parameters, {report['bytes'] / 1e6:.2f} MB")
    left_out = len(report["left_out"])
    if left_out:
        lines.append(
            f"left out: {left_out} of {left_out + len(report['predictors'])}, which the budget of "
            f"{report['options']['budget']:.1%} does not hold; --budget {report['budget_for_all']:g} holds all"
        )
    quality = report["quality"]
    if quality is not None:
        lines.append(
            f"with those that count: perplexity {quality['ppl']:.3f}, dense {quality['ppl_dense']:.3f}; KL "
            f"{quality['kl_mean']:.4f} ({quality['tokens']} held-out tokens)"
        )
    return lines
