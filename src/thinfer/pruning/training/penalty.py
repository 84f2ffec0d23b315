"""L1 and L2 regularisation of what may be pruned, as a loss around another loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from thinfer.errors import UsageError
from thinfer.pruning.recovery.trainer import Loss


def regularised(loss: Loss, kind: Literal["l1", "l2"], strength: float, names: Sequence[str]) -> Loss:
    """A loss with strength · Σ|w| ("l1") or strength · Σw² ("l2") of the named weights added.

    Han et al. 2015 found L1 better before retraining and L2 better after it. Unlike AdamW's decay, which is decoupled
    from the loss, this goes through the optimizer's averages.

    Raises:
        UsageError: a negative strength.

    Example: ``regularised(cross_entropy_of, "l2", 1e-4, prunable(model))``.
    """
    if strength < 0:
        raise UsageError(f"{kind} with strength {strength:g}: must not be negative")

    def with_penalty(model: Any, batch: Any) -> Tensor:
        parameters = dict(model.named_parameters())
        chosen = [parameters[name] for name in names]
        sizes = [weight.abs().sum() if kind == "l1" else weight.square().sum() for weight in chosen]
        return loss(model, batch) + strength * torch.stack(sizes).sum()

    return with_penalty
