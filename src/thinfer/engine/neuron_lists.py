"""Lists of neurons in the native executor: given from outside, or filled by predictors that run in the program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinfer import _core
from thinfer.core.active_set import ActiveSet
from thinfer.core.graph import Graph
from thinfer.core.neuron_selector import NeuronPredictor, NeuronSelector, StoredMatrix
from thinfer.engine.executor import LinearCount
from thinfer.engine.neurons import NeuronFfn
from thinfer.engine.options import ActivationType
from thinfer.errors import UsageError


class NeuronLists:
    """The lists of the layers that take one; a predictor's ops run before the FFN whose input it reads.

    Example: `NeuronLists(NeuronSelector("given"), ffns).set(3, active, graph)`.
    """

    def __init__(self, selector: NeuronSelector | None, ffns: Sequence[NeuronFfn]) -> None:
        self._selector = selector
        self._ffns = {ffn.layer: ffn for ffn in ffns if ffn.listed}
        self._lists = {layer: _core.NeuronLists() for layer in self._ffns}
        self._pending = dict(selector.predictors) if selector is not None else {}
        self._ops: dict[int, int] = {}

    def of(self, layer: int) -> _core.NeuronLists | None:
        """The layer's list; None where it takes none."""
        return self._lists.get(layer)

    def set(self, layer: int, active: ActiveSet | None, graph: Graph) -> None:
        """Fill a layer's list; UsageError when it takes none or has another number of neurons."""
        lists = self._lists.get(layer)
        if lists is None or (self._selector is not None and self._selector.predictors):
            raise UsageError(
                f"layer {layer} takes no list of neurons; make the engine with neurons=NeuronSelector('given')"
            )
        if active is None:
            lists.clear()
            return
        neurons = graph.buffers[graph.nodes[self._ffns[layer].first + 1].output]
        if active.size != neurons:
            raise UsageError(f"layer {layer} has {neurons} neurons, the list is over {active.size}")
        lists.set(active.ids, active.offsets)

    def add_predictors(
        self,
        program: _core.Program,
        layer: int,
        x: int,
        pool: _core.ThreadPool,
        arena: _core.Arena,
        activations: ActivationType,
    ) -> None:
        """Add the ops of the predictors that read this layer's FFN input, buffer `x`."""
        for target in [target for target, predictor in self._pending.items() if predictor.source == layer]:
            predictor = self._pending.pop(target)
            if target in self._lists:
                self._add(program, target, predictor, x, pool, arena, activations)

    def count(self, op: int, counter: _core.OpCounters, counts: dict[str, LinearCount]) -> None:
        """Add what an op of a predictor read to its site, "layers.3.predictor"."""
        layer = self._ops[op]
        read = LinearCount(counter.channels_active, counter.channels_total, counter.bytes_read, 0)
        counts.setdefault(f"layers.{layer}.predictor", LinearCount()).add(read)

    def _add(
        self,
        program: _core.Program,
        layer: int,
        predictor: NeuronPredictor,
        x: int,
        pool: _core.ThreadPool,
        arena: _core.Arena,
        activations: ActivationType,
    ) -> None:
        last = len(predictor.factors) - 1
        for index, factor in enumerate(predictor.factors):
            matrix = _pack(factor, pool, arena)
            out = program.add_buffer(len(factor.raw))
            bias = None if index < last or predictor.bias is None else np.ascontiguousarray(predictor.bias, np.float32)
            self._ops[program.op_linear(x, out, [matrix], bias, activations)] = layer
            x = out
            if index < last and predictor.hidden_act == "relu":
                x = program.add_buffer(len(factor.raw))
                self._ops[program.op_act(out, x, "relu")] = layer
        self._ops[program.op_pick_neurons(x, predictor.threshold, self._lists[layer])] = layer


def _pack(factor: StoredMatrix, pool: _core.ThreadPool, arena: _core.Arena) -> _core.PackedMatrix:
    part = (np.ascontiguousarray(factor.raw), factor.type, None)
    layout, chunk = ("columns", 64) if factor.type in ("F32", "F16", "BF16") else ("rows", 0)
    return _core.PackedMatrix.pack([part], factor.inputs, None, layout, chunk, 1, pool, arena)
