"""Engine: sequences in, logits out; cuts work into batches and hands them to the executor."""

import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from thinfer.core.active_set import ActiveSet
from thinfer.core.graph import Graph
from thinfer.core.neuron_selector import NeuronSelector
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.batch import Batch
from thinfer.engine.build import build_executor
from thinfer.engine.executor import Float32, LinearCount
from thinfer.engine.kv_cache import BLOCK_SIZE, KvLayout, KvPool, Sequence
from thinfer.engine.options import EngineOptions
from thinfer.errors import ResourceError, ThinferError, UsageError
from thinfer.models.loader import Model

LogitsWanted = Literal["last", "all", "none"]
OnLogits = Callable[[Sequence, int, Float32], None]
"""Called with a sequence, the position of the first row, and logits [n, vocab] that are only valid inside."""
ObserveBatch = Callable[[Batch, str, Float32], None]
"""Called with the batch, a linear's site and its input [M, width], which is only valid inside."""
Cancel = threading.Event | Callable[[], bool]


class CancelledError(ThinferError):
    """The caller's cancel flag was set; the rows that ran before stay in their sequences."""

    exit_code = 130


def is_cancelled(cancel: Cancel | None) -> bool:
    """Whether the flag is set, or the function says so."""
    if cancel is None:
        return False
    if isinstance(cancel, threading.Event):
        return cancel.is_set()
    if not callable(cancel):
        raise UsageError(f"cancel must be a threading.Event or a function without arguments, not {cancel!r:.60}")
    return cancel()


