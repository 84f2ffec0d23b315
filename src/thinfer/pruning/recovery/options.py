"""How a model is trained on text; PyTorch is not needed to say so, and the command line reads its defaults here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from thinfer.errors import UsageError

if TYPE_CHECKING:
    from thinfer.pruning.recovery.lora import LoraOptions
    from thinfer.pruning.recovery.trainer import TrainOptions

RATES = {"lora": 5e-4, "masklora": 5e-4, "full": 2e-5}
"""Learning rate of each method of recovery where none is given."""


@dataclass(frozen=True, slots=True)
class TextTraining(ABC):
    """What every training on text has: its loss, its length, its steps, and the adapters that may be trained.

    Attributes:
        loss: "lm" is the text's own likelihood, "distill" the distance to the dense model.
        tokens: how many are trained on, begin tokens included; rounded up to whole steps.
        lr: highest learning rate; None: the usual one of what is trained.
        batch: windows of one step.
        micro_batch: windows that are in memory together; divides `batch`.
        seqlen: tokens of a window.
        warmup: fraction of the steps.
        weight_decay: AdamW's.
        rank: of the adapters.
        alpha: their scale is alpha / rank.
        kl: weight of the dense model's predictions.
        hidden: weight of its hidden states; None: 1 where they have the same shape, else 0.
        lm: weight of the text's own likelihood beside the dense model.
        temperature: of the predictions.
        precision: of the arithmetic.
        seed: of all that is drawn at random: adapters, dropout, the order of the windows.
        checkpoint_minutes: time between two saved states.

    Raises:
        UsageError: a number that makes no sense.
    """

    loss: Literal["lm", "distill"] = "lm"
    tokens: int = 100_000
    lr: float | None = None
    batch: int = 4
    micro_batch: int = 1
    seqlen: int = 512
    warmup: float = 0.05
    weight_decay: float = 0.0
    rank: int = 8
    alpha: float = 16.0
    kl: float = 1.0
    hidden: float | None = None
    lm: float = 0.0
    temperature: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    checkpoint_minutes: float = 10.0

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.batch < 1 or self.batch % self.micro_batch:
            raise UsageError(f"batch {self.batch} must be a multiple of micro-batch {self.micro_batch}")
        if self.tokens < 1 or self.seqlen < 2:
            raise UsageError(f"{self.tokens} tokens in windows of {self.seqlen}: at least 1, of at least 2")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed}: from 0 to {2**63 - 1}")
        if not 0 <= self.warmup <= 1:
            raise UsageError(f"warm-up {self.warmup:g}: a fraction of the steps, from 0 to 1")
        weights = (self.kl, self.hidden or 0.0, self.lm, self.temperature)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or self.temperature == 0:
            raise UsageError("weights of a loss must be numbers from 0, and the temperature one above 0")
        if self.loss == "distill" and not (self.kl or self.lm or self.hidden or self.hidden is None):
            raise UsageError("all weights of the loss are 0, so nothing would be learned; give --kl-weight 1")
        # What trainer and adapters would refuse is refused before a model is loaded.
        _ = self.training, self.adapters

    @property
    @abstractmethod
    def usual_lr(self) -> float:
        """The learning rate where none is given."""

    @property
    @abstractmethod
    def adapters(self) -> LoraOptions:
        """The adapters' options."""

    def facts(self) -> dict[str, Any]:
        """The options that change what comes out of a training, by name, as JSON."""
        facts = asdict(self)
        del facts["checkpoint_minutes"]
        return facts

    @property
    def steps(self) -> int:
        """Updates of the weights."""
        return math.ceil(self.tokens / (self.batch * self.seqlen))

    @property
    def training(self) -> TrainOptions:
        """The trainer's options."""
        from thinfer.pruning.recovery.trainer import TrainOptions

        return TrainOptions(
            steps=self.steps,
            lr=self.usual_lr if self.lr is None else self.lr,
            warmup=round(self.warmup * self.steps),
            weight_decay=self.weight_decay,
            accumulate=self.batch // self.micro_batch,
            precision=self.precision,
            seed=self.seed,
            checkpoint_minutes=self.checkpoint_minutes,
        )


@dataclass(frozen=True, slots=True)
class RecoverOptions(TextTraining):
    """How a pruned model is trained again; see `TextTraining` for the rest.

    Attributes:
        method: "masklora" and "lora" train adapters on the matrices of the blocks, "full" trains every weight.
        dropout: of "lora".

    Raises:
        UsageError: a number that makes no sense.

    Example: ``RecoverOptions(method="full", tokens=1_000_000)``.
    """

    method: Literal["lora", "masklora", "full"] = "masklora"
    dropout: float = 0.05

    @property
    def usual_lr(self) -> float:
        """The learning rate where none is given."""
        return RATES[self.method]

    @property
    def adapters(self) -> LoraOptions:
        """The adapters' options."""
        from thinfer.pruning.recovery.lora import LoraOptions

        return LoraOptions(self.rank, self.alpha, self.dropout, self.method == "masklora", self.seed)
