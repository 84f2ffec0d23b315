"""What an allocation may ask of the dense model: weights, norms of inputs, and the loss with some matrices pruned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UsageError
from thinfer.pruning.base import Method, Refinement
from thinfer.pruning.blocks import Block, Matrix, find_stack
from thinfer.pruning.pipeline import TRACE_TOKENS, MatrixPruner, batches_of, inference_state, observe_block
from thinfer.pruning.replay import BlockTrace, Captured, capture, head_logits, trace_blocks
from thinfer.pruning.statistics import InputStatistics

_SCAN_TOKENS = 4096
_HEAD_TOKENS = 256


class DenseView:
    """The `ModelView` of a model that is not pruned yet; the model is left as it was, bit for bit.

    Args:
        model: a causal language model of transformers, in main memory.
        windows: calibration token ids [windows, tokens]; None where nothing but weights will be asked for.
        names: the matrices to prune, of `find_stack(model).matrices`.
        method: prunes the matrices for `loss`, with its refinements and pattern, as `prune_model` will.
        refinements: see there.
        pattern: see there.
        device: where blocks run.
        tell: told what runs.

    `loss` is that of about 4096 tokens of the windows. There, methods that need a Gram matrix get one of these tokens;
    others get statistics of all windows, as `inputs` does.

    Example:
        >>> view = DenseView(model, windows, names, method=make("wanda"))  # doctest: +SKIP
        >>> make("owl", kind="allocation").rates(view, 0.5)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        windows: Tensor | Sequence[Sequence[int]] | None,
        names: Collection[str],
        *,
        method: Method,
        refinements: Sequence[Refinement] = (),
        pattern: SparsityPattern = SparsityPattern(),  # noqa: B008 - frozen
        device: torch.device | str = "cpu",
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._model = model
        self._stack = find_stack(model)
        self._ids = None if windows is None else torch.as_tensor(windows, dtype=torch.long)
        self._chosen = [[matrix for matrix in block.matrices if matrix.name in names] for block in self._stack.blocks]
        self._matrices = {matrix.name: matrix for matrices in self._chosen for matrix in matrices}
        self._pruner = MatrixPruner(method, tuple(refinements), pattern)
        self._device = torch.device(device)
        self._tell = tell or (lambda line: None)
        self._statistics: dict[str, InputStatistics] = {}
        self._traces: tuple[BlockTrace, ...] = ()
        self._scan: Captured | None = None
        self._before: list[list[Tensor]] = []

    @property
    def blocks(self) -> list[list[str]]:
        """Names of the matrices to prune, block by block; blocks without any are left out."""
        return [[matrix.name for matrix in matrices] for matrices in self._chosen if matrices]

    def weight(self, name: str) -> Tensor:
        """A dense matrix [outputs, inputs], float32."""
        return self._matrices[name].read()

    @torch.no_grad()
    def inputs(self, name: str) -> InputStatistics:
        """Norms and means of a matrix's inputs in the dense model, over all windows.

        Raises:
            UsageError: there is no calibration text.
        """
        if not self._statistics:
            self._tell("running the dense model")
            with inference_state(self._model):
                captured = self._capture(self._windows)
                for block, matrices in zip(self._stack.blocks, self._chosen, strict=True):
                    with _on(block, self._device):
                        self._statistics |= observe_block(
                            block,
                            self._traces[block.index],
                            matrices,
                            captured,
                            frozenset({"mean"}),
                            self._device,
                            advance=True,
                        )
        return self._statistics[name]

    @torch.no_grad()
    def loss(self, rates: Mapping[str, float]) -> float:
        """Mean negative log-likelihood (nats a token) with these matrices pruned, each on dense inputs, others dense.

        Raises:
            UsageError: there is no calibration text, or an unknown name.
        """
        unknown = sorted(set(rates) - set(self._matrices))
        if unknown:
            raise UsageError(f"{unknown[0]} is none of the matrices to prune")
        affected = [[matrix for matrix in matrices if matrix.name in rates] for matrices in self._chosen]
        first = next((index for index, matrices in enumerate(affected) if matrices), len(affected))
        with inference_state(self._model):
            scan = self._dense_scan()
            hidden = self._before[first]
            for block, matrices in zip(self._stack.blocks[first:], affected[first:], strict=True):
                scan.hidden = list(self._before[block.index])
                with _on(block, self._device), self._pruned(block, matrices, rates, scan):
                    scan.hidden = hidden
                    hidden = [scan.run(block, batch, self._device).cpu() for batch in range(len(hidden))]
            return self._head_loss(hidden)

    @contextmanager
    def _pruned(
        self, block: Block, matrices: list[Matrix], rates: Mapping[str, float], before: Captured
    ) -> Iterator[None]:
        """Within, these matrices of the block are pruned; `before` is the state before the block."""
        if not matrices:
            statistics = {}
        elif "gram" in self._pruner.needs:
            trace = self._traces[block.index]
            statistics = observe_block(block, trace, matrices, before, self._pruner.needs, self._device)
        else:
            statistics = {matrix.name: self.inputs(matrix.name) for matrix in matrices}
        dense = [matrix.stored.clone() for matrix in matrices]
        try:
            for matrix in matrices:
                inputs = statistics.pop(matrix.name)
                matrix.write(self._pruner.prune(matrix.name, matrix.read(), inputs, rates[matrix.name]).weight)
            yield
        finally:
            for matrix, values in zip(matrices, dense, strict=True):
                matrix.stored.copy_(values)

    def _dense_scan(self) -> Captured:
        """The calls of the blocks on the text of `loss`; on first use the dense states before each are kept too."""
        if self._scan is None:
            self._tell("running the dense model on the text for losses")
            self._scan = self._capture(self._scan_windows)
            self._before = [list(self._scan.hidden)]
            for block in self._stack.blocks:
                with _on(block, self._device):
                    batches = range(len(self._scan.hidden))
                    self._scan.hidden = [self._scan.run(block, batch, self._device).cpu() for batch in batches]
                self._before.append(self._scan.hidden)
        return self._scan

    def _capture(self, windows: Tensor) -> Captured:
        if not self._traces:
            self._traces = trace_blocks(self._model, self._stack, windows[:1, :TRACE_TOKENS])
        return capture(self._model, self._stack, self._traces, batches_of(windows))

    def _head_loss(self, hidden: list[Tensor]) -> float:
        """Loss of the states after the last block; the head runs on a few tokens at a time: its outputs are wide."""
        total, count, outputs = 0.0, 0, self._traces[-1].outputs
        for ids, states in zip(batches_of(self._scan_windows), hidden, strict=True):
            for start in range(0, ids.shape[1] - 1, _HEAD_TOKENS):
                part = slice(start, min(start + _HEAD_TOKENS, ids.shape[1] - 1))
                targets = ids[:, 1:][:, part]
                logits = head_logits(self._model, self._stack, outputs, ids[:, part], states[:, part])
                losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
                total, count = total + float(losses.double().sum()), count + targets.numel()
        return total / count

    @property
    def _windows(self) -> Tensor:
        if self._ids is None or self._ids.ndim != 2 or self._ids.shape[1] < 2:
            raise UsageError("this allocation runs the model; give a calibration text")
        return self._ids

    @property
    def _scan_windows(self) -> Tensor:
        windows = self._windows
        return windows[: max(1, _SCAN_TOKENS // windows.shape[1])]


@contextmanager
def _on(block: Block, device: torch.device) -> Iterator[None]:
    """Within, the block lies on `device`."""
    home = next(block.module.parameters()).device
    block.module.to(device)
    try:
        yield
    finally:
        block.module.to(home)
