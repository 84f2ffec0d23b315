"""How a model is turned into a ReLU model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from thinfer.errors import UsageError
from thinfer.pruning.recovery.options import TextTraining

if TYPE_CHECKING:
    from thinfer.pruning.recovery.lora import LoraOptions

RATES = {False: 4e-4, True: 1e-3}
"""Learning rate where none is given, without and with adapters."""
REFIT_WINDOWS = 32


@dataclass(frozen=True, slots=True)
class RelufyOptions(TextTraining):
    """How a model is turned into a ReLU model; see `TextTraining` for the rest.

    Attributes:
        stage: 1 replaces the activation of the FFNs, 2 puts ReLU behind the norms too.
        shift: b of max(x − b, 0).
        progressive: the old activation fades into ReLU, instead of being replaced at once.
        ramp: share of the steps that this takes.
        train: what: the FFNs, all of the blocks, or embeddings too; norms always. Adapters instead with `lora`.
        lora: train adapters of the blocks' matrices and merge them.
        l1: strength of the penalty on neurons; it grows along a sine from 0.
        generated: share of the windows that the dense model writes itself.
        refit: windows that the down matrices are fitted on before training; None: 32, and 0 where progressive.
        compile: compile both models with torch.compile; pays on a GPU.
        save_dtype: precision of the saved weights; "auto": as the model is stored.
        eval_points: how often perplexity and zeros are measured on the way.

    Raises:
        UsageError: a number that makes no sense.

    Example: ``RelufyOptions(tokens=200_000, l1=0.05)``.
    """

    loss: Literal["lm", "distill"] = "distill"
    seqlen: int = 256
    rank: int = 32
    alpha: float = 64.0
    checkpoint_minutes: float = 5.0
    stage: Literal[1, 2] = 1
    shift: float = 0.0
    progressive: bool = False
    ramp: float = 0.5
    train: Literal["ffn", "blocks", "all"] = "blocks"
    lora: bool = False
    l1: float = 0.0
    generated: float = 0.0
    refit: int | None = None
    compile: bool = False
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    eval_points: int = 10

    def __post_init__(self) -> None:
        # A dataclass with slots is made anew, so that super() without names would look for the class it replaced.
        TextTraining.__post_init__(self)
        if self.eval_points < 1:
            raise UsageError(f"{self.eval_points} points of evaluation: at least 1")
        for name, share in (("ramp", self.ramp), ("generated", self.generated)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name} {share:g}: a fraction, from 0 to 1")
        if not all(math.isfinite(value) and value >= 0 for value in (self.shift, self.l1)):
            raise UsageError(f"shift {self.shift:g} and L1 {self.l1:g}: must be numbers from 0")
        if self.refit is not None and self.refit < 0:
            raise UsageError(f"{self.refit} windows to fit on; use 0 for none")
        if self.progressive and self.refit:
            raise UsageError("fitting the down matrices helps where ReLU comes at once: --refit or --progressive")

    def facts(self) -> dict[str, Any]:
        """The options that change what comes out of a training, by name, as JSON."""
        facts = TextTraining.facts(self)
        del facts["eval_points"], facts["save_dtype"]
        return facts

    @property
    def usual_lr(self) -> float:
        """The learning rate where none is given."""
        return RATES[self.lora]

    @property
    def adapters(self) -> LoraOptions:
        """The adapters' options."""
        from thinfer.pruning.recovery.lora import LoraOptions

        return LoraOptions(self.rank, self.alpha, 0.0, False, self.seed)

    @property
    def refit_windows(self) -> int:
        """Windows that the down matrices are fitted on."""
        return (0 if self.progressive else REFIT_WINDOWS) if self.refit is None else self.refit

    @property
    def generated_windows(self) -> int:
        """Windows that the dense model writes."""
        return math.ceil(self.generated * self.steps * self.batch)

    def relu_share(self, step: int) -> float:
        """How much of every activation is ReLU in a step, counted from 0; 1 from the end of the ramp on."""
        if not self.progressive or not self.ramp:
            return 1.0
        return min(1.0, (step + 1) / (self.ramp * self.steps))

    def penalty(self, step: int) -> float:
        """Strength of the L1 penalty in a step."""
        return self.l1 * half_sine(step, self.steps)


def half_sine(step: int, steps: int) -> float:
    """Half a sine wave from 0 before the first step to 1 in the last (ProSparse, arxiv 2402.13516).

    Example:
        >>> half_sine(9, 20)
        0.49999999999999994
    """
    return 0.5 * (1 - math.cos(math.pi * (step + 1) / steps))
