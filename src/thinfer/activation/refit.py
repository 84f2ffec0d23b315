"""The down matrices of a ReLU model, fitted layer by layer so that its hidden states come back to the dense model's.

Right after the swap every FFN gives something else, and the error grows from block to block. For each block in turn,
with a the neurons that the new model has there and e the difference of the hidden states behind the block, dense minus
new, the change D of the down matrix solves the ridge regression::

    min_D  Σ_t ‖e_t − D a_t‖² / ‖h_t‖²  +  λ ‖D‖²        D = C (G + λ I)⁻¹,  G = Σ a aᵀ/‖h‖²,  C = Σ e aᵀ/‖h‖²

with h the dense hidden states: each token counts by its own size, else the massive first one would be all that is
fitted. It takes three forward passes of a block and no gradients. The next block sees what the changed one gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinfer.activation.relu_swap import Ffn, neurons_seen
from thinfer.errors import CheckFailed
from thinfer.pruning.blocks import Block, find_stack
from thinfer.pruning.replay import Captured, capture, trace_blocks

RIDGE = 1e-2
"""λ as a share of the mean diagonal of G."""


@torch.no_grad()
def refit_down(
    student: Any,
    teacher: Any,
    ffns: Sequence[Ffn],
    windows: Sequence[Tensor],
    *,
    ridge: float = RIDGE,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, float]]:
    """Fit the down matrices of `student` in place; returns the relative error of every block before and after.

    A block whose error would not fall, as may be where a norm follows the FFN, keeps its matrix.

    Args:
        student: the model with ReLU, in evaluation mode.
        teacher: the dense model, of the same shape, on the same device.
        ffns: of the student.
        windows: token ids [batch, tokens], int64.
        ridge: λ as a share of the mean diagonal of G.
        progress: told the block.

    Raises:
        CheckFailed: hidden states are not finite.

    Example: ``refit_down(student, teacher, swap.ffns, [ids])[-1]["after"]``.
    """
    states = []
    for model in (student, teacher):
        stack = find_stack(model)
        states.append((stack, capture(model, stack, trace_blocks(model, stack, windows[0][:1, :16]), list(windows))))
    (own, mine), (dense, wanted) = states
    device = next(student.parameters()).device
    errors = []
    for block, original, ffn in zip(own.blocks, dense.blocks, ffns, strict=True):
        targets = [wanted.run(original, number, device) for number in range(len(windows))]
        gram, cross, before = _statistics(block, ffn, mine, targets)
        _require_finite(before, block.name)
        change = _solve(gram, cross, ridge)
        weight: Any = ffn.down.weight
        kept = weight.data.clone()
        # A Conv1D stores [inputs, outputs].
        weight.data += (change if change.shape == weight.shape else change.T).to(weight.dtype)
        after = sum(_error(mine.run(block, number, device), target) for number, target in enumerate(targets))
        if not after < before:
            weight.data, after = kept, before
        mine.hidden = [mine.run(block, number, device).cpu() for number in range(len(windows))]
        wanted.hidden = [target.cpu() for target in targets]
        tokens = sum(window.numel() for window in windows)
        errors.append({"before": before / tokens, "after": after / tokens})
        progress(f"fitting {block.name}: error {before / tokens:.4f} to {after / tokens:.4f}")
    return errors


def _statistics(block: Block, ffn: Ffn, mine: Captured, targets: Sequence[Tensor]) -> tuple[Tensor, Tensor, float]:
    """G [neurons, neurons], C [hidden, neurons] and the error summed over the tokens."""
    seen: list[Tensor] = []
    gram: Any = 0
    cross: Any = 0
    before = 0.0
    with neurons_seen([ffn], lambda _, neurons: seen.append(neurons)):
        for number, target in enumerate(targets):
            seen.clear()
            given = mine.run(block, number, target.device)
            scale = 1 / _sizes(target).sqrt()
            neurons = seen[0].flatten(0, -2).float() * scale
            error = (target - given).flatten(0, -2).float() * scale
            gram = gram + neurons.T @ neurons
            cross = cross + error.T @ neurons
            before += float(error.square().sum())
    return gram, cross, before


def _solve(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """C (G + λ I)⁻¹ [hidden, neurons], in float64."""
    damped = gram.double()
    # Neurons that never fire have an empty row: the ridge alone keeps it solvable.
    damped.diagonal().add_(ridge * damped.diagonal().mean() + torch.finfo(torch.float32).tiny)
    return torch.cholesky_solve(cross.double().T, torch.linalg.cholesky(damped)).T


def _error(given: Tensor, target: Tensor) -> float:
    return float(((target - given).flatten(0, -2).float().square().sum(1, keepdim=True) / _sizes(target)).sum())


def _sizes(target: Tensor) -> Tensor:
    """‖h‖² of every token, [tokens, 1]."""
    return target.flatten(0, -2).float().square().sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def _require_finite(error: float, name: str) -> None:
    if not error < float("inf"):
        raise CheckFailed(f"{name}: hidden states that are not finite; check the model (thinfer eval perplexity)")
