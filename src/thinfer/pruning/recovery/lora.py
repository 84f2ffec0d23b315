"""Low-rank adapters on the matrices of a model's blocks, and a merge that keeps every zero.

LoRA: Hu et al. 2021 (arxiv.org/abs/2106.09685), y = W x + s·B A x. MaskLoRA: Zimmer et al. 2023, "PERP"
(arxiv.org/abs/2312.15230), y = (W + s·(B A) ⊙ M) x, where M is 0 wherever W is: what is trained is what is merged.
Plain LoRA is cheaper to train (no gradient of a whole matrix), but on a pruned matrix its merge must cut the part of
B A that lies under zeros, and the loss may jump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from thinfer.errors import UsageError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.recovery.trainer import Loss


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """How adapters are made; the defaults are those of LLM-Pruner's recovery.

    Attributes:
        rank: of B A.
        alpha: s = alpha / rank.
        dropout: of the inputs of A while training; MaskLoRA, which adapts weights and not inputs, has none.
        masked: MaskLoRA.
        seed: of A; B is zero at first, so that nothing changes before the first step.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.05
    masked: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 <= self.dropout < 1:
            raise UsageError(f"rank {self.rank} must be at least 1, dropout {self.dropout:g} from 0 to below 1")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise UsageError(f"alpha {self.alpha:g} must be a number above 0: the adapters' scale is alpha / rank")


class LowRank(nn.Module):
    """s · left · right, float32, for a weight [..., rows, columns]; its mask, where there is one, is of that shape."""

    mask: Tensor | None

    def __init__(self, weight: Tensor, options: LoraOptions, generator: torch.Generator) -> None:
        super().__init__()
        *experts, rows, columns = weight.shape
        self.scale = options.alpha / options.rank
        self.dropout = 0.0 if options.masked else options.dropout
        bound = 1 / math.sqrt(columns)
        right = torch.empty(*experts, options.rank, columns).uniform_(-bound, bound, generator=generator)
        self.left = nn.Parameter(torch.zeros(*experts, rows, options.rank, device=weight.device))
        self.right = nn.Parameter(right.to(weight.device))
        self.register_buffer("mask", weight.detach() != 0 if options.masked else None, persistent=False)

    def delta(self) -> Tensor:
        """What is added to the weight; float32 also where autocast would compute in less."""
        with torch.autocast(self.left.device.type, enabled=False):
            product = self.scale * (self.left @ self.right)
            return product if self.mask is None else product * self.mask

    def forward(self, weight: Tensor) -> Tensor:
        """The adapted weight, in the number type of the weight."""
        return (weight.float() + self.delta()).to(weight.dtype)

    def output(self, x: Tensor, transposed: bool) -> Tensor:
        """What the adapter adds to a layer's output for inputs x [..., inputs]."""
        x = dropout(x, self.dropout, self.training).to(self.left.dtype)
        product = x @ self.left @ self.right if transposed else linear(linear(x, self.right), self.left)
        return self.scale * product


class Adapters:
    """Adapters on every matrix of a model's blocks; only they are trained until `merge` or `remove`.

    Args:
        model: any model that `find_stack` understands; ordinary layers and fused experts alike.
        options: rank, scale and kind.

    Raises:
        UsageError: a rank above that of every matrix.

    Attributes:
        parameters: trainable numbers.

    Example:
        >>> adapters = Adapters(model, LoraOptions(masked=True))  # doctest: +SKIP
        >>> train(model, adapters.cached(lm_loss), batches, options)  # doctest: +SKIP
        >>> adapters.merge()  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, options: LoraOptions) -> None:
        # A fused parameter holds many matrices; it has one adapter.
        held = {id(matrix.parameter): matrix for matrix in find_stack(model).matrices.values()}
        highest = max(min(matrix.shape) for matrix in held.values())
        if options.rank > highest:
            raise UsageError(
                f"rank {options.rank}: no matrix of this model has a rank above {highest}; use a lower one"
            )
        self._frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
        generator = torch.Generator().manual_seed(options.seed)
        self._attached: list[_Attached] = []
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) in held:
                    low_rank = LowRank(parameter, options, generator)
                    as_weight = options.masked or parameter.ndim > 2
                    self._attached.append(_Attached(module, name, low_rank, held[id(parameter)].transposed, as_weight))
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        self.parameters = sum(p.numel() for item in self._attached for p in item.low_rank.parameters())

    def cached(self, loss: Loss) -> Loss:
        """The same loss, with every adapted weight computed once in it, however often the model asks for it."""

        def once(model: Any, batch: Any) -> Tensor:
            with parametrize.cached():
                return loss(model, batch)

        return once

    def merge(self, *, keep_zeros: bool = True) -> None:
        """Add the adapters to the weights, in place, and take them away; weights that are zero stay so if wanted."""
        for item in self._attached:
            item.detach(merge=True, keep_zeros=keep_zeros)
        self._thaw()

    def remove(self) -> None:
        """Take the adapters away; the model is what it was."""
        for item in self._attached:
            item.detach(merge=False)
        self._thaw()

    def _thaw(self) -> None:
        self._attached = []
        for parameter in self._frozen:
            parameter.requires_grad_(True)


class _Attached:
    """One adapter on one parameter of one module: on the weight itself, or beside the layer."""

    def __init__(self, module: nn.Module, name: str, low_rank: LowRank, transposed: bool, as_weight: bool) -> None:
        self.low_rank, self._module, self._name = low_rank, module, name
        self._hook: RemovableHandle | None = None
        if as_weight:
            parametrize.register_parametrization(module, name, low_rank)
        else:
            module.add_module("low_rank", low_rank)

            def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
                (x,) = (*args, *kwargs.values())
                return output + low_rank.output(x, transposed).to(output.dtype)

            self._hook = module.register_forward_hook(add, with_kwargs=True)

    def detach(self, merge: bool, keep_zeros: bool = True) -> None:
        if self._hook is None:
            parametrize.remove_parametrizations(self._module, self._name, leave_parametrized=False)
        else:
            self._hook.remove()
            del self._module.low_rank
        if merge:
            with torch.no_grad():
                weight = getattr(self._module, self._name)
                adapted = self.low_rank(weight)
                weight.copy_(torch.where(weight != 0, adapted, weight) if keep_zeros else adapted)
