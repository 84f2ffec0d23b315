"""Lists of neurons and heads in the native executor: given from outside, or filled by predictors of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from thinfer import _core
from thinfer.core.active_set import ActiveSet
from thinfer.core.graph import Graph, Node
from thinfer.core.neuron_selector import NeuronPredictor, NeuronSelector, StoredMatrix
from thinfer.engine.executor import LinearCount
from thinfer.engine.neurons import NeuronFfn
from thinfer.engine.options import ActivationType
from thinfer.engine.predictors import predictor_site
from thinfer.errors import UsageError

_SOURCES = {"neurons": ("gate_up", "up"), "attention": ("qkv",)}
"""Kinds of linears whose input a predictor reads, by the op that reads its list."""


class NeuronLists:
    """The lists of the layers that take one; a predictor's ops run before the linear whose input it reads.

    Example: `NeuronLists(NeuronSelector("given"), ffns).set(3, active, graph)`.
    """

    def __init__(self, selector: NeuronSelector | None, ffns: Sequence[NeuronFfn]) -> None:
        self._selector = selector or NeuronSelector()
        self._ffns = {ffn.layer: ffn for ffn in ffns if ffn.listed}
        self._lists = {layer: _core.NeuronLists() for layer in self._ffns}
        self._heads = {layer: _core.NeuronLists() for layer in self._selector.heads}
        self._sites: dict[int, str] = {}
        # Ops of predictors that look ahead, by the op and the layer that read their list.
        self._chains: dict[tuple[str, int], range] = {}

    def of(self, layer: int) -> _core.NeuronLists | None:
        """The list of a layer's neurons; None where it takes none."""
        return self._lists.get(layer)

    def heads(self, layer: int) -> _core.NeuronLists | None:
        """The list of a layer's heads; None where all are computed."""
        return self._heads.get(layer)

    def set(self, layer: int, active: ActiveSet | None, graph: Graph) -> None:
        """Fill a layer's list; UsageError when it takes none or has another number of neurons."""
        lists = self._lists.get(layer)
        if lists is None or self._selector.predictors:
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
        kind: str,
        layer: int,
        x: int,
        pool: _core.ThreadPool,
        arena: _core.Arena,
        activations: ActivationType,
    ) -> None:
        """Add the ops of the predictors that read what this layer's linear of a kind reads, buffer `x`."""
        reader = "attention" if kind in _SOURCES["attention"] else "neurons"
        lists = self._heads if reader == "attention" else self._lists
        for target, predictor in self._predictors(reader).items():
            if predictor.source == layer and target in lists:
                site = f"layers.{target}.head_predictor" if reader == "attention" else predictor_site(target)
                if site in self._sites.values():  # gate and up that run apart read the same input
                    continue
                ops = _add(program, predictor, x, lists[target], pool, arena, activations)
                self._sites |= dict.fromkeys(ops, site)
                if target != layer:
                    self._chains[reader, target] = range(ops[0], ops[-1] + 1)

    def read_ahead(self, node: Node, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Buffers that must stay until this node: what the predictor of its list may still read."""
        predictor = self._predictors(node.op).get(node.attrs["layer"]) if node.op in _SOURCES else None
        if predictor is None or predictor.source == node.attrs["layer"]:
            return ()
        kinds, layer = _SOURCES[node.op], predictor.source
        sources = (n for n in nodes if n.attrs.get("kind") in kinds and n.attrs["layer"] == layer)
        return tuple({source.inputs[0] for source in sources})

    def run_beside(self, program: _core.Program, node: Node, op: int) -> None:
        """Let a predictor that looks ahead run beside the ops in front of this one, which reads its list."""
        chain = self._chains.get((node.op, node.attrs.get("layer", -1)))
        if chain is not None:
            program.set_beside(chain.start, chain.stop, op)

    def _predictors(self, op: str) -> Mapping[int, NeuronPredictor]:
        return self._selector.predictors if op == "neurons" else self._selector.heads

    def check(self, program: _core.Program, op: int, layer: int, steps: int) -> None:
        """Have a neurons op count what its layer's predictor finds, in one step of so many; 0: never.

        Only where a neuron that does not fire is exactly 0. Lists that a caller gives are the caller's to judge.
        """
        if steps and layer in self._selector.predictors and self._ffns[layer].zeros:
            # Layers take turns, so that no step pays for many of them.
            program.check_lists(op, steps, layer % steps)

    def count_found(self, layer: int, counter: _core.OpCounters, counts: dict[str, LinearCount]) -> None:
        """Add what a neurons op counted of its predictor's lists to the predictor's site."""
        if counter.needed:
            found = LinearCount(needed=counter.needed, found=counter.found)
            counts.setdefault(predictor_site(layer), LinearCount()).add(found)

    def count(self, op: int, counter: _core.OpCounters, counts: dict[str, LinearCount]) -> None:
        """Add what an op of a predictor read to its site, "layers.3.predictor" or "layers.3.head_predictor"."""
        read = LinearCount(counter.channels_active, counter.channels_total, counter.bytes_read, 0)
        counts.setdefault(self._sites[op], LinearCount()).add(read)


def _add(
    program: _core.Program,
    predictor: NeuronPredictor,
    x: int,
    lists: _core.NeuronLists,
    pool: _core.ThreadPool,
    arena: _core.Arena,
    activations: ActivationType,
) -> list[int]:
    """The ops of one predictor, which fill its lists."""
    ops = []
    last = len(predictor.factors) - 1
    for index, factor in enumerate(predictor.factors):
        out = program.add_buffer(len(factor.raw))
        bias = None if index < last or predictor.bias is None else np.ascontiguousarray(predictor.bias, np.float32)
        ops.append(program.op_linear(x, out, [_pack(factor, pool, arena)], bias, activations))
        x = out
        if index < last and predictor.hidden_act == "relu":
            x = program.add_buffer(len(factor.raw))
            ops.append(program.op_act(out, x, "relu"))
    for op in ops:
        # Where no row is sparse nothing is left out, so nothing need be predicted.
        program.set_sparse_only(op)
    return [*ops, program.op_pick_neurons(x, predictor.threshold, lists)]


def _pack(factor: StoredMatrix, pool: _core.ThreadPool, arena: _core.Arena) -> _core.PackedMatrix:
    part = (np.ascontiguousarray(factor.raw), factor.type, None)
    layout, chunk = ("columns", 64) if factor.type in ("F32", "F16", "BF16") else ("rows", 0)
    return _core.PackedMatrix.pack([part], factor.inputs, None, layout, chunk, 1, pool, arena)
