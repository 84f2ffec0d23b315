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
    torch.matmul: ((0, "input"), (1, "other")),
    torch.Tensor.matmul: ((0, "self"), (1, "other")),
    torch.Tensor.__matmul__: ((0, "self"), (1, "other")),
}
"""The products of PyTorch that apply a weight, with the place and name of the input and of the weight."""


class InputObserver(TorchFunctionMode):
    """While active, calls `seen(matrix, x)` before a product of inputs x [..., inputs] with one of the matrices.

    A matrix is known by where its weights lie, so modules may apply it as they like: as a layer, or as a slice of a
    fused parameter. `seen` may raise to end the forward pass.

    Example:
        >>> with InputObserver(matrices, lambda matrix, x: print(matrix.name, x.shape)):  # doctest: +SKIP
        ...     block(hidden)
    """

    def __init__(self, matrices: Iterable[Matrix], seen: Callable[[Matrix, Tensor], None]) -> None:
        super().__init__()
        self._at = {matrix.stored.data_ptr(): matrix for matrix in matrices}
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        places = _PRODUCTS.get(func)
        if places is not None:
            x, weight = (args[index] if index < len(args) else kwargs[name] for index, name in places)
            matrix = self._at.get(weight.data_ptr())
            if matrix is not None and weight.numel() == matrix.size and x.shape[-1] == matrix.shape[1]:
                self._seen(matrix, x)
        return func(*args, **kwargs)
