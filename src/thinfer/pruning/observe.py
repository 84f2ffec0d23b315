"""Sees the input of each matrix where it is multiplied, so that an expert sees only the tokens routed to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from thinfer.pruning.blocks import Matrix

_PRODUCTS: dict[Any, tuple[tuple[int, str], tuple[int, str]]] = {
    functional.linear: ((0, "input"), (1, "weight")),
    torch.addmm: ((1, "mat1"), (2, "mat2")),
    torch.Tensor.addmm: ((1, "mat1"), (2, "mat2")),
    torch.mm: ((0, "input"), (1, "mat2")),
    torch.Tensor.mm: ((0, "self"), (1, "mat2")),
    torch.bmm: ((0, "input"), (1, "mat2")),
    torch.Tensor.bmm: ((0, "self"), (1, "mat2")),
    torch.matmul: ((0, "input"), (1, "other")),
    torch.Tensor.matmul: ((0, "self"), (1, "other")),
    torch.Tensor.__matmul__: ((0, "self"), (1, "other")),
}
"""The products of PyTorch that apply a weight, with the place and name of their two factors."""


class InputObserver(TorchFunctionMode):
    """While active, calls `seen(matrix, x)` before a product of inputs x [..., inputs] with one of the matrices.

    A matrix is known by where its weights lie, so modules may apply it as they like: as a layer, as a slice of a fused
    parameter, or all experts at once. `seen` may raise to end the forward pass.

    Example:
        >>> with InputObserver(matrices, lambda matrix, x: print(matrix.name, x.shape)):  # doctest: +SKIP
        ...     block(hidden)
    """

    def __init__(self, matrices: Iterable[Matrix], seen: Callable[[Matrix, Tensor], None]) -> None:
        super().__init__()
        self._at: dict[int, Matrix] = {}
        self._fused: dict[int, list[Matrix]] = {}
        self._seen = seen
        for matrix in matrices:
            self._at[matrix.stored.data_ptr()] = matrix
            if matrix.expert is not None:
                self._fused.setdefault(matrix.parameter.data_ptr(), []).append(matrix)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        places = _PRODUCTS.get(func)
        if places is not None:
            left, right = (args[index] if index < len(args) else kwargs[name] for index, name in places)
            if not self._multiplied(right, left) and left.ndim > 1 and right.ndim > 1:
                # weight @ inputsᵀ
                self._multiplied(left, right.mT)
        return func(*args, **kwargs)

    def _multiplied(self, weight: Tensor, x: Tensor) -> bool:
        """Report the inputs if `weight` is a matrix, or all experts, that is watched."""
        place = weight.data_ptr()
        matrix, experts = self._at.get(place), self._fused.get(place)
        if matrix is not None and weight.numel() == matrix.size and x.shape[-1] == matrix.shape[1]:
            self._seen(matrix, x)
            return True
        if experts is not None and x.ndim == weight.ndim == 3 and len(x) == len(weight):
            for one in experts:
                if one.expert is not None and x.shape[-1] == one.shape[1]:
                    self._seen(one, x[one.expert])
            return True
        return False
