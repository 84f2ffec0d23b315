"""Which codec and layout every linear gets in memory, and why: from shapes, types and thresholds.

Where input channels are skipped, two layouts are possible; `layout_choice` times them and settles which.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Literal

from thinfer.core.graph import Node
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.options import EngineOptions, WeightType
from thinfer.formats.tensor import BLOCKS
from thinfer.models.loader import Weights

# Bits of a weight in memory and inputs of a block, by stored type (csrc/codec.h). Float types stay what they are.
FLOAT_BITS = {"F32": 32, "F16": 16, "BF16": 16}
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}
_REQUANTISED: dict[WeightType, tuple[str, str]] = {
    "q4": ("u4_dm", "Q4_1"),
    "q8": ("i8_d", "Q8_0"),
    "f16": ("f16", "F16"),
}
"""Codec, and the stored type that it is in memory."""

_GROUP = 32
_OUT_BLOCK = 64
_SKIP_BYTES = 1024
"""A skipped channel saves time only where the channels that are read come in runs of about this many bytes."""
_SEGMENT_BLOCK = 256
_WIDE_OUTPUTS = 4096
_WIDE_SEGMENT_INPUTS = 1024
_FEW_SEGMENTS = 2
_MOST_SEGMENTS = 8
_ASSUMED_RATE = 0.5
_RATE_STEP = 0.05


@dataclass(frozen=True, slots=True)
class Skipped:
    """What decides whether skipping channels of a matrix saves time; equal ones need one measurement.

    Attributes:
        type: stored type.
        codec: codec to re-quantise to; None keeps the type's own.
        inputs: channels.
        outputs: rows of the matrix.
        rate: fraction of the channels (of outputs: of the rows) that is expected to be dropped, in steps of 0.05.
        assumed: the rate is a guess: the artifact does not say.
        axis: whether input channels are skipped or output rows.
        listed: whether rows are listed beforehand, rather than found by a gate.
    """

    type: str
    codec: str | None
    inputs: int
    outputs: int
    rate: float
    assumed: bool = field(default=False, compare=False)
    axis: Literal["inputs", "outputs"] = "inputs"
    listed: bool = False

    def __str__(self) -> str:
        return f"{100 * self.rate:.0f} % skipped" + (" (assumed: the artifact does not say)" if self.assumed else "")


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """One packed matrix: weights of a node that share a stored type, stacked along the outputs.

    Attributes:
        weights: names of the weights.
        type: stored type.
        codec: codec to re-quantise to; None keeps the type's own.
        layout: "rows", "columns" or "neurons".
        chunk: outputs of one contiguous channel slice (columns).
        segments: partial sums over the input; from the shape alone, so that layouts agree to the bit.
        why: the reason, for start-up.
        skipped: set where rows would do as well and only time can tell; None: the layout is settled.
    """

    weights: tuple[str, ...]
    type: str
    codec: str | None
    layout: str
    chunk: int
    segments: int
    why: str
    skipped: Skipped | None = None

    def as_rows(self, why: str) -> "MatrixPlan":
        """The same matrix as dense use wants it: in rows, float weights in columns read in order; the same bits."""
        floats = self.codec == "f16" or (self.codec is None and self.type in FLOAT_BITS)
        return replace(self, layout="columns" if floats else "rows", chunk=_OUT_BLOCK if floats else 0, why=why)


def rate_step(rate: float) -> float:
    """The rate in steps of 0.05, so that like matrices need one measurement."""
    return round(round(rate / _RATE_STEP) * _RATE_STEP, 2)


def plan_linear(
    node: Node,
    weights: Weights,
    selector: ThresholdSelector | None,
    options: EngineOptions,
    shapes: "LinearShape",
    zeros: Mapping[str, tuple[float, bool]] = MappingProxyType({}),
) -> list[MatrixPlan]:
    """The packed matrices of one linear node, in the order of its weights.

    `zeros` maps sites whose input holds exact zeros to their expected fraction and whether that is a guess. Plans whose
    layout should be timed are in columns and have `skipped` set.
    """
    plans = []
    site = node.attrs["site"]
    skips = site in zeros or (selector is not None and selector.thresholds.get(site, 0.0) > 0.0)
    rate = selector.rates.get(site) if selector is not None else None
    assumed = rate is None
    if site in zeros:
        # A threshold drops what is 0 as well, so the larger of the two is expected.
        zero_rate, guess = zeros[site]
        rate, assumed = max(zero_rate, rate or 0.0), guess and rate is None
    for stored, group in groupby(node.weights, key=lambda name: weights.source(name).type):
        names = tuple(group)
        codec, kept = _in_memory(stored, shapes.inputs, options)
        bits = stored_bits(kept)
        outputs = sum(shapes.outputs(name) for name in names)
        floats = bits >= 16
        segments = 1 if floats else segment_count(shapes.inputs, outputs)
        if skips:
            chunk = chunk_outputs(outputs, bits, segments, options.thread_count())
            plan = MatrixPlan(names, stored, codec, "columns", chunk, segments, "channels are skipped")
            if floats:
                plan = replace(plan, why="channels are skipped; float weights have no other layout")
            elif options.layout == "auto":
                expected = rate_step(_ASSUMED_RATE if rate is None else rate)
                plan = replace(plan, skipped=Skipped(stored, codec, shapes.inputs, outputs, expected, assumed))
            elif options.layout == "rows":
                plan = plan.as_rows("dropped channels are read: layout rows was asked for")
            else:
                plan = replace(plan, why="channels are skipped: layout columns was asked for")
            plans.append(plan)
        elif floats:
            why = "float weights, read in order"
            plans.append(MatrixPlan(names, stored, codec, "columns", _OUT_BLOCK, segments, why))
        else:
            plans.append(MatrixPlan(names, stored, codec, "rows", 0, segments, "dense"))
    return plans


def stored_bits(stored: str) -> int:
    """Bits of a weight in memory, scales apart, by stored type."""
    return _BITS.get(stored) or FLOAT_BITS[stored]


def weight_bytes(name: str, weights: Weights, options: EngineOptions) -> float:
    """Bytes of a weight as its type stores it, scales included; in memory K types take up to 3 % more."""
    source = weights.source(name)
    _, kept = _in_memory(source.type, source.shape[-1], options)
    values, size = BLOCKS[kept]
    return math.prod(source.shape) / values * size


def _in_memory(stored: str, inputs: int, options: EngineOptions) -> tuple[str | None, str]:
    """The codec that weights are re-quantised to, None for their own, and the stored type that they are then."""
    if options.weights != "stored" and stored in FLOAT_BITS and inputs % _GROUP == 0:
        return _REQUANTISED[options.weights]
    return None, stored


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Inputs and outputs of a node's weights after a split kept some of them."""

    inputs: int
    rows: int | None
    stored_rows: dict[str, int]

    @classmethod
    def of(cls, node: Node, weights: Weights) -> "LinearShape":
        """Shape of a linear node."""
        columns, rows = node.attrs.get("columns"), node.attrs.get("rows")
        stored = {name: weights.source(name).shape[0] for name in node.weights}
        inputs = weights.source(node.weights[0]).shape[1] if columns is None else len(columns)
        return cls(inputs, None if rows is None else len(rows), stored)

    def outputs(self, name: str) -> int:
        """Outputs kept of one weight."""
        return self.stored_rows[name] if self.rows is None else self.rows


