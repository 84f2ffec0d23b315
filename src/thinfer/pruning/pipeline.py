"""Prunes a model block by block: observe the inputs of a block, prune it, and run it pruned for the next one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckFailed, UnsupportedError, UsageError
from thinfer.pruning.base import Method, Need, Pruned, Refinement, Target
from thinfer.pruning.blocks import Block, Matrix, Stack, find_stack
from thinfer.pruning.masks import zero_count
from thinfer.pruning.observe import InputObserver
from thinfer.pruning.phases import Phases
from thinfer.pruning.replay import BlockTrace, Captured, capture, trace_blocks
from thinfer.pruning.resume import BlockStore, run_key
from thinfer.pruning.statistics import InputStatistics

Progress = Callable[[int, int, str], None]
"""Told how many blocks are finished, how many there are, and what runs now."""

TRACE_TOKENS = 32
_FORWARD_TOKENS = 2048
"""Tokens run at once: large enough for fast products, small against the weights in memory."""


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What was done.

    Attributes:
        matrices: for each pruned matrix what its method noted, and "shape", "rate" (asked for), "sparsity" (counted
            zeros), "seconds", and, where inputs were observed, "layer_error" = ‖X(W−W')ᵀ‖²/‖XWᵀ‖² over the
            calibration text; without the Gram matrix "layer_error_diagonal", which leaves out products of two inputs.
        phases: "seconds" and "peak_bytes" of "capture", "statistics", "prune" and "replay".
        skipped: matrices of the blocks that cannot be pruned, each with the reason.
        resumed: blocks taken from an earlier run.
    """

    matrices: dict[str, dict[str, Any]]
    phases: dict[str, dict[str, float | int]]
    skipped: dict[str, str]
    resumed: int


@dataclass(frozen=True, slots=True)
class MatrixPruner:
    """A method with its refinements: prunes one matrix and checks that the result is what was asked for."""

    method: Method
    refinements: tuple[Refinement, ...] = ()
    pattern: SparsityPattern = field(default_factory=SparsityPattern)

    @property
    def needs(self) -> frozenset[Need]:
        """What they need to know of the inputs."""
        return self.method.needs.union(*(refinement.needs for refinement in self.refinements))

    def prune(self, name: str, weight: Tensor, inputs: InputStatistics, rate: float) -> Pruned:
        """Prune the float32 matrix `weight` [outputs, inputs] called `name` to the sparsity `rate`.

        Raises:
            CheckFailed: the result has a NaN or an infinite number, or the wrong number of zeros.
            UsageError: options do not fit the matrix.
        """
        target = Target(rate, self.pattern)
        try:
            pruned = self.method.prune(weight, inputs, target)
            for refinement in self.refinements:
                pruned = refinement.refine(weight, pruned, inputs, target)
        except (CheckFailed, UsageError) as error:
            raise type(error)(f"{name}: {error}") from error
        # The sum is NaN or infinite where a weight is, and several times quicker than a look at each.
        if not torch.isfinite(pruned.weight.sum()):
            raise CheckFailed(
                f"{name}: pruning gave NaN or infinite weights; give more calibration text, or another method"
            )
        kept = int(pruned.mask.sum())
        asked = weight.numel() - zero_count(weight.numel(), rate)
        if self.pattern.structured:
            groups = pruned.mask.reshape(-1, self.pattern.m).sum(1)
            asked, kept = self.pattern.n * len(groups), int((groups == self.pattern.n).sum()) * self.pattern.n
        if kept != asked or bool((pruned.weight.ne(0) & ~pruned.mask).any()):
            raise CheckFailed(f"{name}: {kept} weights are kept, {asked} were to be; the method has a fault, report it")
        return pruned


