"""How much each weight matters to the loss, by its gradient, its magnitude, or chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from thinfer.errors import CheckFailed
from thinfer.pruning.structured.base import Progress, evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Importance = Literal["vector", "element1", "element2", "mix", "l1", "l2", "random"]

FIRST = ("vector", "element1", "mix")
SECOND = ("element2", "mix")


class Salience:
    """Importance of weights w with mean gradients g and mean squared gradients F of a sample (arXiv 2305.11627).

    "vector" |Σ w·g|, "element1" Σ|w·g|, "element2" Σ|w²F|, "mix" Σ|w·g − ½w²F|, "l1" Σ|w|, "l2" Σw², "random".
    Everything is float32 whatever the number type of the model: squares of small gradients are below float16.

    Args:
        model: its gradients are taken one sample at a time, and only of the parameters named.
        names: parameters.
        importance: the formula.
        ids: token ids, [samples, tokens].
        seed: for "random".
        progress: told of each sample.

    Raises:
        CheckFailed: a loss or a gradient is NaN or infinite, or all gradients are zero.

    Example:
        >>> Salience(model, ["model.layers.0.mlp.down_proj.weight"], "element1", ids).along(
        ...     "model.layers.0.mlp.down_proj.weight", 1
        ... ).shape
        torch.Size([1536])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: Sequence[str],
        importance: Importance,
        ids: Tensor,
        *,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self._importance = importance
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._weights = {name: parameters[name] for name in names}
        self._generator = torch.Generator().manual_seed(seed)
        self._first: dict[str, Tensor] = {}
        self._second: dict[str, Tensor] = {}
        if importance in (*FIRST, *SECOND):
            self._accumulate(model, ids, progress)

    def along(self, name: str, dim: int) -> Tensor:
        """Importance of each slice of a parameter across a dimension, [size of dim], float32, on the CPU."""
        weight = self._weights[name].detach().float()
        if self._importance == "random":
            return torch.rand(weight.shape[dim], generator=self._generator)
        values = (
            self._of(name, weight).movedim(dim, 0).flatten(1) if weight.ndim > 1 else self._of(name, weight)[:, None]
        )
        return (values.sum(1).abs() if self._importance == "vector" else values.abs().sum(1)).cpu()

    def _of(self, name: str, weight: Tensor) -> Tensor:
        if self._importance == "l1":
            return weight
        if self._importance == "l2":
            return weight.square()
        if self._importance == "element2":
            return weight.square() * self._second[name]
        first = weight * self._first[name]
        return first - weight.square() * self._second[name] / 2 if self._importance == "mix" else first

    def _accumulate(self, model: PreTrainedModel, ids: Tensor, progress: Progress | None) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        model.requires_grad_(False)
        try:
            for weight in self._weights.values():
                weight.requires_grad_(True)
            with evaluating(model):
                for done, sample in enumerate(ids):
                    if progress is not None:
                        progress(done, len(ids), "gradients")
                    self._add(_loss(model, sample[None].to(model.device)), len(ids))
        finally:
            model.requires_grad_(False)
            for parameter in trained:
                parameter.requires_grad_(True)
        sums = self._second if self._importance in SECOND else self._first
        if not any(bool(values.any()) for values in sums.values()):
            raise CheckFailed("all gradients are zero on the calibration text; load the model in float32 or bfloat16")

    def _add(self, loss: Tensor, samples: int) -> None:
        if not torch.isfinite(loss):
            raise CheckFailed(
                "the loss is NaN or infinite on the calibration text; load the model in float32 or bfloat16"
            )
        gradients = torch.autograd.grad(loss, list(self._weights.values()))
        for name, gradient in zip(self._weights, gradients, strict=True):
            value = gradient.float()
            if not torch.isfinite(value).all():
                raise CheckFailed(f"the gradient of {name} is NaN or infinite; load the model in float32 or bfloat16")
            if self._importance in FIRST:
                self._first[name] = self._first.get(name, 0) + value / samples
            if self._importance in SECOND:
                self._second[name] = self._second.get(name, 0) + value.square() / samples


def _loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean negative log-likelihood of each next token; ids [1, tokens]."""
    with torch.enable_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        return nn.functional.cross_entropy(logits, ids[0, 1:])
