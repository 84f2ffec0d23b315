"""The stack of decoder blocks of a model and the matrices in it, found from its structure, not from names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinfer.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a block, [outputs, inputs] whatever its layout in the model.

    Attributes:
        name: name of the parameter without ".weight"; one expert of a fused parameter has its index, as in
            "model.layers.0.mlp.experts.down_proj[3]".
        parameter: what holds it.
        expert: index along the first axis of a fused parameter [experts, ...]; None for an ordinary one.
        transposed: whether it is stored as [inputs, outputs].
    """

    name: str
    parameter: nn.Parameter
    expert: int | None = None
    transposed: bool = False

    @property
    def stored(self) -> Tensor:
        """The matrix as the model holds it; writing to it changes the model."""
        data = self.parameter.detach()
        return data if self.expert is None else data[self.expert]

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        rows, columns = self.parameter.shape[-2:]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]

    @property
    def kind(self) -> str:
        """The name with every number replaced by "*": the same for this matrix of every block and expert."""
        return re.sub(r"(?<=[.\[])\d+(?=[.\]]|$)", "*", self.name)

    def read(self) -> Tensor:
        """A float32 copy [outputs, inputs], on the device of the model's matrix."""
        stored = self.stored.T if self.transposed else self.stored
        return stored.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def write(self, values: Tensor) -> None:
        """Put values [outputs, inputs] into the model, rounded to its number type."""
        self.stored.copy_(values.T if self.transposed else values)


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder block: its place in the stack, its module, and the matrices of it that can be pruned."""

    index: int
    name: str
    module: nn.Module
    matrices: tuple[Matrix, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """The decoder blocks of a model, in order.

    Attributes:
        name: name of the module list.
        blocks: all blocks; a matrix that several blocks share belongs to the first of them.
        skipped: matrices in the blocks that are not pruned, each with the reason.
    """

    name: str
    blocks: tuple[Block, ...]
    skipped: dict[str, str]

    @property
    def matrices(self) -> dict[str, Matrix]:
        """Every matrix that can be pruned, by name, in order."""
        return {matrix.name: matrix for block in self.blocks for matrix in block.matrices}


def find_stack(model: nn.Module) -> Stack:
    """Find the decoder blocks: of all module lists, the one with most parameters.

    Works on the meta device too. Prunable are the weights of every nn.Linear (and of transformers' Conv1D, stored
    transposed) and each expert of a fused parameter [experts, outputs, inputs].

    Raises:
        UnsupportedError: an encoder-decoder, a model without a stack of blocks, weights stored as integers.

    Example:
        >>> list(find_stack(model).matrices)[0]  # doctest: +SKIP
        'model.layers.0.self_attn.q_proj'
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{type(model).__name__} is an encoder-decoder; only stacks of decoder blocks are pruned"
        )
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    if not lists:
        raise UnsupportedError(f"{type(model).__name__} has no list of blocks (nn.ModuleList); it cannot be pruned")
    name = max(lists, key=lambda key: sum(parameter.numel() for parameter in lists[key].parameters()))
    modules = list(lists[name])
    if len({id(module) for module in modules}) < len(modules):
        raise UnsupportedError(f"{name}: some blocks are one and the same module; such a stack cannot be pruned")
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    # Names of a tied parameter: only those that do not lie in the stack count as a use outside.
    outside = {
        id(parameter): other
        for other, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in inside and not other.startswith(f"{name}.")
    }
    taken: dict[int, str] = {}
    skipped: dict[str, str] = {}
    blocks = []
    for index, module in enumerate(modules):
        matrices = []
        for matrix in _matrices(module, f"{name}.{index}"):
            key = id(matrix.parameter)
            if key in outside:
                skipped[matrix.name] = f"shared with {outside[key]}, which lies outside the blocks"
            elif taken.setdefault(key, _parameter_name(matrix)) != _parameter_name(matrix):
                skipped[matrix.name] = f"the same parameter as {taken[key]}"
            else:
                matrices.append(matrix)
        blocks.append(Block(index, f"{name}.{index}", module, tuple(matrices)))
    if not any(block.matrices for block in blocks):
        raise UnsupportedError(f"{name} holds no weight matrices that can be pruned (nn.Linear, Conv1D, fused experts)")
    return Stack(name, tuple(blocks), skipped)


def _matrices(block: nn.Module, prefix: str) -> Iterator[Matrix]:
    for path, module in block.named_modules():
        name = f"{prefix}.{path}" if path else prefix
        if isinstance(module, nn.Linear) or _is_conv1d(module):
            weight = module.weight
            if not isinstance(weight, nn.Parameter) or not weight.is_floating_point() or weight.ndim != 2:
                raise UnsupportedError(f"{name} is quantised; load the model with float32 or bfloat16 weights")
            yield Matrix(name, weight, transposed=not isinstance(module, nn.Linear))
        elif not type(module).__module__.startswith("torch.nn."):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3 and min(parameter.shape) > 1 and parameter.is_floating_point():
                    transposed = bool(getattr(module, "is_transposed", False))
                    for expert in range(len(parameter)):
                        yield Matrix(f"{name}.{own}[{expert}]", parameter, expert, transposed)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D, a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _parameter_name(matrix: Matrix) -> str:
    return matrix.name.partition("[")[0]