@dataclass(slots=True)
class Work:
    """Tokens to append to one sequence.

    Attributes:
        sequence: where they go.
        tokens: token ids, at least one.
        logits: of which of them logits are wanted.
        sparse: whether the selector acts on these rows (never on the first ``sink_tokens`` positions).
    """

    sequence: Sequence
    tokens: Items[int]
    logits: LogitsWanted = "last"
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What was read since the last reset.

    Attributes:
        rows: tokens that went through the model.
        sites: counts by site ("layers.3.qkv", "lm_head").
        widths: outputs of the linear at each site.
    """

    rows: int
    sites: Mapping[str, LinearCount]
    widths: Mapping[str, int]

    @property
    def density(self) -> float:
        """Fraction of the block linears' weights that were multiplied, between 0 and 1; 1 when nothing ran."""
        blocks = [(count, self.widths[site]) for site, count in self.sites.items() if site != "lm_head"]
        total = sum(count.total * width for count, width in blocks)
        return sum(count.active * width for count, width in blocks) / total if total else 1.0

    @property
    def bytes_per_token(self) -> float:
        """Weight bytes of all linears read for one token, on average; 0 when nothing ran."""
        return sum(count.bytes for count in self.sites.values()) / self.rows if self.rows else 0.0

    @property
    def needed(self) -> int:
        """Neurons that fired in rows where a predictor was checked, over all layers; 0 without predictors."""
        return sum(count.needed for count in self.sites.values())

    @property
    def found(self) -> int:
        """Of the neurons needed those that the predictors named."""
        return sum(count.found for count in self.sites.values())

    @property
    def recall(self) -> float | None:
        """Fraction of the neurons needed that the predictors named; None when nothing was checked."""
        return self.found / self.needed if self.needed else None

    def since(self, before: "Usage | None") -> "Usage":
        """What was read after an earlier usage; all of it where there is none, or the counters were reset after it."""
        if before is None or self.rows < before.rows:
            return self
        none = LinearCount()
        sites = {site: count.minus(before.sites.get(site, none)) for site, count in self.sites.items()}
        return Usage(self.rows - before.rows, sites, self.widths)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens ``start`` to ``stop - 1`` of one work, placed in one batch."""

    work: int
    start: int
    stop: int


class Engine:
    """A loaded model with its KV pool and executor. Threads may share it: one step runs at a time, the others wait.

    Example:
        >>> engine = Engine(model)  # doctest: +SKIP
        >>> sequence = engine.new_sequence()  # doctest: +SKIP
        >>> (logits,) = engine.step([Work(sequence, [1, 2, 3])])  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Model,
        options: EngineOptions | None = None,
        *,
        selector: ThresholdSelector | None = None,
        neurons: NeuronSelector | None = None,
        graph: Graph | None = None,
        notes: Items[str] = (),
    ) -> None:
        """Pack the weights and build the executor.

        Args:
            model: the loaded model.
            options: how to run it.
            selector: thresholds for sparse rows, for which the weights are packed; None runs dense.
            neurons: which FFN neurons are computed; None: those that fire, in layers whose activation makes exact
                zeros, which changes no token.
            graph: the model's graph with other executors or splits; None: the model's own.
            notes: lines about what the caller chose or ignored, repeated by `describe`.
        """
        self.model = model
        self.config = model.config
        self.options = options or EngineOptions()
        self.max_model_len = self.options.context_length(model.config)
        kv_tokens = self.options.kv_tokens or 4 * self.max_model_len
        layout = KvLayout(num_blocks=-(-kv_tokens // BLOCK_SIZE), type=self.options.kv_type)
        self.pool = KvPool(layout)
        self.graph = graph or model.graph
        self.executor, chosen = build_executor(model, self.graph, layout, self.options, selector, neurons)
        self._notes = [*notes, *chosen]
        self._logit_rows = self.options.logit_rows(model.config)
        self._rows = 0
        self._closed = False
        # The executor has one set of buffers; reentrant, because what a step calls back may ask the engine.
        self._lock = threading.RLock()
        self._selector = selector
        self._predicted = neurons if neurons is not None and neurons.predicts else None

    @property
    def selector(self) -> ThresholdSelector | None:
        """The thresholds that act on sparse rows; assign None to run dense.

        Assigning never repacks: thresholds that the engine was not made with drop the same channels, but may read
        their weights all the same.
        """
        return self._selector

    @selector.setter
    def selector(self, selector: ThresholdSelector | None) -> None:
        with self._lock:
            self._check_open()
            self.executor.set_selector(selector)
            self._selector = selector
            self.pool.change_root()

    def set_active(self, layer: int, active: ActiveSet | None) -> None:
        """Compute only these neurons of a layer in the steps that follow: a group for each row; None: all of them.

        Needs an engine made with `neurons=NeuronSelector("given")`. A step whose number of rows is not the number of
        groups raises ValueError. UsageError when the layer takes no list or has another number of neurons.
        """
        with self._lock:
            self._check_open()
            self.executor.set_active(layer, active)
            self.pool.change_root()

    def new_sequence(self) -> Sequence:
        """An empty sequence; give it back with `free`."""
        return Sequence()

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back to the pool and empty it."""
        self.pool.release(sequence)

    def modes(self, sparse: bool, first: int, last: int) -> bytes:
        """How positions ``first`` to ``last - 1`` of a sequence are run: one byte each, 1 where thresholds act."""
        sinks = [each.sink_tokens for each in (self._selector, self._predicted) if each is not None]
        if not sparse or not sinks:
            return bytes(last - first)
        dense = min(max(max(sinks) - first, 0), last - first)
        return bytes(dense) + b"\1" * (last - first - dense)

    def step(
        self,
        works: Items[Work],
        *,
        on_logits: OnLogits | None = None,
        observe: ObserveBatch | None = None,
        cancel: Cancel | None = None,
    ) -> list[Float32]:
        """Append every work's tokens to its sequence, as few executor calls as ``chunk`` allows.

        Args:
            works: at most one a sequence.
            on_logits: receives the logits as they come instead of the result, so they never all exist.
            observe: receives the input of every linear.
            cancel: asked before every executor call; CancelledError when set.

        Returns:
            Logits float32 [L, vocab] of every work: L is 1 for "last", the tokens for "all", 0 for "none", and 0
            with `on_logits`.

        Raises:
            ResourceError: a sequence would grow beyond max_model_len, or the KV pool is full; nothing was run.
            UsageError: no tokens, a token outside the vocabulary, one sequence twice, or the engine is closed; nothing
                was run.
        """
        with self._lock:
            return self._step(works, on_logits, observe, cancel)

    def _step(
        self,
        works: Items[Work],
        on_logits: OnLogits | None,
        observe: ObserveBatch | None,
        cancel: Cancel | None,
    ) -> list[Float32]:
        self._check_open()
        self._check(works)
        for work in works:
            self.pool.reserve(work.sequence, work.sequence.length + len(work.tokens))
        parts: list[list[Float32]] = [[] for _ in works]
        for pieces in self._pack(works):
            if is_cancelled(cancel):
                raise CancelledError("cancelled")
            batch, wanted = self._batch(works, pieces)
            watch = None if observe is None else (lambda site, x, b=batch: observe(b, site, x))
            logits = self.executor.run(batch, observe=watch)
            self._rows += batch.rows
            row = 0
            for piece, count in zip(pieces, wanted, strict=True):
                work = works[piece.work]
                first = work.sequence.length
                work.sequence.ids.extend(work.tokens[piece.start : piece.stop])
                work.sequence.sparse.extend(self.modes(work.sparse, first, work.sequence.length))
                if count:
                    rows = logits[row : row + count]
                    if on_logits is not None:
                        on_logits(work.sequence, work.sequence.length - count, rows)
                    else:
                        parts[piece.work].append(rows.copy())
                row += count
        empty = np.empty((0, self.config.vocab_size), np.float32)
        return [np.concatenate(part) if len(part) > 1 else part[0] if part else empty for part in parts]

    def usage(self) -> Usage:
        """Density and bytes read since the last reset."""
        widths = {
            str(node.attrs["site"]): self.graph.buffers[node.output] for node in self.graph.nodes if node.op == "linear"
        }
        with self._lock:
            self._check_open()
            counts = self.executor.counters()
            # Predictors are no part of the model: their bytes count, the density is the model's.
            widths |= dict.fromkeys(set(counts) - set(widths), 0)
            return Usage(self._rows, {site: replace(count) for site, count in counts.items()}, widths)

    def reset_usage(self) -> None:
        """Start counting anew."""
        with self._lock:
            self._check_open()
            self._rows = 0
            self.executor.reset_counters()

    def describe(self) -> list[str]:
        """Lines for start-up: what was chosen, what it costs, what was ignored."""
        self._check_open()
        config, layout = self.config, self.pool.layout
        tokens = layout.num_blocks * layout.block_size
        size = 2 if layout.type == "f16" else 4
        mib = 2 * config.num_hidden_layers * config.kv_width * size * tokens / (1 << 20)
        hint = "; max_model_len to raise" if self.max_model_len < config.max_position_embeddings else ""
        lines = [
            f"model     {config.model_type}  {config.num_hidden_layers} layers  context {self.max_model_len} "
            f"(model max {config.max_position_embeddings}{hint})",
            f"kv cache  {tokens} tokens in {layout.num_blocks} blocks, {layout.type}, at most {mib:.0f} MiB, "
            "committed when used (kv_tokens)",
        ]
        if self._selector is None:
            sinks = "" if self._predicted is None else f"; first {self._predicted.sink_tokens} tokens dense"
            lines.append(
                f"sparsity  {f'predicted, decode; prefill dense{sinks}' if sinks else 'none: every row is dense'}"
            )
        else:
            where = "decode and prefill" if self._selector.prefill else "decode; prefill dense"
            lines.append(
                f"sparsity  {self._selector.method}, {len(self._selector.thresholds)} thresholds, {where}; "
                f"first {self._selector.sink_tokens} tokens dense"
            )
        return [*lines, *self._notes, *self.executor.describe()]

    def close(self) -> None:
        """Release the executor's memory and threads once no step runs; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.executor.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the model is closed; open it again with LLM(...)")

    def _check(self, works: Items[Work]) -> None:
        seen: set[int] = set()
        for work in works:
            if id(work.sequence) in seen:
                raise UsageError("one sequence occurs twice in a step; join its tokens into one work")
            seen.add(id(work.sequence))
            if not len(work.tokens):
                raise UsageError("no tokens to run: the prompt is empty and the model has no begin token")
            low, high = min(work.tokens), max(work.tokens)
            if low < 0 or high >= self.config.vocab_size:
                wrong = low if low < 0 else high
                raise UsageError(f"token {wrong} is outside the vocabulary of {self.config.vocab_size}")
            length = work.sequence.length + len(work.tokens)
            if length > self.max_model_len:
                raise ResourceError(
                    f"{length} tokens do not fit the context of {self.max_model_len}; shorten the prompt or raise "
                    f"max_model_len (the model allows {self.config.max_position_embeddings})"
                )

    def _pack(self, works: Items[Work]) -> Iterator[list[_Piece]]:
        """Fill batches in the order of the works, at most ``chunk`` rows and ``logit_rows`` logits each."""
        pieces: list[_Piece] = []
        rows, outs = self.options.chunk, self._logit_rows
        for index, work in enumerate(works):
            start = 0
            while start < len(work.tokens):
                stop = min(start + rows, len(work.tokens))
                if work.logits == "all":
                    stop = min(stop, start + outs)
                elif work.logits == "last" and not outs and stop == len(work.tokens):
                    stop -= 1
                if stop > start:
                    pieces.append(_Piece(index, start, stop))
                    rows -= stop - start
                    outs -= self._outs(work, start, stop)
                    start = stop
                if start < len(work.tokens):
                    yield pieces
                    pieces, rows, outs = [], self.options.chunk, self._logit_rows
        if pieces:
            yield pieces

    @staticmethod
    def _outs(work: Work, start: int, stop: int) -> int:
        """How many of the tokens ``start`` to ``stop - 1`` want logits."""
        if work.logits == "all":
            return stop - start
        return int(work.logits == "last" and stop == len(work.tokens))

    def _batch(self, works: Items[Work], pieces: list[_Piece]) -> tuple[Batch, list[int]]:
        """The arrays of one executor call, and the number of logit rows of every piece."""
        tokens: list[int] = []
        positions: list[int] = []
        sequence: list[int] = []
        sparse: list[int] = []
        out_rows: list[int] = []
        wanted: list[int] = []
        tables: list[list[int]] = []
        for index, piece in enumerate(pieces):
            work = works[piece.work]
            first, count = work.sequence.length, piece.stop - piece.start
            tokens.extend(work.tokens[piece.start : piece.stop])
            positions.extend(range(first, first + count))
            sequence.extend([index] * count)
            sparse.extend(self.modes(work.sparse, first, first + count))
            outs = self._outs(work, piece.start, piece.stop)
            out_rows.extend(range(len(tokens) - outs, len(tokens)))
            wanted.append(outs)
            tables.append(work.sequence.blocks[: self.pool.blocks_for(first + count)])
        table = np.full((len(tables), max(map(len, tables))), -1, np.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = blocks
        batch = Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            sequence=np.array(sequence, np.int32),
            sparse=np.array(sparse, np.uint8),
            out_rows=np.array(out_rows, np.int32),
            block_table=table,
        )
        return batch, wanted