@torch.no_grad()
def prune_model(
    model: nn.Module,
    windows: Tensor | Sequence[Sequence[int]] | None,
    rates: Mapping[str, float],
    *,
    method: Method,
    refinements: Sequence[Refinement] = (),
    pattern: SparsityPattern = SparsityPattern(),  # noqa: B008 - frozen
    true_sequential: bool = False,
    device: torch.device | str = "cpu",
    workdir: Path | None = None,
    progress: Progress | None = None,
) -> PruneResult:
    """Prune the matrices named by `rates` in place; all others stay as they are, bit for bit.

    Every block sees the outputs of the pruned blocks before it. Only one block lies on `device` at a time; the hidden
    states stay in main memory. The order is that of SparseGPT (arXiv 2301.00774) and Wanda (arXiv 2306.11695).

    Args:
        model: a causal language model of transformers, in main memory, dense.
        windows: token ids [windows, tokens]; not needed where neither method nor refinements need inputs.
        rates: the sparsity of each matrix to prune, by the names of `find_stack(model).matrices`.
        method: prunes each matrix.
        refinements: applied to each result in turn.
        pattern: n:m, which the rates must agree with, or unstructured.
        true_sequential: within a block, matrices are pruned in the order of use, each on what the pruned ones before
            it give; more exact, and slower by the repeated runs.
        device: where blocks run, such as "cuda".
        workdir: folder for finished blocks; a run with the same model, windows and options goes on after them and ends
            with the same bits.
        progress: told what runs.

    Raises:
        UsageError: no windows, an unknown name, or a sparsity out of range or at odds with the pattern.
        UnsupportedError: the model is not a stack of decoder blocks, or a matrix is never applied.
        CheckFailed: inputs or results are not finite.
        ArtifactError: `workdir` holds another run.

    Example:
        >>> rates = dict.fromkeys(find_stack(model).matrices, 0.5)  # doctest: +SKIP
        >>> prune_model(model, windows, rates, method=make("wanda")).matrices  # doctest: +SKIP
    """
    stack = find_stack(model)
    check_rates(stack, rates, pattern)
    ids = None if windows is None else torch.as_tensor(windows, dtype=torch.long)
    if ids is not None and (ids.ndim != 2 or not ids.numel()):
        ids = None
    pruner = MatrixPruner(method, tuple(refinements), pattern)
    if pruner.needs and ids is None:
        raise UsageError("this method observes the inputs of each layer; give a calibration text")
    chosen = [[matrix for matrix in block.matrices if matrix.name in rates] for block in stack.blocks]
    while chosen and not chosen[-1]:
        chosen.pop()
    store = None
    if workdir is not None:
        recipe = {
            "methods": [_describe(item) for item in (method, *refinements)],
            "pattern": str(pattern),
            "rates": dict(rates),
            "true_sequential": true_sequential,
        }
        store = BlockStore(workdir, run_key(model, ids, recipe))
    tell = progress or (lambda done, total, what: None)
    device = torch.device(device)
    run = _Run(model, stack, chosen, rates, pruner, true_sequential, device, tell, Phases(device))
    with inference_state(model):
        return run.finish(ids if pruner.needs else None, store)


