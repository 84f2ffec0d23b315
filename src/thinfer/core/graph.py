"""The computation of one step as a list of nodes over named float32 buffers.

Buffers have single assignment: each name is written by one node. Their rows are the rows of the batch, but after
`select` only those whose logits are wanted. An executor may run any node; `Node.executor` says which one does.

Ops and attributes, after a semicolon those that may be absent (kernels/<op>.py has the equations):

| op | inputs | weights | attrs |
|---|---|---|---|
| embed | | token table | |
| positions | x | position table | offset |
| rms_norm | x | w | eps |
| layer_norm | x | w, b or nothing | eps, offset (added to w) |
| linear | x | w1..wn, fused along outputs | site, kind, layer, biases; rows, columns (see `split_ffn`) |
| head_norm | qkv | q_norm, k_norm | eps, heads, kv_heads, head_dim |
| rope | qkv | | heads, kv_heads, head_dim, inv_freq, attention_factor |
| attention | qkv | | layer, heads, kv_heads, head_dim, scale, window; slopes |
| gated_act | gate_up | | act; threshold; ids, width (see `split_ffn`) |
| act | up | | act; threshold; ids, width (see `split_ffn`) |
| add | a, b | | |
| select | x | | |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thinfer.errors import UsageError

OPS = (
    "embed",
    "positions",
    "rms_norm",
    "layer_norm",
    "linear",
    "head_norm",
    "rope",
    "attention",
    "gated_act",
    "act",
    "add",
    "select",
)

# An FFN without a gate has up in the place of gate_up.
LINEAR_KINDS = ("qkv", "o", "gate_up", "up", "down", "lm_head")
_FFN_STARTS = ("gate_up", "up")

# Quantised blocks run along the input, 256 at the most, so this executor takes whole aligned groups of columns.
COLUMN_GROUPS: Mapping[str, int] = {"cpu": 256}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: reads `inputs`, writes `output`; `weights` are Hugging Face names.

    Example: `Node("add", ("x", "y"), "z")`.
    """

    op: str
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    executor: str = "cpu"


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes `first:last` of a graph, all of one executor, with the buffers that cross its border."""

    first: int
    last: int
    executor: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in execution order; `buffers` gives each buffer's width, `logits` names the result.

    Raises UsageError when a buffer is read before it is written, written twice, or has no width.
    """

    nodes: tuple[Node, ...]
    buffers: Mapping[str, int]
    logits: str

    def __post_init__(self) -> None:
        written: set[str] = set()
        for node in self.nodes:
            if node.op not in OPS:
                raise UsageError(f"graph: unknown op {node.op!r}; known: {', '.join(OPS)}")
            missing = [name for name in node.inputs if name not in written]
            if missing:
                raise UsageError(f"graph: {node.op} -> {node.output} reads {missing[0]} before it is written")
            if node.output in written:
                raise UsageError(f"graph: buffer {node.output} is written twice")
            if node.output not in self.buffers:
                raise UsageError(f"graph: buffer {node.output} has no width")
            written.add(node.output)
        if self.logits not in written:
            raise UsageError(f"graph: no node writes the logits buffer {self.logits}")

    def selected(self) -> frozenset[str]:
        """Names of the buffers that hold only the wanted rows (written by `select` or after it)."""
        names: set[str] = set()
        for node in self.nodes:
            if node.op == "select" or names.intersection(node.inputs):
                names.add(node.output)
        return frozenset(names)


