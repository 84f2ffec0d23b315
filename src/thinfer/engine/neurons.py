"""FFNs whose neurons are skipped: which they are, how gate and up lie in memory, and their nodes for an executor.

An FFN gate|up -> activation -> down becomes gate -> neurons -> down: `neurons` computes up for what fired. Where
neurons are listed beforehand (by a caller or a predictor) it computes the gate as well, for those alone or,
where that is faster, for all of them: what is not listed is 0 all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from thinfer.core.graph import Graph, Node
from thinfer.core.neuron_selector import NeuronSelector
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.options import EngineOptions
from thinfer.engine.plan import LinearShape, MatrixPlan, Skipped, plan_linear, rate_step
from thinfer.models.loader import Weights

ZERO_ACTS = frozenset({"relu", "relu2", "fatrelu", "drelu"})
"""Activations that are exactly 0 for much of their range."""

ASSUMED_RATE = 0.65
"""Of neurons that do not fire, where nobody has measured it: models turned into ReLU models reach about this."""


ASSUMED_NORM_RATE = 0.5
"""Of channels that are 0 after a norm and a ReLU: a norm's outputs are about as often below 0 as above."""

ASSUMED_HEAD_RATE = 0.5
"""Of heads that a predictor leaves out, where it does not say."""


@dataclass(frozen=True, slots=True)
class NeuronFfn:
    """An FFN of a graph whose neurons may be skipped.

    Attributes:
        layer: its number.
        first: position of its gate|up (or only up) linear; the activation is the next node, down the one after.
        gated: whether it has a gate.
        zeros: whether its activation makes exact zeros.
        listed: whether neurons are listed before the gate is computed.
        rate: fraction of its neurons that is expected to be skipped.
        assumed: the rate is a guess.
    """

    layer: int
    first: int
    gated: bool
    zeros: bool
    listed: bool
    rate: float
    assumed: bool


def find_ffns(
    nodes: Sequence[Node], own: Sequence[bool], selector: NeuronSelector | None, thresholds: ThresholdSelector | None
) -> list[NeuronFfn]:
    """The FFNs of an executor's nodes where a selector has something to skip, whole ones only.

    An FFN whose input channels are dropped by a threshold keeps the layout for that, unless its neurons are listed.
    """
    if selector is None:
        return []
    found = []
    for index in range(len(nodes) - 2):
        first, act, down = nodes[index : index + 3]
        whole = first.op == "linear" and act.op in ("gated_act", "act") and down.op == "linear"
        if not (whole and all(own[index : index + 3]) and act.inputs == (first.output,)):
            continue
        split = "rows" in first.attrs or "columns" in down.attrs or "ids" in act.attrs
        if split or down.inputs != (act.output,):
            continue
        layer, zeros = first.attrs["layer"], act.attrs["act"] in ZERO_ACTS
        listed = selector.listed(layer)
        dropped = thresholds is not None and thresholds.thresholds.get(first.attrs["site"], 0.0) > 0.0
        if listed or (zeros and not dropped):
            rate = selector.rates.get(layer)
            known = ASSUMED_RATE if rate is None else rate
            found.append(NeuronFfn(layer, index, act.op == "gated_act", zeros, listed, known, rate is None))
    return found


def zero_sites(
    nodes: Sequence[Node], ffns: Sequence[NeuronFfn], selector: NeuronSelector | None
) -> dict[str, tuple[float, bool]]:
    """Sites whose inputs hold exact zeros: the fraction expected, and whether that is a guess.

    They are the down linears of these FFNs, what follows a ReLU after a norm (stage 2 of arxiv.org/abs/2310.04564), and
    output projections of layers whose heads are predicted.
    """
    sites = {nodes[ffn.first + 2].attrs["site"]: (ffn.rate, ffn.assumed) for ffn in ffns}
    if selector is not None:
        rectified = {node.output for node in nodes if node.op == "act" and node.attrs["act"] in ZERO_ACTS}
        for node in nodes:
            if node.op == "linear" and node.inputs[0] in rectified and node.attrs["kind"] != "lm_head":
                rate = selector.site_rates.get(node.attrs["site"])
                sites.setdefault(node.attrs["site"], (ASSUMED_NORM_RATE if rate is None else rate, rate is None))
            heads = (
                selector.heads.get(node.attrs["layer"]) if node.op == "linear" and node.attrs["kind"] == "o" else None
            )
            if heads is not None:
                density = heads.density
                sites[node.attrs["site"]] = (ASSUMED_HEAD_RATE if density is None else 1 - density, density is None)
    return sites


