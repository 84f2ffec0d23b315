"""Leaves out predictors that read more than they save. Bytes decide, not time: the same ones on every machine."""

from __future__ import annotations

from dataclasses import replace

from thinfer.core.neuron_selector import NeuronSelector
from thinfer.engine.neurons import find_ffns
from thinfer.engine.options import EngineOptions
from thinfer.engine.plan import weight_bytes
from thinfer.models.loader import Model


def pays(reads: float, named: float, needed: float, first: float, rest: float, *, zeros: bool = True) -> bool:
    """Whether an FFN reads fewer bytes a token with a predictor than without.

    Args:
        reads: bytes of the predictor.
        named: fraction of the neurons that it names.
        needed: fraction that fires, where `zeros`.
        first: bytes of the gate, or of up where there is none.
        rest: bytes of the other matrices.
        zeros: neurons that do not fire are exactly 0: without a predictor `first` is read, and of the rest what fires.

    Example:
        >>> pays(7, named=0.1, needed=0.1, first=100, rest=200), pays(7, named=1, needed=1, first=100, rest=200)
        (True, False)
    """
    without = first + (needed if zeros else 1) * rest
    return reads + named * first + (min(named, needed) if zeros else named) * rest < without


def without_costly(
    selector: NeuronSelector | None, model: Model, options: EngineOptions
) -> tuple[NeuronSelector | None, tuple[str, ...]]:
    """The selector without those predictors of neurons that do not pay, and a line that names their layers.

    One that does not say how many neurons it names stays, and with ``options.neurons`` "skip" all do. What thresholds
    would skip without a predictor is not considered, nor are predictors of heads.

    Example: `without_costly(find_artifact(checkpoint, options).neurons, model, options)`.
    """
    if selector is None or not selector.predictors or options.neurons == "skip":
        return selector, ()
    nodes = model.graph.nodes
    costly = []
    for ffn in find_ffns(nodes, [True] * len(nodes), selector, None):
        predictor = selector.predictors.get(ffn.layer)
        if predictor is None or predictor.density is None:
            continue
        weights = (*nodes[ffn.first].weights, *nodes[ffn.first + 2].weights)
        first, *rest = (weight_bytes(name, model.weights, options) for name in weights)
        if not pays(predictor.nbytes, predictor.density, 1 - ffn.rate, first, sum(rest), zeros=ffn.zeros):
            costly.append(ffn.layer)
    if not costly:
        return selector, ()
    kept = {layer: one for layer, one in selector.predictors.items() if layer not in costly}
    kind = selector.kind if kept or selector.heads else "exact"
    layers = ", ".join(str(layer) for layer in costly)
    note = f"left out  predictor of the neurons of layer {layers}: it reads more than it saves"
    return replace(selector, kind=kind, predictors=kept), (note,)
