"""Options that verbs share whose work is a training on text, and the frame of such a run."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from thinfer.cli import options as opt
from thinfer.pruning.recovery.options import TextTraining


class Loss(StrEnum):
    """What is made small."""

    lm = "lm"
    distill = "distill"


class Precision(StrEnum):
    """Precision of the arithmetic."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Training:
    """What the shared options say.

    Attributes:
        options: fields of `TextTraining`, by name.
        text: to train on.
        evaluation: arguments of `Evaluation`, in order.
        resume: whether an unfinished run goes on.
        device: where to train.
        threads: of the CPU; None: PyTorch's own number.
    """

    options: dict[str, Any]
    text: Path | None
    evaluation: tuple[Path | None, int, int, int]
    resume: bool
    device: str
    threads: int | None

    def prepare(self) -> None:
        """Set PyTorch up; UsageError when it is missing."""
        from thinfer.pruning.checkpoint import require_torch

        require_torch()
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)

    def run(
        self,
        work: Callable[..., dict[str, Any]],
        places: opt.Places,
        options: TextTraining,
        teacher: str | None,
    ) -> dict[str, Any]:
        """Do the work, print its report on stdout, and return it; after Ctrl-C it is said how to go on."""
        from thinfer.pruning.recovery.session import Evaluation

        try:
            with opt.status() as progress:
                report = work(
                    places.model,
                    places.out,
                    options,
                    teacher=teacher,
                    text=self.text,
                    evaluation=Evaluation(*self.evaluation),
                    resume=self.resume,
                    device=self.device,
                    progress=progress,
                )
        except KeyboardInterrupt:
            opt.say(["interrupted; the same command with --resume continues"])
            raise
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return report


def training_options(
    *,
    loss: Annotated[
        Loss, typer.Option("--loss", help="lm: the likelihood of the text. distill: the distance to the dense model.")
    ],
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to train on.")],
    text: Annotated[
        Path | None,
        typer.Option("--text", help="UTF-8 text or .jsonl to train on. [default: an excerpt that ships with thinfer]"),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Highest learning rate.")],
    batch: Annotated[int, typer.Option("--batch", min=1, help="Windows of one step.")],
    micro_batch: Annotated[
        int, typer.Option("--micro-batch", min=1, help="Windows in memory together; divides --batch.")
    ],
    seqlen: Annotated[int, typer.Option("--seqlen", min=2, help="Tokens of a window.")],
    warmup: Annotated[float, typer.Option("--warmup", help="Fraction of the steps in which the rate rises.")],
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="AdamW's, on matrices.")],
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the adapters.")],
    alpha: Annotated[float, typer.Option("--alpha", help="The adapters' scale is alpha / rank.")],
    kl: Annotated[float, typer.Option("--kl-weight", help="Distill: of the dense model's predictions.")],
    hidden: Annotated[
        float | None,
        typer.Option("--hidden-weight", help="Distill: of its hidden states. [default: 1 if of one shape, else 0]"),
    ],
    lm: Annotated[float, typer.Option("--lm-weight", help="Distill: of the text's own likelihood.")],
    temperature: Annotated[float, typer.Option("--temperature", help="Distill: of the predictions.")],
    precision: Annotated[
        Precision, typer.Option("--precision", help="Of the arithmetic; what is trained stays float32.")
    ],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all that is drawn, and the order of windows.")],
    eval_text: Annotated[
        Path | None,
        typer.Option("--eval-text", help="Perplexity is measured there. [default: shipped chapters not trained on]"),
    ] = None,
    eval_ctx: Annotated[int, typer.Option("--eval-ctx", min=2, help="Tokens of a window there.")] = 512,
    eval_windows: Annotated[int, typer.Option("--eval-windows", min=1, help="Windows there.")] = 16,
    eval_stride: Annotated[int, typer.Option("--eval-stride", min=1, help="Take every so many of them.")] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an unfinished run; begins when there is none.")
    ] = False,
    checkpoint_minutes: Annotated[
        float, typer.Option("--checkpoint-minutes", min=0, help="Time between two saved states.")
    ],
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    threads: opt.Threads = None,
) -> Training:
    """The one declaration of the training options: verbs take these parameters by `with_training_options`.

    Those that are fields of `TextTraining` have their defaults there, in the verb's own class.
    """
    return Training(
        options={
            "loss": loss.value,
            "tokens": tokens,
            "lr": lr,
            "batch": batch,
            "micro_batch": micro_batch,
            "seqlen": seqlen,
            "warmup": warmup,
            "weight_decay": weight_decay,
            "rank": rank,
            "alpha": alpha,
            "kl": kl,
            "hidden": hidden,
            "lm": lm,
            "temperature": temperature,
            "precision": precision.value,
            "seed": seed,
            "checkpoint_minutes": checkpoint_minutes,
        },
        text=text,
        evaluation=(eval_text, eval_ctx, eval_windows, eval_stride),
        resume=resume,
        device=device,
        threads=threads,
    )


def with_training_options(
    options: type[TextTraining], *, rates: str, eval_windows: int
) -> Callable[[opt.Command], opt.Command]:
    """Decorate a verb: in place of its parameter ``training`` it shows the options of `training_options`.

    Args:
        options: where the defaults are.
        rates: the default learning rates, for the help.
        eval_windows: how many windows perplexity is measured on.

    Example:
        >>> @with_training_options(RecoverOptions, rates="2e-5", eval_windows=16)
        ... def verb(*, model: str, training: Training) -> None: ...
    """
    defaults = {field.name: field.default for field in fields(options)} | {"eval_windows": eval_windows}
    rate = Annotated[float | None, typer.Option("--lr", help=f"Highest learning rate. [default: {rates}]")]
    shown = []
    for declared in signature(training_options).parameters.values():
        parameter = declared.replace(default=defaults.get(declared.name, declared.default))
        shown.append(parameter.replace(annotation=rate) if declared.name == "lr" else parameter)
    assert all(parameter.default is not Parameter.empty for parameter in shown)  # noqa: S101 - a field was renamed
    return opt.with_options("training", shown, training_options)
