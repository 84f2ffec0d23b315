"""ShortGPT: layers that change the residual stream least go (https://arxiv.org/abs/2403.03853)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.structured.base import Notes, Progress, Windows, run_windows
from thinfer.pruning.structured.method import StructuredMethod, Work
from thinfer.pruning.structured.surgery import Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ShortGPT(StructuredMethod):
    """Drops the layers of lowest block influence, 1 − cos(what goes in, what comes out), averaged over all tokens.

    Attributes:
        protect_first: first layers that stay.
        protect_last: last layers that stay.

    Example:
        >>> ShortGPT().prune(model, windows, 0.25).kept["layers"]
        [[0, 1, 2, 3, 4, 7]]
    """

    protect_first: int = 0
    protect_last: int = 0

    def cut(self, work: Work) -> tuple[Cut, Notes]:
        """Fewer layers, round(sparsity · layers) of them.

        Raises:
            UsageError: that is no layer, or more than are not protected; windows of several lengths.
            CheckFailed: a hidden state is NaN or infinite.
        """
        influence = block_influence(work.model, work.windows, work.progress)
        layers = layers_to_keep(influence, work.sparsity, self.protect_first, self.protect_last)
        notes: Notes = {f"block_influence[{layer}]": value for layer, value in enumerate(influence.tolist())}
        return Cut(work.configuration.layers(layers), layers=layers), notes


def layers_to_keep(importance: Tensor, sparsity: float, protect_first: int, protect_last: int) -> list[int]:
    """Layers that stay when round(sparsity · layers) go, the least important first; of equal ones the last.

    Raises:
        UsageError: no layer would go, or too few are not protected.
    """
    count = len(importance)
    going = round(sparsity * count)
    free = range(protect_first, count - protect_last)
    if min(protect_first, protect_last) < 0:
        raise UsageError("protect_first and protect_last must be 0 or more")
    if going == 0:
        raise UsageError(
            f"sparsity {sparsity} is less than half of one of {count} layers; ask for {1 / count:.3f} or more"
        )
    if going > min(len(free), count - 1):
        raise UsageError(
            f"{going} of {count} layers shall go, but {max(0, min(len(free), count - 1))} can; "
            "ask for less sparsity or protect fewer layers"
        )
    order = sorted(free, key=lambda layer: (float(importance[layer]), -layer))
    return sorted(set(range(count)) - set(order[:going]))


def block_influence(model: PreTrainedModel, windows: Windows, progress: Progress | None = None) -> Tensor:
    """1 − mean cosine between the input and the output of each block, over all tokens, [layers].

    Raises:
        CheckFailed: a hidden state is NaN or infinite.
    """
    blocks = [block.module for block in find_stack(model).blocks]
    sums = torch.zeros(len(blocks), dtype=torch.float64)
    handles = [
        block.register_forward_hook(_cosine(sums, index), with_kwargs=True) for index, block in enumerate(blocks)
    ]
    try:
        tokens = run_windows(model, windows, progress, "block influence")
    finally:
        for handle in handles:
            handle.remove()
    influence = 1 - sums / tokens
    if not torch.isfinite(influence).all():
        raise CheckFailed("a hidden state is NaN or infinite on the calibration text; load the model in float32")
    return influence


def _cosine(sums: Tensor, index: int) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        cosine = torch.nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
        sums[index] += cosine.sum().double().cpu()

    return hook


METHOD = ShortGPT
