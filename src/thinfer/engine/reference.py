"""ReferenceExecutor: every node in NumPy float32, the definition that other executors are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from thinfer.core.active_set import ActiveSet
from thinfer.core.graph import Graph, Node
from thinfer.core.selector import ChannelMask
from thinfer.engine.batch import Batch
from thinfer.engine.executor import Float32, LinearCount, Observe
from thinfer.engine.kv_cache import KvLayout
from thinfer.engine.neurons import ZERO_ACTS
from thinfer.engine.predictors import predictor_site
from thinfer.errors import UsageError
from thinfer.kernels import (
    act,
    add,
    attention,
    embed,
    gated_act,
    head_norm,
    layer_norm,
    linear,
    positions,
    rms_norm,
    rope,
    select,
)
from thinfer.models.loader import Model


class ReferenceExecutor:
    """Runs nodes one by one; weights are decoded to float32 when first used and then kept.

    Keys and values are float32 whatever the layout's type, and committed when first written. `graph` None is the
    model's own. In sparse rows only what both `selector` and `predicted` keep is multiplied; all of them count for the
    recall of predictors.

    Example: `ReferenceExecutor(model, KvLayout(num_blocks=16)).run(batch)`.
    """

    name = "reference"

    def __init__(
        self,
        model: Model,
        layout: KvLayout,
        *,
        graph: Graph | None = None,
        selector: ChannelMask | None = None,
        predicted: ChannelMask | None = None,
    ) -> None:
        self._model = model
        self._layout = layout
        self._graph = graph or model.graph
        self._selector = selector
        self._predicted = predicted
        self._decoded: dict[str, Float32] = {}
        self._parts: dict[str, list[Float32]] = {}
        self._cache: dict[int, tuple[Float32, Float32]] = {}
        self._counts: dict[str, LinearCount] = {}
        self._active: dict[str, ActiveSet] = {}
        # Outputs of activations of FFNs whose neurons do or do not fire.
        downs = {n.inputs[0] for n in self._graph.nodes if n.op == "linear" and n.attrs["kind"] == "down"}
        self._zeros = {n.output for n in self._graph.nodes if n.attrs.get("act") in ZERO_ACTS} & downs

    def run(self, batch: Batch, *, observe: Observe | None = None) -> Float32:
        """Run the whole graph; returns logits float32 [L, vocab] of `batch.out_rows`."""
        logits = self._graph.logits
        return self.run_nodes(0, len(self._graph.nodes), batch, {}, (logits,), observe=observe)[logits]

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
        """Run nodes `first` to `last - 1`: buffers in, buffers out, each float32 [rows, width].

        `observe` needs linears that see their whole input; on a split FFN it raises UsageError.
        """
        buffers = dict(inputs)
        nodes = self._graph.nodes[first:last]
        last_reader = {name: i for i, node in enumerate(nodes) for name in node.inputs}
        for i, node in enumerate(nodes):
            # NaN and infinities of the model's own are results here, not mistakes of the code.
            with np.errstate(over="ignore", invalid="ignore"):
                result = self._run_node(node, [buffers[name] for name in node.inputs], batch, observe)
            active = self._active.get(node.output)
            buffers[node.output] = result if active is None else np.where(active.mask(), result, np.float32(0))
            for name in node.inputs:
                if last_reader[name] == i and name not in outputs:
                    buffers.pop(name, None)
        return {name: buffers[name] for name in outputs}

    def set_selector(self, selector: ChannelMask | None) -> None:
        """Keep only what this says, in sparse rows, from now on; None makes every row dense."""
        self._selector = selector

    def set_active(self, layer: int, active: ActiveSet | None) -> None:
        """Make all neurons of a layer's FFN but these 0, a group a row of the next batches; None: none."""
        nodes = self._graph.nodes
        starts = [i for i, n in enumerate(nodes) if n.op == "linear" and n.attrs["kind"] in ("gate_up", "up")]
        output = next((nodes[i + 1].output for i in starts if nodes[i].attrs["layer"] == layer), None)
        if output is None:
            raise UsageError(f"layer {layer} has no FFN")
        if active is None:
            self._active.pop(output, None)
            return
        if active.size != self._graph.buffers[output]:
            raise UsageError(f"layer {layer} has {self._graph.buffers[output]} neurons, the list is over {active.size}")
        self._active[output] = active

    def counters(self) -> Mapping[str, LinearCount]:
        """Counts by site since the last reset; bytes are those of the float32 weights, read whole."""
        return self._counts

    def reset_counters(self) -> None:
        """Set all counts to zero."""
        self._counts = {}

    def describe(self) -> list[str]:
        """What this executor is, for start-up."""
        values = self._model.num_parameters
        lines = [
            f"reference NumPy float32, keys and values float32; up to {4 * values / 1e9:.2f} GB of decoded weights"
        ]
        if self._model.ignored:
            lines.append(f"ignored   {len(self._model.ignored)} tensors: {', '.join(self._model.ignored[:4])}")
        return lines

    def close(self) -> None:
        """Forget all weights, keys and values."""
        self._decoded.clear()
        self._parts.clear()
        self._cache.clear()

    def _run_node(self, node: Node, inputs: list[Float32], batch: Batch, observe: Observe | None) -> Float32:
        attrs = node.attrs
        if node.op == "embed":
            return embed.reference(self._weight(node.weights[0]), batch.tokens)
        if node.op == "positions":
            return positions.reference(inputs[0], self._weight(node.weights[0]), batch.positions, attrs["offset"])
        if node.op == "layer_norm":
            weight = self._weight(node.weights[0]) + np.float32(attrs["offset"])
            bias = self._weight(node.weights[1]) if len(node.weights) > 1 else np.zeros_like(weight)
            return layer_norm.reference(inputs[0], weight, bias, attrs["eps"])
        if node.op == "rms_norm":
            return rms_norm.reference(inputs[0], self._weight(node.weights[0]), attrs["eps"])
        if node.op == "linear":
            return self._linear(node, inputs[0], batch, observe)
        if node.op == "head_norm":
            q_norm, k_norm = (self._weight(name) for name in node.weights)
            return head_norm.reference(inputs[0], q_norm=q_norm, k_norm=k_norm, **attrs)
        if node.op == "rope":
            return rope.reference(inputs[0], positions=batch.positions, **attrs)
        if node.op == "attention":
            return self._attention(node, inputs[0], batch)
        if node.op == "gated_act":
            return gated_act.reference(inputs[0], **attrs)
        if node.op == "act":
            return act.reference(inputs[0], **attrs)
        if node.op == "add":
            return add.reference(*inputs)
        return select.reference(inputs[0], batch.out_rows)

    def _linear(self, node: Node, x: Float32, batch: Batch, observe: Observe | None) -> Float32:
        site, kind, columns = node.attrs["site"], node.attrs["kind"], node.attrs.get("columns")
        if observe is not None:
            if columns is not None or "rows" in node.attrs:
                raise UsageError(f"{site} is split between executors and cannot be observed; use the unsplit graph")
            observe(site, x)
        active = x.size
        if kind != "lm_head" and batch.sparse.any():
            selected, named = (
                None if mask is None else mask.keep(site, x, columns) for mask in (self._selector, self._predicted)
            )
            if named is not None and node.inputs[0] in self._zeros:
                self._count_found(node, x, named, batch)
            kept = [mask for mask in (selected, named) if mask is not None]
            if kept:
                keep = np.logical_and.reduce(kept) | (batch.sparse[:, None] == 0)
                x = np.where(keep, x, np.float32(0))
                active = int(np.count_nonzero(keep))
        weights, biases = self._weights(node)
        read = sum(w.nbytes for w in weights) if len(x) else 0
        self._counts.setdefault(site, LinearCount()).add(LinearCount(active, x.size, read, read))
        return linear.reference(x, weights, biases)

    def _count_found(self, node: Node, x: Float32, named: NDArray[np.bool_], batch: Batch) -> None:
        """Count the neurons that fired in sparse rows, and of them those that were named."""
        fired = (x != 0) & (batch.sparse[:, None] != 0)
        found = LinearCount(needed=int(np.count_nonzero(fired)), found=int(np.count_nonzero(fired & named)))
        self._counts.setdefault(predictor_site(node.attrs["layer"]), LinearCount()).add(found)

    def _attention(self, node: Node, qkv: Float32, batch: Batch) -> Float32:
        attrs = dict(node.attrs)
        layer = attrs.pop("layer")
        if layer not in self._cache:
            shape = (self._layout.num_blocks, self._layout.block_size, attrs["kv_heads"], attrs["head_dim"])
            self._cache[layer] = (np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        keys, values = self._cache[layer]
        return attention.reference(
            qkv,
            keys=keys,
            values=values,
            block_table=batch.block_table,
            positions=batch.positions,
            sequence=batch.sequence,
            **attrs,
        )

    def _weight(self, name: str) -> Float32:
        if name not in self._decoded:
            self._decoded[name] = self._model.weights.float32(name)
            self._model.weights.source(name).release()
        return self._decoded[name]

    def _weights(self, node: Node) -> tuple[list[Float32], list[Float32 | None]]:
        """A linear's weights and biases, cut to the rows and columns that its node keeps."""
        rows, columns = node.attrs.get("rows"), node.attrs.get("columns")
        biases = [self._weight(name) if name else None for name in node.attrs["biases"]]
        if rows is None and columns is None:
            return [self._weight(name) for name in node.weights], biases
        if rows is not None:
            biases = [None if bias is None else bias[list(rows)] for bias in biases]
        if node.output not in self._parts:
            whole = [self._model.weights.float32(name) for name in node.weights]
            part = [w if rows is None else w[list(rows)] for w in whole]
            self._parts[node.output] = [
                w if columns is None else np.ascontiguousarray(w[:, list(columns)]) for w in part
            ]
        return self._parts[node.output], biases
