"""Masks that hold while a module is trained: what is pruned stays exactly zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from thinfer.errors import CheckFailed

Masks = dict[str, Tensor]
"""By parameter's name: bool, of its shape, False where it is pruned."""


def zero_masks(model: nn.Module) -> Masks:
    """Masks of the zeros that a module's matrices (parameters of two or more dimensions) have now.

    Matrices without any zero are left out. A tensor that two modules share has one mask, under its first name.

    Example: ``masks = zero_masks(model)`` before training a pruned model, ``require_zeros(model, masks)`` after it.
    """
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim > 1}
    masks = {name: parameter.detach() != 0 for name, parameter in matrices.items()}
    return {name: mask for name, mask in masks.items() if not mask.all()}


@contextmanager
def hold(model: nn.Module, masks: Masks) -> Iterator[Callable[[int], None]]:
    """Keep pruned weights at zero during a training: gives what `train` wants as `after_step`.

    Their gradients are zero too, so they count neither in the norm that is clipped nor in the optimizer's averages.
    The masks may change on the way; they are looked up at every step.

    Example:
        >>> with hold(model, masks) as after_step:  # doctest: +SKIP
        ...     train(model, loss, batches, options, after_step=after_step)
    """
    parameters = dict(model.named_parameters())
    apply_masks(model, masks)

    def silence(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if name in masks and parameter.grad is not None:
                parameter.grad.mul_(masks[name])

        return hook

    handles = [
        parameter.register_post_accumulate_grad_hook(silence(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
        if parameter.requires_grad and parameter.ndim > 1
    ]
    try:
        yield lambda _: apply_masks(model, masks)
    finally:
        for handle in handles:
            handle.remove()


def apply_masks(model: nn.Module, masks: Masks) -> None:
    """Set what the masks prune to zero, in place."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, mask in masks.items():
            parameters[name].masked_fill_(~mask, 0)


def require_zeros(model: nn.Module, masks: Masks) -> None:
    """Raise CheckFailed when a weight that the masks prune is not zero; the message names the first matrix."""
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        refilled = int((parameters[name].detach()[~mask] != 0).sum())
        if refilled:
            raise CheckFailed(
                f"{name}: {refilled} pruned weights are no longer zero; nothing was written. Train with "
                "--method masklora or full, which keep the zeros"
            )


def sparsity(masks: Masks) -> float:
    """Fraction of the weights under the masks that is pruned, 0 when there are none."""
    return sum(int((~mask).sum()) for mask in masks.values()) / max(sum(mask.numel() for mask in masks.values()), 1)
