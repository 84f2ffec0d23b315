"""Runs a model one block at a time: what each block is called with is captured once, then blocks run alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinfer.errors import UnsupportedError
from thinfer.pruning.blocks import Block, Matrix, Stack
from thinfer.pruning.observe import InputObserver

_POOL_DEPTH = 8
"""Distinct values of one argument that are remembered to share memory: a mask for each kind of layer, and spares."""


@dataclass(frozen=True, slots=True)
class Call:
    """Every argument of one call of a block; the hidden states are left out, `_HIDDEN` stands in their place."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """What a short run showed of one block.

    Attributes:
        outputs: length of the tuple that it returns, hidden states first; 0 where it returns a tensor.
        inputs: the distinct inputs of matrices in the order of use, each as the names of the matrices that it meets.
        once: whether no matrix was applied twice in one forward pass.
    """

    outputs: int
    inputs: tuple[tuple[str, ...], ...]
    once: bool


@dataclass(slots=True)
class Captured:
    """The state of a run, block by block.

    Attributes:
        hidden: hidden states [windows, tokens, width] before the next block, one tensor a batch, in main memory.
        calls: the other arguments of each block, by block and batch.
    """

    hidden: list[Tensor]
    calls: list[list[Call]]

    def run(self, block: Block, batch: int, device: torch.device | str) -> Tensor:
        """Hidden states of a batch after `block`, on `device`, where the block must lie; `hidden` stays as it is."""
        # The copy: some blocks add to their input in place.
        hidden = self.hidden[batch].to(device, copy=True)
        return call_block(block, self.calls[block.index][batch], hidden)


class _Hidden:
    """Stands for the hidden states among the arguments of a call."""


_HIDDEN = _Hidden()


class _AllCapturedError(Exception):
    """Ends a forward pass early; never seen outside."""


def call_block(block: Block, call: Call, hidden: Tensor) -> Tensor:
    """Run one block on `hidden` with the other arguments of `call`, moved to the device of `hidden`."""

    def place(value: Any) -> Any:
        if value is _HIDDEN:
            return hidden
        return value.to(hidden.device) if isinstance(value, Tensor) else value

    output = block.module(*_mapped(call.args, place), **_mapped(call.kwargs, place))
    return cast(Tensor, output if isinstance(output, Tensor) else output[0])


@torch.no_grad()
def trace_blocks(model: nn.Module, stack: Stack, window: Tensor) -> tuple[BlockTrace, ...]:
    """Run a short window [1, tokens] through the model and again block by block, and see how the blocks work.

    Raises:
        UnsupportedError: the blocks, run one by one, do not give what the model gives; the message says where.
    """
    records: list[tuple[Tensor, Tensor, int]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple | list) else None
        found = _find_hidden(args, kwargs, window)
        if found is None or not isinstance(hidden, Tensor) or hidden.shape != found.shape:
            raise UnsupportedError(f"{stack.name}: the blocks do not map hidden states to hidden states of one shape")
        # Copies: a later block may add to its input in place.
        records.append((before.pop(), hidden.clone(), 0 if isinstance(output, Tensor) else len(output)))
        if len(records) == len(stack.blocks):
            raise _AllCapturedError

    before: list[Tensor] = []

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = _find_hidden(args, kwargs, window)
        before.append(torch.empty(0) if found is None else found.clone())

    with ExitStack() as hooks:
        for block in stack.blocks:
            hooks.callback(block.module.register_forward_pre_hook(remember, with_kwargs=True).remove)
            hooks.callback(block.module.register_forward_hook(record, with_kwargs=True).remove)
        _forward(model, window)
    if len(records) < len(stack.blocks):
        raise UnsupportedError(f"{stack.name}: the model runs {len(records)} of {len(stack.blocks)} blocks")
    outputs = [length for _, _, length in records]
    captured = _capture(model, stack, outputs, [window])
    traces = []
    # Backwards: what a block left behind for the next one is then not there.
    for block in reversed(stack.blocks):
        hidden, expected, _ = records[block.index]
        following = records[block.index + 1][0] if block.index + 1 < len(records) else expected
        groups = _Groups()
        captured.hidden = [hidden]
        with InputObserver(block.matrices, groups.seen):
            replayed = captured.run(block, 0, hidden.device)
        if not (_close(replayed, expected) and _close(following, expected)):
            raise UnsupportedError(
                f"{block.name}: run alone it does not give what it gives in the model; "
                "blocks that pass each other more than hidden states are not supported"
            )
        traces.append(BlockTrace(outputs[block.index], groups.names, groups.once))
    return tuple(reversed(traces))


def capture(model: nn.Module, stack: Stack, traces: tuple[BlockTrace, ...], batches: list[Tensor]) -> Captured:
    """Run everything before the blocks on batches of windows [windows, tokens], and capture what blocks are given.

    Raises:
        UnsupportedError: the model does something to the hidden states between its blocks.
    """
    return _capture(model, stack, [trace.outputs for trace in traces], batches)


@torch.no_grad()
def head_logits(model: nn.Module, stack: Stack, outputs: int, window: Tensor, hidden: Tensor) -> Tensor:
    """Logits [windows, tokens, vocabulary] that the model makes of given hidden states after its last block.

    `outputs` is that of the last block's `BlockTrace`; `hidden` [windows, tokens, width] comes of the tokens `window`.
    """

    def instead(block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = hidden if block.index == len(stack.blocks) - 1 else _find_hidden(args, kwargs, window)
        return result if not outputs else (result, *[None] * (outputs - 1))

    with _replaced(stack, instead):
        output = model(input_ids=window, use_cache=False)
    return cast(Tensor, output.logits if hasattr(output, "logits") else output[0])


def _capture(model: nn.Module, stack: Stack, outputs: list[int], batches: list[Tensor]) -> Captured:
    captured = Captured([], [[] for _ in stack.blocks])
    pool: dict[str, list[Tensor]] = {}
    for ids in batches:
        current: list[Tensor] = []

        def instead(
            block: Block,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            ids: Tensor = ids,
            current: list[Tensor] = current,
        ) -> Any:
            if not current:
                found = _find_hidden(args, kwargs, ids)
                if found is None:
                    raise UnsupportedError(f"{stack.name}: no argument of the blocks looks like hidden states")
                current.append(found)
                captured.hidden.append(found.detach().to("cpu", copy=True))
            hidden = current[0]
            if not any(value is hidden for value in (*args, *kwargs.values())):
                raise UnsupportedError(f"{block.name}: the model changes the hidden states between its blocks")
            if len(captured.calls[block.index]) == len(captured.hidden):
                raise UnsupportedError(f"{block.name}: the model runs this block more than once")
            shared = _sharing(pool, hidden)
            captured.calls[block.index].append(Call(_mapped(args, shared), _mapped(kwargs, shared)))
            if block.index == len(stack.blocks) - 1:
                raise _AllCapturedError
            return hidden if not outputs[block.index] else (hidden, *[None] * (outputs[block.index] - 1))

        with _replaced(stack, instead):
            _forward(model, ids)
    return captured


def _sharing(pool: dict[str, list[Tensor]], hidden: Tensor) -> Callable[[Any], Any]:
    """Puts arguments in main memory, those of equal value only once, and `_HIDDEN` in place of `hidden`."""

    def share(value: Any) -> Any:
        if value is hidden:
            return _HIDDEN
        if not isinstance(value, Tensor):
            return value
        known = pool.setdefault(f"{value.dtype} {tuple(value.shape)}", [])
        for other in known:
            if other is value or torch.equal(other, value.to(other.device)):
                return other
        known.append(value.detach().cpu())
        del known[:-_POOL_DEPTH]
        return known[-1]

    return share


@contextmanager
def _replaced(stack: Stack, instead: Callable[[Block, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Within, calls of the blocks are calls of `instead(block, args, kwargs)`."""
    with ExitStack() as restore:
        for block in stack.blocks:
            own = vars(block.module)
            if "forward" in own:
                restore.callback(own.__setitem__, "forward", own["forward"])
            else:
                restore.callback(own.pop, "forward")
            own["forward"] = lambda *args, block=block, **kwargs: instead(block, args, kwargs)
        yield