def split_ffn(
    graph: Graph,
    layer: int,
    neuron_ids: Sequence[int],
    executor: str = "reference",
    *,
    column_groups: Mapping[str, int] = COLUMN_GROUPS,
) -> Graph:
    """Split one layer's FFN by neuron ids: `neuron_ids` run on `executor`, the others where they ran; an add joins.

    Each branch is gate_up -> gated_act -> down (without a gate: up -> act -> down) with these attributes, which every
    executor understands:

    * first linear, `rows`: ascending neuron ids kept of *each* fused weight (and bias), which is its output width.
    * down linear, `columns`: for each column of its input buffer the column of the weight it meets.
    * activation, `ids` and `width`: neuron j of its input goes to column ids[j] of a zeroed buffer of that width.

    An executor with a group width in `column_groups` gets `columns` made of whole aligned groups of that many columns
    (all groups that hold a kept neuron), and `ids` scatter the neurons into them, so packed blocks stay whole; other
    executors get `columns == rows` and an activation without ids. The branch of `neuron_ids` comes first and the down
    bias stays with the other one. Raises UsageError when the layer has no whole FFN or ids are not distinct, in
    range, and some but not all of the neurons.

    Example: `split_ffn(model.graph, 0, range(256))`.
    """
    starts = (i for i, n in enumerate(graph.nodes) if any(_is_linear(n, kind, layer) for kind in _FFN_STARTS))
    start = next(starts, None)
    if start is None or "rows" in graph.nodes[start].attrs:
        raise UsageError(f"split_ffn: layer {layer} has no whole {' or '.join(_FFN_STARTS)} linear")
    gate_up, act, down = graph.nodes[start : start + 3]
    if act.op not in ("gated_act", "act") or not _is_linear(down, "down", layer):
        raise UsageError(f"split_ffn: layer {layer} is not linear -> activation -> down")
    neurons = graph.buffers[act.output]
    moved = sorted(set(neuron_ids))
    if len(moved) != len(neuron_ids) or not moved or len(moved) == neurons or moved[0] < 0 or moved[-1] >= neurons:
        raise UsageError(f"split_ffn: need distinct neuron ids in 0..{neurons - 1}, at least one and not all")
    gone = set(moved)
    kept = [i for i in range(neurons) if i not in gone]

    buffers = dict(graph.buffers)
    ffn = (gate_up, act, down)
    branch_a = _branch(ffn, "split", moved, column_groups.get(executor, 1), executor, buffers)
    no_bias = {**branch_a[2].attrs, "biases": ("",) * len(down.weights)}
    branch_a = (*branch_a[:2], replace(branch_a[2], attrs=no_bias))
    branch_b = _branch(ffn, "rest", kept, column_groups.get(down.executor, 1), down.executor, buffers)
    join = Node("add", (branch_a[2].output, branch_b[2].output), down.output, executor=down.executor)
    for name in (gate_up.output, act.output):
        del buffers[name]
    nodes = (*graph.nodes[:start], *branch_a, *branch_b, join, *graph.nodes[start + 3 :])
    return Graph(nodes, buffers, graph.logits)


def _is_linear(node: Node, kind: str, layer: int) -> bool:
    return node.op == "linear" and node.attrs["kind"] == kind and node.attrs["layer"] == layer


def _branch(
    ffn: tuple[Node, Node, Node], suffix: str, ids: list[int], group: int, executor: str, buffers: dict[str, int]
) -> tuple[Node, Node, Node]:
    """The three nodes of one half; adds their buffers to `buffers`."""
    gate_up, act, down = ffn
    names = [f"{node.output}.{suffix}" for node in ffn]
    neurons = buffers[act.output]
    starts = sorted({i // group * group for i in ids})
    columns = [c for s in starts for c in range(s, min(s + group, neurons))]
    act_attrs = dict(act.attrs)
    if columns != ids:
        position = {c: p for p, c in enumerate(columns)}
        act_attrs |= {"ids": tuple(position[i] for i in ids), "width": len(columns)}
    buffers |= {names[0]: len(gate_up.weights) * len(ids), names[1]: len(columns), names[2]: buffers[down.output]}
    return (
        replace(gate_up, output=names[0], attrs={**gate_up.attrs, "rows": tuple(ids)}, executor=executor),
        replace(act, inputs=(names[0],), output=names[1], attrs=act_attrs, executor=executor),
        replace(
            down,
            inputs=(names[1],),
            output=names[2],
            attrs={**down.attrs, "columns": tuple(columns)},
            executor=executor,
        ),
    )