def plan_neurons(node: Node, ffn: NeuronFfn, weights: Weights, options: EngineOptions) -> list[MatrixPlan]:
    """Gate and up (or up alone) of an FFN in the neurons layout, one matrix each; `skipped` where rows may be faster.

    Segments are those of the dense plan, so that results are the same to the bit.
    """
    shape = LinearShape.of(node, weights)
    dense = plan_linear(node, weights, None, options, shape)
    plans = []
    for name in node.weights:
        (whole,) = (plan for plan in dense if name in plan.weights)
        outputs = shape.outputs(name)
        why = "only the neurons listed are read" if ffn.listed else "neurons that do not fire are not read"
        skipped = Skipped(
            whole.type,
            whole.codec,
            shape.inputs,
            outputs,
            rate_step(ffn.rate),
            ffn.assumed,
            axis="outputs",
            listed=ffn.listed,
        )
        # Lists are obeyed in rows as well, which float weights do not have. How long they will be is not guessed.
        settled = ffn.listed and (ffn.assumed or whole.layout != "rows")
        plans.append(
            replace(whole, weights=(name,), layout="neurons", chunk=0, why=why, skipped=None if settled else skipped)
        )
    return plans


def as_part_of(plans: Sequence[MatrixPlan], whole: Sequence[MatrixPlan]) -> list[MatrixPlan]:
    """Plans of some of a node's weights with the segments of the plans of all: so results are the same to the bit."""
    segments = {name: plan.segments for plan in whole for name in plan.weights}
    return [replace(plan, segments=segments[plan.weights[0]]) for plan in plans]


def neuron_nodes(nodes: Sequence[Node], ffn: NeuronFfn) -> tuple[Node | None, Node]:
    """What the first two nodes of the FFN become: the gate (nothing where neurons are listed) and the neurons."""
    first, act = nodes[ffn.first : ffn.first + 2]
    biases = first.attrs["biases"]
    attrs = {**first.attrs, **act.attrs}
    if ffn.listed:
        return None, Node("neurons", first.inputs, act.output, first.weights, attrs, first.executor)
    gate = replace(
        first,
        output=f"{first.output}.gate",
        weights=first.weights[:1],
        attrs={**first.attrs, "biases": biases[:1]},
    )
    attrs["biases"] = biases[1:]
    return gate, Node("neurons", (*first.inputs, gate.output), act.output, first.weights[1:], attrs, first.executor)


def with_neurons(graph: Graph, ffns: Sequence[NeuronFfn]) -> tuple[list[Node | None], Mapping[str, int]]:
    """The graph's nodes, position by position, with these FFNs' neurons; and the widths of all buffers."""
    nodes: list[Node | None] = list(graph.nodes)
    widths = dict(graph.buffers)
    for ffn in ffns:
        gate, neurons = neuron_nodes(graph.nodes, ffn)
        nodes[ffn.first : ffn.first + 2] = [gate, neurons]
        if gate is not None:
            widths[gate.output] = widths[neurons.output]
    return nodes, widths


def describe_neurons(ffns: Sequence[NeuronFfn], skipping: int, selector: NeuronSelector | None) -> Iterator[str]:
    """The line for start-up: what decides which neurons are computed, and in how many layers."""
    if selector is not None and selector.heads:
        yield f"heads     predictor: {len(selector.heads)} layers compute only those predicted"
    if not ffns or selector is None:
        return
    listed = sum(ffn.listed for ffn in ffns)
    parts = []
    if listed:
        parts.append(f"{listed} layers use only those {'predicted' if selector.predictors else 'listed'}")
    if len(ffns) > listed:
        parts.append(f"{len(ffns) - listed} layers have exact zeros, of {skipping} up is read for what fires")
    yield f"neurons   {selector.kind}: {'; '.join(parts)}"
