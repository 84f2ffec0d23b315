"""How a model is turned into a ReLU model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from thinfer.errors import UsageError
from thinfer.pruning.recovery.lora import LoraOptions
from thinfer.pruning.recovery.trainer import TrainOptions

RATES = {False: 4e-4, True: 1e-3}
"""Learning rate where none is given, without and with adapters."""
REFIT_WINDOWS = 32


@dataclass(frozen=True, slots=True)
class RelufyOptions:
    """How a model is turned into a ReLU model.

    Attributes:
        stage: 1 replaces the activation of the FFNs, 2 puts ReLU behind the norms too.
        shift: b of max(x − b, 0).
        progressive: the old activation fades into ReLU, instead of being replaced at once.
        ramp: share of the steps that this takes.
        loss: "distill" is the distance to the dense model, "lm" the text's own likelihood.
        tokens: how many are trained on, begin tokens included; rounded up to whole steps.
        train: what: the FFNs, all of the blocks, or embeddings too; norms always. Adapters instead with `lora`.
        lora: train adapters of the blocks' matrices and merge them.
        rank: of the adapters.
        alpha: their scale is alpha / rank.
        l1: strength of the penalty on neurons; it grows along a sine from 0.
        generated: share of the windows that the dense model writes itself.
        refit: windows that the down matrices are fitted on before training; None: 32, and 0 where progressive.
        lr: highest learning rate; None: 4e-4, with adapters 1e-3.
        batch: windows of one step.
        micro_batch: windows that are in memory together; divides `batch`.
        seqlen: tokens of a window.
        warmup: fraction of the steps.
        weight_decay: AdamW's.
        kl: weight of the dense model's predictions.
        hidden: weight of its hidden states; None: 1 where they have the same shape, else 0.
        lm: weight of the text's own likelihood beside the dense model.
        temperature: of the predictions.
        precision: of the arithmetic.
        compile: compile both models with torch.compile; pays on a GPU.
        save_dtype: precision of the saved weights; "auto": as the model is stored.
        seed: of adapters, text that is written, and the order of the windows.
        eval_points: how often perplexity and zeros are measured on the way.
        checkpoint_minutes: time between two saved states.

    Raises:
        UsageError: a number that makes no sense.

    Example: ``RelufyOptions(tokens=200_000, l1=0.05)``.
    """

    stage: Literal[1, 2] = 1
    shift: float = 0.0
    progressive: bool = False
    ramp: float = 0.5
    loss: Literal["lm", "distill"] = "distill"
    tokens: int = 100_000
    train: Literal["ffn", "blocks", "all"] = "blocks"
    lora: bool = False
    rank: int = 32
    alpha: float = 64.0
    l1: float = 0.0
    generated: float = 0.0
    refit: int | None = None
    lr: float | None = None
    batch: int = 4
    micro_batch: int = 1
    seqlen: int = 256
    warmup: float = 0.05
    weight_decay: float = 0.0
    kl: float = 1.0
    hidden: float | None = None
    lm: float = 0.0
    temperature: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: int = 0
    eval_points: int = 10
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.batch < 1 or self.batch % self.micro_batch:
            raise UsageError(f"batch {self.batch} must be a multiple of micro-batch {self.micro_batch}")
        if self.tokens < 1 or self.seqlen < 2 or self.eval_points < 1:
            raise UsageError("tokens and points of evaluation must be at least 1, windows at least 2 tokens")
        for name, share in (("warm-up", self.warmup), ("ramp", self.ramp), ("generated", self.generated)):
            if not 0 <= share <= 1:
                raise UsageError(f"{name} {share:g}: a fraction, from 0 to 1")
        if not all(math.isfinite(value) and value >= 0 for value in (self.shift, self.l1)):
            raise UsageError(f"shift {self.shift:g} and L1 {self.l1:g}: must be numbers from 0")
        weights = (self.kl, self.hidden or 0.0, self.lm, self.temperature)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or self.temperature == 0:
            raise UsageError("weights of a loss must be numbers from 0, and the temperature one above 0")
        if self.loss == "distill" and not (self.kl or self.lm or self.hidden or self.hidden is None):
            raise UsageError("all weights of the loss are 0, so nothing would be learned; give --kl-weight 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed}: from 0 to {2**63 - 1}")
        if self.refit is not None and self.refit < 0:
            raise UsageError(f"{self.refit} windows to fit on; use 0 for none")
        if self.progressive and self.refit:
            raise UsageError("fitting the down matrices helps where ReLU comes at once: --refit or --progressive")
        # What trainer and adapters would refuse is refused before a model is loaded.
        _ = self.training, self.adapters

    @property
    def training(self) -> TrainOptions:
        """The trainer's options."""
        steps = math.ceil(self.tokens / (self.batch * self.seqlen))
        return TrainOptions(
            steps=steps,
            lr=RATES[self.lora] if self.lr is None else self.lr,
            warmup=round(self.warmup * steps),
            weight_decay=self.weight_decay,
            accumulate=self.batch // self.micro_batch,
            precision=self.precision,
            seed=self.seed,
            checkpoint_minutes=self.checkpoint_minutes,
        )

    @property
    def adapters(self) -> LoraOptions:
        """The adapters' options."""
        return LoraOptions(self.rank, self.alpha, 0.0, False, self.seed)

    @property
    def refit_windows(self) -> int:
        """Windows that the down matrices are fitted on."""
        return (0 if self.progressive else REFIT_WINDOWS) if self.refit is None else self.refit

    @property
    def generated_windows(self) -> int:
        """Windows that the dense model writes."""
        return math.ceil(self.generated * self.training.steps * self.batch)

    def relu_share(self, step: int) -> float:
        """How much of every activation is ReLU in a step, counted from 0; 1 from the end of the ramp on."""
        if not self.progressive or not self.ramp:
            return 1.0
        return min(1.0, (step + 1) / (self.ramp * self.training.steps))

    def penalty(self, step: int) -> float:
        """Strength of the L1 penalty in a step: half a sine wave from 0 up to `l1` (ProSparse, arxiv 2402.13516)."""
        return self.l1 * 0.5 * (1 - math.cos(math.pi * (step + 1) / self.training.steps))