@contextmanager
def inference_state(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode and runs each expert by itself, so that its inputs can be seen."""
    training = model.training
    experts: Any = getattr(model, "get_experts_implementation", dict)()
    choose: Any = getattr(model, "set_experts_implementation", None)
    model.eval()
    if experts:
        choose("eager")
    try:
        yield
    finally:
        if experts:
            choose(experts)
        model.train(training)


def batches_of(windows: Tensor) -> list[Tensor]:
    """Windows [windows, tokens] in batches of a size that runs well."""
    return list(torch.split(windows, max(1, _FORWARD_TOKENS // windows.shape[1])))


def observe_block(
    block: Block,
    trace: BlockTrace,
    matrices: Sequence[Matrix],
    captured: Captured,
    needs: frozenset[Need],
    device: torch.device | str,
    *,
    advance: bool = False,
) -> dict[str, InputStatistics]:
    """Statistics of the inputs of `matrices` of a block, by name; matrices with one input share one object.

    Args:
        block: lies on `device`.
        trace: of this block.
        matrices: those to observe.
        captured: the state before this block.
        needs: what is recorded.
        device: where the block runs.
        advance: whether the state then is that after this block; if not, the run ends at the last input that matters.

    Raises:
        UnsupportedError: a matrix that is not an expert's is never applied.
        CheckFailed: an input is NaN or infinite.
    """
    by_name = {matrix.name: matrix for matrix in matrices}
    statistics: dict[str, InputStatistics] = {}
    leaders: set[str] = set()
    for names in (*trace.inputs, *((name,) for name in by_name)):
        group = [name for name in names if name in by_name and name not in statistics]
        if group:
            leaders.add(group[0])
            shared = InputStatistics(by_name[group[0]].shape[1], needs, device)
            statistics.update(dict.fromkeys(group, shared))
    waiting: set[str] = set()

    def seen(matrix: Matrix, x: Tensor) -> None:
        if matrix.name in leaders:
            try:
                statistics[matrix.name].add(x)
            except CheckFailed as error:
                raise CheckFailed(f"{matrix.name}: {error}") from error
        waiting.discard(matrix.name)
        if not waiting and trace.once and not advance:
            raise _AllSeenError

    for batch in range(len(captured.hidden)):
        waiting.update(leaders)
        with suppress(_AllSeenError), InputObserver(matrices, seen):
            output = captured.run(block, batch, device)
            if advance:
                captured.hidden[batch] = output.cpu()
    # Perhaps no token was routed to an expert; that none was to any of them means that their inputs are not seen.
    reached = {matrix.kind for matrix in matrices if statistics[matrix.name].rows}
    left_out = {matrix.kind for matrix in block.matrices if matrix.name not in by_name}
    for name, matrix in by_name.items():
        if matrix.kind not in reached | left_out:
            raise UnsupportedError(f"{name}: the model is not seen to multiply inputs by this matrix; leave it out")
    return statistics


class _AllSeenError(Exception):
    """Ends the run of a block after the last input that matters."""


@dataclass(slots=True)
class _Run:
    """One run of `prune_model`."""

    model: nn.Module
    stack: Stack
    chosen: list[list[Matrix]]
    rates: Mapping[str, float]
    pruner: MatrixPruner
    true_sequential: bool
    device: torch.device
    tell: Progress
    phases: Phases

    def finish(self, ids: Tensor | None, store: BlockStore | None) -> PruneResult:
        """Prune all blocks, those that `store` has not."""
        notes: dict[str, dict[str, Any]] = {}
        resumed = 0
        traces: tuple[BlockTrace, ...] = ()
        captured = Captured([], [])
        total = len(self.chosen)
        if ids is not None and total:
            self.tell(0, total, "running the model up to its blocks")
            with self.phases.measure("capture"):
                traces = trace_blocks(self.model, self.stack, ids[:1, :TRACE_TOKENS])
                captured = capture(self.model, self.stack, traces, batches_of(ids))
        for block, matrices in zip(self.stack.blocks, self.chosen, strict=False):
            home = next(block.module.parameters()).device
            finished = store.load(block.index) if store else None
            block.module.to(self.device)
            try:
                if finished is not None:
                    for matrix in matrices:
                        matrix.stored.copy_(finished[0][matrix.name])
                    notes |= finished[1]
                    resumed += 1
                else:
                    made = self._prune_block(block, matrices, traces[block.index] if traces else None, captured)
                    notes |= made
                    if store and matrices:
                        store.save(block.index, {matrix.name: matrix.stored for matrix in matrices}, made)
                if captured.hidden and block.index + 1 < total:
                    self._replay(block, captured)
            finally:
                block.module.to(home)
            self.tell(block.index + 1, total, f"{block.name} is done")
        return PruneResult(notes, self.phases.to_dict(), dict(self.stack.skipped), resumed)

    def _prune_block(
        self, block: Block, matrices: list[Matrix], trace: BlockTrace | None, captured: Captured
    ) -> dict[str, dict[str, Any]]:
        notes = {}
        for stage in _stages(trace, matrices) if trace and self.true_sequential else [matrices]:
            statistics: dict[str, InputStatistics] = {}
            if trace and stage:
                self._say(block, "observing inputs")
                with self.phases.measure("statistics"):
                    statistics = observe_block(block, trace, stage, captured, self.pruner.needs, self.device)
            self._say(block, "pruning")
            with self.phases.measure("prune"):
                for matrix in stage:
                    # Popped, so that the memory of the sums is free as soon as the last matrix that needs them is done.
                    inputs = statistics.pop(matrix.name, None)
                    notes[matrix.name] = self._prune_matrix(matrix, inputs)
        return notes

    def _prune_matrix(self, matrix: Matrix, inputs: InputStatistics | None) -> dict[str, Any]:
        started = time.perf_counter()
        weight = matrix.read()
        inputs = inputs or InputStatistics(matrix.shape[1], frozenset(), self.device)
        rate = self.rates[matrix.name]
        pruned = self.pruner.prune(matrix.name, weight, inputs, rate)
        matrix.write(pruned.weight)
        result = matrix.read()
        facts: dict[str, Any] = {
            "shape": list(matrix.shape),
            "rate": rate,
            "sparsity": 1 - int(result.count_nonzero()) / matrix.size,
            **_layer_error(weight, result, inputs),
            **pruned.notes,
        }
        return facts | {"seconds": time.perf_counter() - started}

    def _replay(self, block: Block, captured: Captured) -> None:
        self._say(block, "running it pruned")
        with self.phases.measure("replay"):
            for batch in range(len(captured.hidden)):
                captured.hidden[batch] = captured.run(block, batch, self.device).cpu()
            # The arguments of this block are not needed again.
            captured.calls[block.index] = []

    def _say(self, block: Block, what: str) -> None:
        self.tell(block.index, len(self.chosen), f"{block.name}: {what}")


def _stages(trace: BlockTrace, matrices: Sequence[Matrix]) -> list[list[Matrix]]:
    """Matrices in the order of use; what has one input, or is of one kind as the experts are, is pruned together."""
    kinds: dict[str, int] = {}
    by_name = {matrix.name: matrix for matrix in matrices}
    count = 0
    for names in trace.inputs:
        group = [by_name[name].kind for name in names if name in by_name]
        stage = next((kinds[kind] for kind in group if kind in kinds), count)
        count = max(count, stage + bool(group))
        for kind in group:
            kinds.setdefault(kind, stage)
    stages: list[list[Matrix]] = [[] for _ in range(count + 1)]
    for matrix in matrices:
        stages[kinds.get(matrix.kind, count)].append(matrix)
    return [stage for stage in stages if stage]


def _layer_error(weight: Tensor, result: Tensor, inputs: InputStatistics) -> dict[str, float]:
    """Change of the matrix's outputs over the calibration text, relative to their square sum."""
    if not inputs.rows:
        return {}
    gram, change = inputs.gram, weight - result
    if gram is None:
        name = "layer_error_diagonal"
        lost, whole = (float((part.square() @ inputs.square_sum).sum()) for part in (change, weight))
    else:
        name = "layer_error"
        lost, whole = (float((part @ gram).mul_(part).sum()) for part in (change, weight))
    return {name: max(lost, 0.0) / whole} if whole > 0 else {}


def check_rates(stack: Stack, rates: Mapping[str, float], pattern: SparsityPattern) -> None:
    """UsageError for a matrix that is not there, a sparsity out of range, or a pattern that does not fit."""
    matrices = stack.matrices
    for name, rate in rates.items():
        if name not in matrices:
            reason = stack.skipped.get(name, "the model has no such matrix in its blocks")
            raise UsageError(f"{name}: cannot be pruned: {reason}; leave it out")
        if not 0 <= rate <= 1:
            raise UsageError(f"{name}: sparsity must lie between 0 and 1, not {rate}")
        if pattern.structured and not math.isclose(rate, pattern.sparsity, abs_tol=1e-9):
            raise UsageError(f"{name}: pattern {pattern} means sparsity {pattern.sparsity:g}, not {rate:g}")
        if pattern.structured and matrices[name].shape[1] % pattern.m:
            raise UsageError(
                f"{name} has {matrices[name].shape[1]} inputs, no multiple of {pattern.m}; "
                f"choose a pattern other than {pattern}, or leave this matrix out"
            )


def _describe(item: Any) -> dict[str, Any]:
    """What tells a method or refinement and its options from all others."""
    options = {name: getattr(item, name) for name in getattr(item, "__dataclass_fields__", ())}
    return {"type": f"{type(item).__module__}.{type(item).__qualname__}", **options}
