"""Prune and train again, round by round or while training.

After a round the weights that are left are trained in one of three ways (Renda et al. 2020, arxiv.org/abs/2003.02389):
`FineTune` goes on from them at a rate of its own, `RewindRate` goes on from them through the learning rates of the
original training once more, `RewindWeights` also puts them back to what they were early in that training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from thinfer.errors import UsageError
from thinfer.pruning.recovery.masked import Masks, apply_masks, hold, sparsity
from thinfer.pruning.recovery.trainer import Batches, Loss, TrainOptions, TrainResult, train
from thinfer.pruning.training.magnitude import Scope, magnitude_masks
from thinfer.pruning.training.schedule import CubicSchedule

Weights = Mapping[str, Tensor]
"""A state_dict."""

Retrain = Callable[[nn.Module, Masks], None]
"""Trains what the masks keep."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How a module is trained: loss, batches and options of `train`, with masks that hold."""

    loss: Loss
    batches: Batches
    options: TrainOptions

    def run(
        self,
        model: nn.Module,
        masks: Masks | None = None,
        *,
        first: int = 0,
        after_step: Callable[[int], None] = lambda _: None,
    ) -> TrainResult:
        """Train from step `first` to the end; `after_step` comes before the masks are applied, and may change them."""
        masks = {} if masks is None else masks
        with hold(model, masks) as keep:

            def both(step: int) -> None:
                after_step(step)
                keep(step)

            return train(model, self.loss, self.batches, self.options, first=first, after_step=both)

    def dense(self, model: nn.Module, rewind_step: int = 0) -> Weights:
        """Train the whole model and return its weights as they were after `rewind_step` steps (0: before any).

        Raises UsageError for a step that the training does not have.
        """
        if not 0 <= rewind_step <= self.options.steps:
            raise UsageError(f"rewinding to step {rewind_step}: the training has {self.options.steps}")
        early = snapshot(model) if rewind_step == 0 else {}

        def remember(step: int) -> None:
            if step + 1 == rewind_step:
                early.update(snapshot(model))

        self.run(model, after_step=remember)
        return early


@dataclass(frozen=True, slots=True)
class FineTune:
    """Go on from the weights that are left; Han et al. use a tenth to a hundredth of the original rate."""

    fit: Fit

    def __call__(self, model: nn.Module, masks: Masks) -> None:
        """Train what the masks keep."""
        self.fit.run(model, masks)


@dataclass(frozen=True, slots=True)
class RewindRate:
    """Learning-rate rewinding: go on from the weights that are left, with the training's rates from `step` on."""

    fit: Fit
    step: int = 0

    def __call__(self, model: nn.Module, masks: Masks) -> None:
        """Train what the masks keep."""
        self.fit.run(model, masks, first=self.step)


@dataclass(frozen=True, slots=True)
class RewindWeights:
    """Weight rewinding: put what is left back to `weights`, those after `step` steps, and train from there."""

    fit: Fit
    weights: Weights
    step: int = 0

    def __call__(self, model: nn.Module, masks: Masks) -> None:
        """Train what the masks keep."""
        model.load_state_dict(self.weights)
        self.fit.run(model, masks, first=self.step)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round gave: the sparsity counted, the score of the model, and its masks."""

    sparsity: float
    score: float
    masks: Masks


def prune_rounds(
    model: nn.Module,
    sparsities: Sequence[float],
    retrain: Retrain,
    measure: Callable[[nn.Module], float],
    *,
    scope: Scope = "global",
    names: Sequence[str] | None = None,
) -> Iterator[Round]:
    """Prune a trained module to each sparsity in turn by magnitude, training again after each.

    Args:
        model: trained; it is changed in place, and is that of the round when a round is given out.
        sparsities: rising, as from `rounds`; one alone is one-shot pruning.
        retrain: `FineTune`, `RewindRate`, `RewindWeights` or any function of a module and its masks.
        measure: the score of a module.
        scope: what competes for being kept.
        names: of the weights to prune; None: `prunable(model)`.

    Raises:
        UsageError: sparsities that fall.
    """
    masks: Masks = {}
    for wanted in sparsities:
        masks = magnitude_masks(model, wanted, scope, names, masks)
        apply_masks(model, masks)
        retrain(model, masks)
        yield Round(sparsity(masks), measure(model), masks)


def prune_gradually(
    model: nn.Module,
    fit: Fit,
    schedule: CubicSchedule,
    *,
    scope: Scope = "global",
    names: Sequence[str] | None = None,
    first: int = 0,
) -> Masks:
    """Train a module while its sparsity grows along a schedule, and return the masks, which hold at the end.

    Raises:
        UsageError: the schedule ends after the training.
    """
    if schedule.end >= fit.options.steps:
        raise UsageError(f"pruning until step {schedule.end} needs more than {fit.options.steps} steps of training")
    masks: Masks = {}

    def grow(step: int) -> None:
        if schedule.due(step):
            masks.update(magnitude_masks(model, schedule.sparsity(step), scope, names, masks))

    fit.run(model, masks, first=first, after_step=grow)
    return masks


def snapshot(model: nn.Module) -> dict[str, Any]:
    """A copy of a module's weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