@torch.no_grad()
def _forward(model: nn.Module, ids: Tensor) -> None:
    with suppress(_AllCapturedError):
        model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)


def _find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], ids: Tensor) -> Tensor | None:
    """The first argument that has a vector of numbers for each token."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3 and value.shape[:2] == ids.shape:
            return value
    return None


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested tuples, lists and dicts with every leaf changed."""
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


def _close(actual: Tensor, expected: Tensor) -> bool:
    # Kernels may sum in another order; a missing argument changes far more than that.
    limit = 1e-3 if expected.dtype == torch.float32 else 0.05
    # States that are not finite are not what is looked for here; the statistics of the inputs refuse them.
    reference = expected.float().nan_to_num()
    return bool((actual.float().nan_to_num() - reference).norm() <= limit * reference.norm())


class _Groups:
    """Which matrices meet the same input tensor, in the order of use."""

    def __init__(self) -> None:
        self._inputs: list[tuple[Tensor, int, list[str]]] = []
        self._names: set[str] = set()
        self.once = True

    def seen(self, matrix: Matrix, x: Tensor) -> None:
        if matrix.name in self._names:
            self.once = False
            return
        self._names.add(matrix.name)
        for other, version, names in self._inputs:
            same_place = (other.data_ptr(), other.numel(), other.stride(-1)) == (x.data_ptr(), x.numel(), x.stride(-1))
            if same_place and other.shape[-1] == x.shape[-1] and version == x._version:
                names.append(matrix.name)
                return
        # Holding the tensor keeps its place from being used for another one.
        self._inputs.append((x, x._version, [matrix.name]))

    @property
    def names(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(names) for _, _, names in self._inputs)