def segment_count(inputs: int, outputs: int) -> int:
    """Partial sums over the input, cut on blocks of 256, so that threads can share long channel slices.

    Up to eight: then the outputs need no cutting for a few threads, and one that lost its processor for a while leaves
    work that others can take over. Wide matrices with few inputs are cut less, as adding up many long partial sums
    would cost more than it saves. Depends on the shape only: sums are added in order, so every layout, batch and thread
    count gives the same bits.
    """
    most = _MOST_SEGMENTS
    if outputs >= _WIDE_OUTPUTS:
        most = max(_FEW_SEGMENTS, min(most, inputs // _WIDE_SEGMENT_INPUTS))
    return max(1, min(most, inputs // _SEGMENT_BLOCK))


def chunk_outputs(outputs: int, bits: int, segments: int, threads: int) -> int:
    """Outputs of a channel slice: just enough slices to feed the threads, none under a kilobyte; multiple of 64.

    Longer is better: at half density slices of 4 KB read at full bandwidth, of 2 KB at 9/10, of 768 bytes at 6/10.
    """
    padded = -(-outputs // _OUT_BLOCK) * _OUT_BLOCK
    wanted = threads if segments <= _FEW_SEGMENTS else -(-2 * threads // segments)
    longest = max(1, padded * bits // 8 // _SKIP_BYTES)
    slices = max(1, min(wanted, longest))
    return -(-padded // slices // _OUT_BLOCK) * _OUT_BLOCK


def assign_buffers(
    widths: Mapping[str, int], executor_nodes: Sequence[Node], kept: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """Place the buffers of some nodes, whose `widths` are given, in shared storage: name -> (slot, width).

    A slot is taken again once its last reader has run; buffers in `kept` are never overwritten. Only buffers of equal
    width share a slot. An op never gets the slot of its own input.
    """
    last_use: dict[str, int] = {}
    for index, node in enumerate(executor_nodes):
        for name in node.inputs:
            last_use[name] = index
    fixed = set(kept)
    slots: dict[str, tuple[int, int]] = {}
    free: dict[int, list[int]] = {}
    count = 0
    for index, node in enumerate(executor_nodes):
        for name in (*node.inputs, node.output):
            if name not in slots:
                width = widths[name]
                reusable = free.get(width, [])
                if name == node.output and reusable and name not in fixed:
                    slots[name] = (reusable.pop(), width)
                else:
                    slots[name] = (count, width)
                    count += 1
        for name in set(node.inputs):
            if last_use[name] == index and name not in fixed:
                slot, width = slots[name]
                free.setdefault(width, []).append(slot)
    return slots
