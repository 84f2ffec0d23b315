"""CpuExecutor: the native executor. A whole step of its nodes is one call without the GIL."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from thinfer import _core
from thinfer.core.active_set import ActiveSet
from thinfer.core.graph import Graph, Node
from thinfer.core.neuron_selector import NeuronSelector
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
from thinfer.engine.neuron_lists import NeuronLists
from thinfer.engine.neurons import (
    NeuronFfn,
    as_part_of,
    describe_neurons,
    find_ffns,
    neuron_nodes,
    plan_neurons,
    with_neurons,
    zero_sites,
)
from thinfer.engine.options import EngineOptions
from thinfer.engine.packing import stored_part
from thinfer.engine.plan import LinearShape, MatrixPlan, Skipped, assign_buffers, plan_linear
from thinfer.errors import UnsupportedError, UsageError
from thinfer.kernels.act import native_name
from thinfer.models.loader import Model

_READERS = ("linear", "neurons")


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
    `set_selector` changes thresholds later without repacking, which changes speed and never tokens. `neurons` decides
    which neurons are computed; None: those that fire. Raises UsageError for an instruction set this machine lacks.

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
        neurons: NeuronSelector | None = None,
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
        self._op: list[range] = [range(0)] * len(self._graph.nodes)
        self._packed: dict[str, list[_core.PackedMatrix]] = {}
        self.linears: list[PackedLinear] = []
        self._layouts: Mapping[Skipped, LayoutTimes] = {}
        self._notes: list[str] = []
        self._counts: dict[str, LinearCount] = {}
        self._times: dict[str, list[int]] = {}
        if neurons is None and options.neurons != "off" and options.sparsity:
            neurons = NeuronSelector()
        self._neurons = neurons
        self._ffns = find_ffns(self._graph.nodes, self._own, neurons, selector)
        self._zeros = zero_sites(self._graph.nodes, self._ffns, neurons)
        self._measure_layouts(selector)
        skipping = [
            ffn for ffn in self._ffns if ffn.listed or (ffn.gated and self._skips(self._graph.nodes[ffn.first], ffn))
        ]
        self._nodes, self._widths = with_neurons(self._graph, skipping)
        self._skipping = {ffn.layer: ffn for ffn in skipping}
        starts = [self._graph.nodes[ffn.first] for ffn in skipping]
        self._parts = {node.attrs["site"]: len(node.weights) for node in starts}
        self._lists = NeuronLists(neurons, skipping)
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
            # Float kernels pass over zeros only below a threshold; 0 drops nothing but them.
            least = 0.0 if site in self._zeros else -1.0
            threshold = None if selector is None else selector.thresholds.get(site)
            scale = None if selector is None else selector.channel_scale.get(site)
            columns = node.attrs.get("columns")
            if scale is not None and columns is not None:
                scale = scale[list(columns)]
            if scale is not None:
                scale = np.ascontiguousarray(scale, np.float32)
            self._program.set_threshold(op, least if threshold is None else threshold, scale)

    def set_active(self, layer: int, active: ActiveSet | None) -> None:
        """Compute only these neurons of a layer's FFN, a group a row of the next batches; None: all of them."""
        self._lists.set(layer, active, self._graph)

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
        lines += describe_neurons(self._ffns, sum(not ffn.listed for ffn in self._skipping.values()), self._neurons)
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
        ops = [ops for ops in self._op[first:last] if ops]
        if ops:
            self._program.run(
                ops[0].start,
                ops[-1].stop,
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
        """Ops that read the weights of a site, the last of their nodes."""
        pairs = zip(self._nodes, self._op, strict=True)
        return [(node, ops[-1]) for node, ops in pairs if node is not None and node.op in _READERS and ops]

    def _collect(self) -> None:
        kinds = {ops[-1]: node for node, ops in zip(self._nodes, self._op, strict=True) if node is not None and ops}
        for index, counter in enumerate(self._program.take_counters()):
            node = kinds.get(index)
            kind = "predictor" if node is None else node.attrs["kind"] if node.op in _READERS else node.op
            times = self._times.setdefault(kind, [0, 0, 0])
            for place, value in enumerate((counter.calls, counter.nanoseconds, counter.bytes_read)):
                times[place] += value
            if node is None:
                self._lists.count(index, counter, self._counts)
                continue
            if node.op == "neurons":
                self._lists.count_found(node.attrs["layer"], counter, self._counts)
            if node.op in _READERS and counter.channels_total:
                # The head runs for chosen rows only, and never under a threshold.
                whole = sum(matrix.nbytes for matrix in self._packed[node.output]) * counter.calls
                dense = counter.bytes_read if kind == "lm_head" else whole
                # Gate and up that run apart are still one site: its channels are those of both together.
                parts = self._parts.get(node.attrs["site"], 1)
                active, total = counter.channels_active // parts, counter.channels_total // parts
                read = LinearCount(active, total, counter.bytes_read, dense)
                self._counts.setdefault(node.attrs["site"], LinearCount()).add(read)

    # ---- building

    def _measure_layouts(self, selector: ThresholdSelector | None) -> None:
        """Time both layouts of every matrix that may skip; nothing is packed yet, and all of it is freed."""
        if selector is None and not self._zeros:
            if self._options.layout != "auto":
                self._notes.append(
                    f"ignored   layout {self._options.layout}: nothing is dropped, so weights lie in order"
                )
            return
        plans = []
        for node, own in zip(self._graph.nodes, self._own, strict=True):
            if own and node.op == "linear":
                plans += [(node, p) for p in self._linear_plans(node, selector)]
        if self._options.neurons == "auto":
            for ffn in self._ffns:
                node = self._graph.nodes[ffn.first]
                gate, _ = neuron_nodes(self._graph.nodes, ffn)
                if gate is not None and ffn.gated:
                    plans += [(gate, p) for p in self._linear_plans(gate, selector)]
                skipping = plan_neurons(node, ffn, self._model.weights, self._options)
                plans += [(node, p) for p in (skipping if ffn.listed else skipping[1:])]
        candidates = [Candidate(p.skipped, p, partial(self._pack, node)) for node, p in plans if p.skipped is not None]
        begin = time.perf_counter()
        cold = exceeds_caches(self._model.checkpoint.size_bytes)
        timer = LayoutTimer(self._program.isa, self._pool, self._options.activations, cold=cold)
        self._layouts = measure_layouts(candidates, timer)
        if candidates:
            seconds = time.perf_counter() - begin
            self._notes.append(f"layouts   {len(self._layouts)} timed in {seconds:.2f} s (layout to force one)")

    def _skips(self, node: Node, ffn: NeuronFfn) -> bool:
        """Whether up of a gated FFN is read for the neurons that fire only."""
        if self._options.neurons != "auto":
            return True
        up = settle(plan_neurons(node, ffn, self._model.weights, self._options)[1], self._layouts)
        note = f"neurons   up is read whole: {up.why}"
        if up.layout != "neurons" and note not in self._notes:
            self._notes.append(note)
        return up.layout == "neurons"

    def _build(self, selector: ThresholdSelector | None) -> None:
        nodes = [node for node, own in zip(self._nodes, self._own, strict=True) if own and node is not None]
        made = {node.output for node in nodes}
        outside = {n for node, own in zip(self._graph.nodes, self._own, strict=True) if not own for n in node.inputs}
        given = {name for node in nodes for name in node.inputs if name not in made}
        users = [replace(n, inputs=(*n.inputs, *self._lists.read_ahead(n, nodes))) for n in nodes]
        slots = assign_buffers(self._widths, users, {self._graph.logits} | (outside & made) | given)
        ids: dict[int, int] = {}
        self._buffers: dict[str, int] = {}
        for name, (slot, width) in slots.items():
            if slot not in ids:
                ids[slot] = self._program.add_buffer(width)
            self._buffers[name] = ids[slot]
        for name in given & self._graph.selected():
            self._program.set_selected(self._buffers[name], True)
        for index, (node, own) in enumerate(zip(self._nodes, self._own, strict=True)):
            if own and node is not None:
                first = self._program.ops
                self._add_predictors(node)
                self._lists.run_beside(self._program, node, self._add_op(node, selector))
                self._op[index] = range(first, self._program.ops)

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
        if node.op == "neurons":
            return self._add_neurons(node, inputs, out)
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
                lists=self._lists.heads(attrs["layer"]),
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
            parts = []
            for part in self._biases(node):
                parts.append(part if rows is None else part[list(rows)])
            bias = np.concatenate(parts)
        return self._program.op_linear(x, out, matrices, bias, self._options.activations)

    def _biases(self, node: Node) -> list[Float32]:
        """A node's biases as stored, zeros where a weight has none."""
        stored = LinearShape.of(node, self._model.weights).stored_rows
        return [
            self._vector(name) if name else np.zeros(stored[weight], np.float32)
            for weight, name in zip(node.weights, node.attrs["biases"], strict=True)
        ]

    def _add_predictors(self, node: Node) -> None:
        """What reads the input of an FFN or an attention, before these."""
        if node.op in _READERS and node.attrs["kind"] in ("gate_up", "up", "qkv"):
            source = self._buffers[node.inputs[0]]
            kind, layer, activations = node.attrs["kind"], node.attrs["layer"], self._options.activations
            self._lists.add_predictors(self._program, kind, layer, source, self._pool, self._arena, activations)

    def _add_neurons(self, node: Node, inputs: Sequence[int], out: int) -> int:
        """Neurons whose gate is another buffer (their one weight is up), or all of a listed FFN's."""
        attrs, listed = node.attrs, len(inputs) == 1
        ffn = self._skipping[attrs["layer"]]
        matrices = []
        plans = plan_neurons(self._graph.nodes[ffn.first], ffn, self._model.weights, self._options)
        for planned in plans[-len(node.weights) :]:
            plan = settle(planned, self._layouts) if self._options.neurons == "auto" else planned
            matrices.append(self._packed_matrix(node, plan))
        self._packed[node.output] = matrices
        biases = self._biases(node) if any(attrs["biases"]) else [None] * len(matrices)
        gate = matrices[0] if listed else None
        up = None if listed and not ffn.gated else matrices[-1]
        op = self._program.op_neurons(
            inputs[0],
            out,
            native_name(attrs["act"]),
            attrs.get("threshold", 0.0),
            self._options.activations,
            None if listed else inputs[1],
            gate,
            up,
            biases[0] if listed else None,
            None if up is None else biases[-1],
            self._lists.of(attrs["layer"]),
        )
        self._lists.check(self._program, op, attrs["layer"], self._options.recall_steps)
        return op

    def _matrices(self, node: Node, selector: ThresholdSelector | None) -> list[_core.PackedMatrix]:
        if node.output in self._packed:
            return self._packed[node.output]
        plans = [settle(planned, self._layouts) for planned in self._linear_plans(node, selector)]
        matrices = [self._packed_matrix(node, plan) for plan in plans]
        self._packed[node.output] = matrices
        return matrices

    def _linear_plans(self, node: Node, selector: ThresholdSelector | None) -> list[MatrixPlan]:
        weights, options = self._model.weights, self._options
        plans = plan_linear(node, weights, selector, options, LinearShape.of(node, weights), self._zeros)
        for whole in self._graph.nodes:
            if (
                whole.op == "linear"
                and whole.attrs["site"] == node.attrs["site"]
                and len(whole.weights) > len(node.weights)
            ):
                plans = as_part_of(plans, plan_linear(whole, weights, None, options, LinearShape.of(whole, weights)))
        return plans

    def _packed_matrix(self, node: Node, plan: MatrixPlan) -> _core.PackedMatrix:
        if plan.codec is not None:
            for name in plan.weights:
                require_finite(self._model.weights.source(name), self._options.weights)
        matrix = self._pack(node, plan, self._arena)
        self.linears.append(PackedLinear(node.attrs["site"], plan, matrix.codec, matrix.layout, matrix.nbytes))
        return matrix

    def _pack(self, node: Node, plan: MatrixPlan, arena: _core.Arena) -> _core.PackedMatrix:
        """One matrix of a node, its source pages let go."""
        sources = [self._model.weights.source(name) for name in plan.weights]
        parts = [stored_part(source, node.attrs.get("rows"), node.attrs.get("columns")) for source in sources]
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
        for node, own in zip(self._graph.nodes, self._own, strict=True):  # the head is never part of an FFN
            tied = node.op == "linear" and len(node.weights) == 1
            if tied and own and self._model.weights.source(node.weights[0]) is source:
                return self._matrices(node, None)[0]
        return _core.StoredRows(stored_part(source, None, None), source.shape[1])

    def _vector(self, name: str) -> Float32:
        values = self._model.weights.float32(name)
        return np.ascontiguousarray(values, np.float32)
