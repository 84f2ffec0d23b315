"""What is made small on the way to ReLU, and what may change for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinfer.activation.relu_swap import Ffn, ReluSwap, neurons_seen
from thinfer.activation.relufy_options import RelufyOptions
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.recovery.trainer import Loss


@dataclass(frozen=True, slots=True)
class ReluLoss:
    """A loss of a batch (number, ids), at the share of ReLU and with the L1 penalty of that batch's step.

    The penalty is the mean over layers of mean |neuron| / root mean square of the layer's neurons, the latter taken as
    a constant: one strength fits layers of all sizes.

    Attributes:
        base: the loss of a model and ids.
        swap: the model's activations.
        options: ramp and penalty.

    Example: ``train(model, ReluLoss(lm_loss, swap, options), lambda n: (n, batches(n)), options.training)``.
    """

    base: Loss
    swap: ReluSwap
    options: RelufyOptions

    def __call__(self, model: Any, batch: tuple[int, Tensor]) -> Tensor:
        """The loss, a scalar; it depends on the number of the batch alone, so that a run can continue anywhere."""
        number, ids = batch
        step = number // self.options.training.accumulate
        self.swap.set(self.options.relu_share(step))
        strength = self.options.penalty(step)
        if not strength:
            return self.base(model, ids)
        with neuron_sizes(self.swap.ffns) as sizes:
            loss = self.base(model, ids)
        return loss + strength * torch.stack(sizes).mean()


@contextmanager
def neuron_sizes(ffns: tuple[Ffn, ...]) -> Iterator[list[Tensor]]:
    """A list that gains mean |neuron| / rms, with its gradient, of each layer that runs within."""
    sizes: list[Tensor] = []

    def see(layer: int, neurons: Tensor) -> None:
        values = neurons.float()
        sizes.append(values.abs().mean() / values.detach().square().mean().sqrt().clamp_min(1e-9))

    with neurons_seen(ffns, see):
        yield sizes


def choose_trainable(model: Any, ffns: tuple[Ffn, ...], what: str) -> None:
    """Let gradients reach the FFNs ("ffn"), the blocks ("blocks") or everything ("all"), and all norms and biases."""
    inside = f"{find_stack(model).name}."
    linears = {id(parameter) for ffn in ffns for linear in ffn.linears for parameter in linear.parameters()}
    for name, parameter in model.named_parameters():
        wanted = what == "all" or parameter.ndim == 1 or (what == "blocks" and name.startswith(inside))
        parameter.requires_grad_(wanted or id(parameter) in linears)
