"""CpuExecutor: the native executor. A whole step of its nodes is one call without the GIL."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer import _core
from thinfer.core.graph import Graph, Node
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.batch import Batch
from thinfer.engine.executor import Float32, LinearCount, Observe
from thinfer.engine.finite import require_finite
from thinfer.engine.kv_cache import KvLayout
from thinfer.engine.layout_choice import (
    Candidate,
    LayoutTimer,
    LayoutTimes,
    exceeds_caches,
    measure_layouts,
    settle,
)
from thinfer.engine.options import EngineOptions
from thinfer.engine.plan import LinearShape, MatrixPlan, Skipped, assign_buffers, plan_linear
from thinfer.errors import UnsupportedError, UsageError
from thinfer.kernels.act import native_name
from thinfer.models.loader import Model, WeightSource


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear as it lies in memory: for `thinfer info`."""

    site: str
    plan: MatrixPlan
    codec: str
    layout: str
    nbytes: int


class CpuExecutor:
    """Runs the nodes that name it in C++; packs their weights once and lets the source pages go.

    `selector` decides which linears are packed for skipping, where a measurement at load shows that this is faster;
    `set_selector` changes thresholds later without repacking, which changes speed and never tokens. Raises UsageError
    for an instruction set this machine lacks.

    Example: `CpuExecutor(model, KvLayout(num_blocks=16), EngineOptions(threads=2)).run(batch)`.
    """

    name = "cpu"

    def __init__(
        self,
        model: Model,
        layout: KvLayout,
        options: EngineOptions,
        *,
        graph: Graph | None = None,
        selector: ThresholdSelector | None = None,
    ) -> None:
        self._model = model
        self._options = options
        self._graph = graph or model.graph
        self._pool = _core.ThreadPool(options.thread_count())
        self._arena = _core.Arena()
        config = model.config
        self._cache = _core.KvCache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, options.kv_type
        )
        self._num_blocks = layout.num_blocks
        self._committed = 0
        try:
            self._program = _core.Program(options.isa, self._pool, options.chunk, self._cache)
        except ValueError as error:
            raise UsageError(str(error)) from error
        every = options.executor == self.name
        self._own = [every or node.executor == self.name for node in self._graph.nodes]
        self._op: list[int | None] = [None] * len(self._graph.nodes)
        self._packed: dict[str, list[_core.PackedMatrix]] = {}
        self.linears: list[PackedLinear] = []
        self._layouts: Mapping[Skipped, LayoutTimes] = {}
        self._notes: list[str] = []
        self._counts: dict[str, LinearCount] = {}
        self._times: dict[str, list[int]] = {}
        self._measure_layouts(selector)
        self._build(selector)
        self.set_selector(selector)

    def run(self, batch: Batch, *, observe: Observe | None = None) -> Float32:
        """Run the whole graph; returns logits float32 [L, vocab] of `batch.out_rows`, valid until the next run."""
        self._run_range(0, len(self._graph.nodes), batch, observe)
        return self._view(self._graph.logits, len(batch.out_rows))

    def run_nodes(
        self,
        first: int,
        last: int,
        batch: Batch,
        inputs: Mapping[str, Float32],
        outputs: Sequence[str],
        *,
        observe: Observe | None = None,
    ) -> dict[str, Float32]:
        """Run nodes `first` to `last - 1`, all of this executor: buffers in and out are float32 [rows, width]."""
        for name, value in inputs.items():
            if name in self._buffers:
                self._view(name, len(value))[...] = value
        self._run_range(first, last, batch, observe)
        selected = self._graph.selected()
        return {
            name: self._view(name, len(batch.out_rows) if name in selected else batch.rows).copy() for name in outputs
        }

    def set_selector(self, selector: ThresholdSelector | None) -> None:
        """Use these thresholds for sparse rows from now on; None makes every row dense."""
        for node, op in self._linear_ops():
            site = node.attrs["site"]
            threshold = None if selector is None else selector.thresholds.get(site)
            scale = None if selector is None else selector.channel_scale.get(site)
            columns = node.attrs.get("columns")
            if scale is not None and columns is not None:
                scale = scale[list(columns)]
            if scale is not None:
                scale = np.ascontiguousarray(scale, np.float32)
            self._program.set_threshold(op, -1.0 if threshold is None else threshold, scale)

    def counters(self) -> Mapping[str, LinearCount]:
        """Counts by site since the last reset; bytes are those the kernels read."""
        self._collect()
        return self._counts

    def reset_counters(self) -> None:
        """Set all counts and times to zero."""
        self._program.take_counters()
        self._counts = {}
        self._times = {}

    def set_profiling(self, on: bool) -> None:
        """Whether to time every op; costs about a tenth of a microsecond an op."""
        self._program.set_profiling(on)

    def operations(self) -> list[dict[str, Any]]:
        """Time and bytes by kind of node since the last reset: {"kind", "calls", "seconds", "bytes"}."""
        self._collect()
        return [
            {"kind": kind, "calls": calls, "seconds": nanoseconds / 1e9, "bytes": read}
            for kind, (calls, nanoseconds, read) in self._times.items()
        ]

    def describe(self) -> list[str]:
        """What was chosen, what it costs, what was ignored."""
        lines = [
            f"cpu       {self._program.isa}, {self._options.thread_count()} threads, "
            f"activations {self._options.activations}"
        ]
        groups: dict[tuple[str, str, str, str], list[PackedLinear]] = {}
        for linear in self.linears:
            kind = linear.site.rsplit(".", 1)[-1]
            groups.setdefault((kind, linear.codec, linear.layout, linear.plan.why), []).append(linear)
        for (kind, codec, layout, why), members in groups.items():
            mib = sum(member.nbytes for member in members) / 2**20
            lines.append(f"weights   {kind:<8} {len(members):>3} x {codec:<5} {layout:<7} {mib:8.1f} MiB  {why}")
        lines += self._notes
        if self._model.ignored:
            lines.append(f"ignored   {len(self._model.ignored)} tensors: {', '.join(self._model.ignored[:4])}")
        return lines

    def close(self) -> None:
        """Drop weights, buffers, keys and values; the memory goes with the last view of a buffer."""
        self._packed.clear()
        del self._program, self._cache, self._pool, self._arena

    # ---- running

    def _run_range(self, first: int, last: int, batch: Batch, observe: Observe | None) -> None:
        blocks = int(batch.block_table.max(initial=-1)) + 1
        if blocks > self._committed:
            # Grown by doubling: the cache copies nothing, but a call per block would be slow.
            self._committed = min(self._num_blocks, max(blocks, 2 * self._committed))
            self._cache.ensure_blocks(self._committed)
        start = first
        if observe is not None:
            for index in range(first, last):
                node = self._graph.nodes[index]
                if node.op != "linear":
                    continue
                if "columns" in node.attrs or "rows" in node.attrs:
                    raise UsageError(f"{node.attrs['site']} is split between executors and cannot be observed")
                self._run_ops(start, index, batch)
                start = index
                rows = len(batch.out_rows) if node.inputs[0] in self._graph.selected() else batch.rows
                observe(node.attrs["site"], self._view(node.inputs[0], rows))
        self._run_ops(start, last, batch)

    def _run_ops(self, first: int, last: int, batch: Batch) -> None:
        ops = [op for op in self._op[first:last] if op is not None]
        if ops:
            self._program.run(
                ops[0],
                ops[-1] + 1,
                batch.tokens,
                batch.positions,
                batch.sequence,
                batch.sparse,
                batch.out_rows,
                batch.block_table,
            )

    def _view(self, name: str, rows: int) -> Float32:
        view: Float32 = self._program.buffer(self._buffers[name])[:rows]
        return view

    def _linear_ops(self) -> list[tuple[Node, int]]:
        pairs = zip(self._graph.nodes, self._op, strict=True)
        return [(node, op) for node, op in pairs if node.op == "linear" and op is not None]

    def _collect(self) -> None:
        kinds: dict[int, Node] = {op: n for n, op in zip(self._graph.nodes, self._op, strict=True) if op is not None}
        for index, counter in enumerate(self._program.take_counters()):
            node = kinds[index]
            kind = node.attrs["kind"] if node.op == "linear" else node.op
            times = self._times.setdefault(kind, [0, 0, 0])
            for place, value in enumerate((counter.calls, counter.nanoseconds, counter.bytes_read)):
                times[place] += value
            if node.op == "linear" and counter.channels_total:
                # The head runs for chosen rows only, and never under a threshold.
                whole = sum(matrix.nbytes for matrix in self._packed[node.output]) * counter.calls
                dense = counter.bytes_read if kind == "lm_head" else whole
                read = LinearCount(counter.channels_active, counter.channels_total, counter.bytes_read, dense)
                self._counts.setdefault(node.attrs["site"], LinearCount()).add(read)

    # ---- building

    def _measure_layouts(self, selector: ThresholdSelector | None) -> None:
        """Time both layouts of every matrix that skips channels; nothing is packed yet, and all of it is freed."""
        if selector is None:
            if self._options.layout != "auto":
                self._notes.append(f"ignored   layout {self._options.layout}: no thresholds, so weights lie in order")
            return
        candidates = []
        for node, own in zip(self._graph.nodes, self._own, strict=True):
            if own and node.op == "linear":
                shape = LinearShape.of(node, self._model.weights)
                plans = plan_linear(node, self._model.weights, selector, self._options, shape)
                pack = partial(self._pack, node)
                candidates += [Candidate(p.skipped, p, pack) for p in plans if p.skipped is not None]
        begin = time.perf_counter()
        cold = exceeds_caches(self._model.checkpoint.size_bytes)
        timer = LayoutTimer(self._program.isa, self._pool, self._options.activations, cold=cold)
        self._layouts = measure_layouts(candidates, timer)
        if candidates:
            seconds = time.perf_counter() - begin
            self._notes.append(f"layouts   {len(self._layouts)} timed in {seconds:.2f} s (layout to force one)")

    def _build(self, selector: ThresholdSelector | None) -> None:
        nodes = [node for node, own in zip(self._graph.nodes, self._own, strict=True) if own]
        made = {node.output for node in nodes}
        outside = {n for node, own in zip(self._graph.nodes, self._own, strict=True) if not own for n in node.inputs}
        given = {name for node in nodes for name in node.inputs if name not in made}
        slots = assign_buffers(self._graph, nodes, {self._graph.logits} | (outside & made) | given)
        ids: dict[int, int] = {}
        self._buffers: dict[str, int] = {}
        for name, (slot, width) in slots.items():
            if slot not in ids:
                ids[slot] = self._program.add_buffer(width)
            self._buffers[name] = ids[slot]
        for name in given & self._graph.selected():
            self._program.set_selected(self._buffers[name], True)
        for index, (node, own) in enumerate(zip(self._graph.nodes, self._own, strict=True)):
            if own:
                self._op[index] = self._add_op(node, selector)

    def _add_op(self, node: Node, selector: ThresholdSelector | None) -> int:
        program, attrs = self._program, node.attrs
        out = self._buffers[node.output]
        inputs = [self._buffers[name] for name in node.inputs]
        heads = {key: attrs[key] for key in ("heads", "kv_heads", "head_dim") if key in attrs}
        if node.op == "embed":
            return program.op_embed(self._row_source(node.weights[0]), out)
        if node.op == "positions":
            return program.op_positions(self._row_source(node.weights[0]), inputs[0], out, attrs["offset"])
        if node.op == "layer_norm":
            weight = self._vector(node.weights[0]) + np.float32(attrs["offset"])
            bias = self._vector(node.weights[1]) if len(node.weights) > 1 else np.zeros_like(weight)
            return program.op_layer_norm(inputs[0], out, weight, bias, attrs["eps"])
        if node.op == "rms_norm":
            return program.op_rms_norm(inputs[0], out, self._vector(node.weights[0]), attrs["eps"])
        if node.op == "linear":
            return self._add_linear(node, inputs[0], out, selector)
        if node.op == "head_norm":
            q_norm, k_norm = (self._vector(name) for name in node.weights)
            return program.op_head_norm(inputs[0], out, q_norm, k_norm, attrs["eps"], **heads)
        if node.op == "rope":
            return program.op_rope(inputs[0], out, attrs["inv_freq"], attrs["attention_factor"], **heads)
        if node.op == "attention":
            return program.op_attention(
                inputs[0],
                out,
                attrs["layer"],
                scale=attrs["scale"],
                window=attrs["window"],
                slopes=attrs.get("slopes"),
                **heads,
            )
        if node.op in ("gated_act", "act"):
            ids = None if "ids" not in attrs else list(attrs["ids"])
            add = program.op_gated_act if node.op == "gated_act" else program.op_act
            return add(inputs[0], out, native_name(attrs["act"]), ids, attrs.get("threshold", 0.0))
        if node.op == "add":
            return program.op_add(inputs[0], inputs[1], out)
        if node.op == "select":
            return program.op_select(inputs[0], out)
        raise UnsupportedError(f"the native executor has no op {node.op!r}")

    def _add_linear(self, node: Node, x: int, out: int, selector: ThresholdSelector | None) -> int:
        attrs = node.attrs
        matrices = self._matrices(node, selector)
        bias: Float32 | None = None
        if any(attrs["biases"]):
            rows = attrs.get("rows")
            shape = LinearShape.of(node, self._model.weights)
            parts = []
            for weight, name in zip(node.weights, attrs["biases"], strict=True):
                part = self._vector(name) if name else np.zeros(shape.stored_rows[weight], np.float32)
                parts.append(part if rows is None else part[list(rows)])
            bias = np.concatenate(parts)
        return self._program.op_linear(x, out, matrices, bias, self._options.activations)

    def _matrices(self, node: Node, selector: ThresholdSelector | None) -> list[_core.PackedMatrix]:
        if node.output in self._packed:
            return self._packed[node.output]
        weights = self._model.weights
        shape = LinearShape.of(node, weights)
        matrices = []
        for planned in plan_linear(node, weights, selector, self._options, shape):
            plan = settle(planned, self._layouts)
            if plan.codec is not None:
                for name in plan.weights:
                    require_finite(weights.source(name), self._options.weights)
            matrix = self._pack(node, plan, self._arena)
            self.linears.append(PackedLinear(node.attrs["site"], plan, matrix.codec, matrix.layout, matrix.nbytes))
            matrices.append(matrix)
        self._packed[node.output] = matrices
        return matrices

    def _pack(self, node: Node, plan: MatrixPlan, arena: _core.Arena) -> _core.PackedMatrix:
        """One matrix of a node, its source pages let go."""
        sources = [self._model.weights.source(name) for name in plan.weights]
        parts = [_part(source, node.attrs.get("rows"), node.attrs.get("columns")) for source in sources]
        inputs = LinearShape.of(node, self._model.weights).inputs
        matrix = _core.PackedMatrix.pack(
            parts, inputs, plan.codec, plan.layout, plan.chunk, plan.segments, self._pool, arena
        )
        for source in sources:
            source.release()
        return matrix

    def _row_source(self, name: str) -> _core.RowSource:
        """The embedding: the head's packed matrix when tied, else rows decoded from the file when they are read."""
        source = self._model.weights.source(name)
        for node, own in zip(self._graph.nodes, self._own, strict=True):
            tied = node.op == "linear" and len(node.weights) == 1
            if tied and own and self._model.weights.source(node.weights[0]) is source:
                return self._matrices(node, None)[0]
        return _core.StoredRows(_part(source, None, None), source.shape[1])

    def _vector(self, name: str) -> Float32:
        values = self._model.weights.float32(name)
        return np.ascontiguousarray(values, np.float32)


def _part(
    source: WeightSource, rows: Sequence[int] | None, columns: Sequence[int] | None
) -> tuple[NDArray[np.uint8], str, NDArray[np.int32] | None]:
    """Raw rows, type and row order of a weight; `rows` and `columns` (whole blocks) as a split keeps them."""
    raw, index = source.raw, source.row_index
    if rows is not None:
        kept = np.asarray(rows, np.int32)
        index = kept if index is None else np.ascontiguousarray(index[kept])
    if columns is not None:
        per_block = raw.shape[1] * _block_inputs(source.type) // source.shape[1]
        blocks = np.asarray(columns[:: _block_inputs(source.type)]) // _block_inputs(source.type)
        raw = np.ascontiguousarray(raw.reshape(raw.shape[0], -1, per_block)[:, blocks].reshape(raw.shape[0], -1))
    return raw, source.type, index


def _block_inputs(stored: str) -> int:
    """Inputs of one stored block of a type."""
    if stored in ("F32", "F16", "BF16"):
        return 1
    return 256 if stored.endswith("_K") else 32
