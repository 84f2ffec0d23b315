"""Lottery tickets: small parts of a network that, trained alone from where they began, learn as well as the whole.

Frankle and Carbin 2018 (arxiv.org/abs/1803.03635): train, prune, put the survivors back to their first values, repeat.
Frankle et al. 2019 (arxiv.org/abs/1903.01611): deeper networks need the values after some steps. The control has the
same masks but fresh random values: where it is worse, the values mattered and not only the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from thinfer.pruning.recovery.masked import Masks
from thinfer.pruning.training.iterative import Fit, RewindWeights, prune_rounds
from thinfer.pruning.training.magnitude import Scope


@dataclass(frozen=True, slots=True)
class Ticket:
    """One ticket.

    Attributes:
        sparsity: fraction of the pruned weights that is zero, counted.
        score: of the ticket, trained from the rewound weights.
        control: of the same masks with fresh weights, trained from step 0; None when not asked for.
        masks: the ticket itself.
    """

    sparsity: float
    score: float
    control: float | None
    masks: Masks


def find_tickets(
    make: Callable[[int], nn.Module],
    fit: Fit,
    sparsities: Sequence[float],
    measure: Callable[[nn.Module], float],
    *,
    seed: int = 0,
    rewind_step: int = 0,
    control_seed: int | None = None,
    scope: Scope = "global",
    names: Sequence[str] | None = None,
) -> Iterator[Ticket]:
    """Train a network densely, then find a ticket of each sparsity, the next from the one before.

    Args:
        make: a fresh network of a seed.
        fit: how it is trained.
        sparsities: rising, as from `rounds`.
        measure: the score of a network.
        seed: of the network.
        rewind_step: survivors get the values they had after that many steps; 0: those they began with.
        control_seed: of the control's fresh weights; None: no control.
        scope: what competes for being kept.
        names: of the weights to prune; None: `prunable(model)`.

    Example: ``list(find_tickets(make, fit, rounds(0.95, 10), accuracy, control_seed=1))``.
    """
    model = make(seed)
    early = fit.dense(model, rewind_step)
    retrain = RewindWeights(fit, early, rewind_step)
    for found in prune_rounds(model, sparsities, retrain, measure, scope=scope, names=names):
        control = None
        if control_seed is not None:
            fresh = make(control_seed)
            fit.run(fresh, found.masks)
            control = measure(fresh)
        yield Ticket(found.sparsity, found.score, control, found.masks)
