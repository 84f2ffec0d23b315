"""Times one FFN, dense and with most of its neurons skipped, on weights that no cache holds.

Neurons fire by a power law: neuron of rank r with probability min(1, c · r^-0.9), c such that the mean is the density
that is asked for. At the exponent 0.9, 26 % of the neurons make 80 % of what fires, as in OPT-30B (PowerInfer,
arxiv.org/abs/2312.12456); ranks are shuffled, so that active neurons are scattered. A bias of the gate makes just the
drawn neurons fire, dense and sparse compute the same function, and their results are compared bit for bit.

The dense FFN is the engine's fastest: rows layout, gate and up in one matrix. The sparse one lies as the engine would
lay it at the level's rate, by the engine's own timing at load, or at every level in the layouts of skipping. Runs are
interleaved; before each one the weights are dropped from the caches. What is counted is the time of the FFN's ops; ops
before them wake the threads.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thinfer import _core
from thinfer.bench.kernels import random_blocks
from thinfer.engine.executor import Float32
from thinfer.engine.layout_choice import Candidate, LayoutTimer, measure_layouts, settle
from thinfer.engine.plan import FLOAT_BITS, MatrixPlan, Skipped, chunk_outputs, rate_step, segment_count, stored_bits
from thinfer.engine.predictor_cost import pays
from thinfer.errors import ThinferError, UsageError
from thinfer.formats.tensor import BLOCKS

ListKind = Literal["exact", "given", "predictor"]
LayoutRule = Literal["auto", "skip"]

EXPONENT = 0.9
COLUMNS = {
    "type": 6,
    "hidden": 6,
    "intermediate": 12,
    "gated": 5,
    "list": 9,
    "ran": 9,
    "sparsity": 8,
    "threads": 7,
    "layout": 15,
    "active": 6,
    "dense_us": 8,
    "sparse_us": 9,
    "ratio_median": 12,
    "byte_ceiling": 12,
    "bytes_ratio": 11,
    "touched_gb_s": 12,
    "seed": 4,
}
"""Names of a row's values, and how wide they are shown."""

_FIRES, _RESTS = 1e5, -1e5  # far beyond what any stored type's random rows give
_COPIES = 4
_WAKE_OPS = 8
_PREDICTOR_RANK, _PREDICTOR_TYPE = 512, "Q4_0"


@dataclass(frozen=True, slots=True)
class FfnShape:
    """The FFN to time: sizes, stored type ("Q4_0", "F16", ...), and whether it has a gate."""

    hidden: int
    intermediate: int
    type: str
    gated: bool

    @property
    def first(self) -> tuple[str, ...]:
        """Names of the matrices that read the input."""
        return ("gate", "up") if self.gated else ("up",)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Random stored rows of the matrices gate (where there is one), up and down, and the threads that pack them."""

    shape: FfnShape
    rows: dict[str, NDArray[np.uint8]]
    pool: _core.ThreadPool

    @classmethod
    def random(cls, shape: FfnShape, pool: _core.ThreadPool, rng: np.random.Generator) -> "_Stored":
        def rows(outputs: int, inputs: int) -> NDArray[np.uint8]:
            if shape.type in FLOAT_BITS:
                values = (rng.standard_normal((outputs, inputs), np.float32) * 0.02).astype(np.float16)
                return values.view(np.uint8)
            return random_blocks(rng, shape.type, outputs, inputs)

        first = {name: rows(shape.intermediate, shape.hidden) for name in shape.first}
        return cls(shape, {**first, "down": rows(shape.hidden, shape.intermediate)}, pool)

    def predictor_pays(self, density: float) -> bool:
        """Whether the engine would use a predictor that names just what fires, at this density."""
        first, *rest = (rows.nbytes for rows in self.rows.values())
        values, size = BLOCKS[_PREDICTOR_TYPE]
        bias = 4 * self.shape.intermediate
        reads = bias + _PREDICTOR_RANK * (self.shape.hidden + self.shape.intermediate) // values * size
        return pays(reads, density, density, first, sum(rest))

    def pack(self, plan: MatrixPlan, arena: _core.Arena) -> _core.PackedMatrix:
        parts = [(self.rows[name], plan.type, None) for name in plan.weights]
        inputs = self.shape.intermediate if plan.weights == ("down",) else self.shape.hidden
        return _core.PackedMatrix.pack(
            parts, inputs, plan.codec, plan.layout, plan.chunk, plan.segments, self.pool, arena
        )


def firing(neurons: int, density: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which neurons fire: bool [neurons], drawn by the power law of this module with this mean."""
    if density >= 1:
        return np.ones(neurons, np.bool_)
    law = np.arange(1, neurons + 1, dtype=np.float64) ** -EXPONENT
    low, high = 0.0, neurons / law[-1]
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * law).mean() < density else (low, middle)
    return rng.permutation(rng.random(neurons) < np.minimum(1, high * law))


def dense_plans(shape: FfnShape) -> list[MatrixPlan]:
    """Gate and up in one matrix (or up), and down, as dense use wants them."""
    floats = shape.type in FLOAT_BITS
    first = 1 if floats else segment_count(shape.hidden, len(shape.first) * shape.intermediate)
    last = 1 if floats else segment_count(shape.intermediate, shape.hidden)
    return [
        MatrixPlan(names, shape.type, None, "rows", 0, segments, "").as_rows("dense")
        for names, segments in ((shape.first, first), (("down",), last))
    ]


def skipping_plans(shape: FfnShape, kind: ListKind, sparsity: float, threads: int) -> list[MatrixPlan]:
    """Gate, up and down in the layouts of skipping; `skipped` is set where the engine would time whether it pays."""
    whole, down = dense_plans(shape)
    floats, rate = shape.type in FLOAT_BITS, rate_step(sparsity)
    channels = Skipped(shape.type, None, shape.intermediate, shape.hidden, rate)
    listed = kind != "exact"
    neurons = Skipped(shape.type, None, shape.hidden, shape.intermediate, rate, axis="outputs", listed=listed)
    down = replace(
        down,
        layout="columns",
        chunk=chunk_outputs(shape.hidden, stored_bits(shape.type), down.segments, threads),
        skipped=None if floats else channels,  # float weights have columns only
    )
    skipping = [replace(whole, weights=(name,), layout="neurons", chunk=0, skipped=neurons) for name in shape.first]
    if listed:
        # Lists are obeyed in rows as well, which float weights do not have.
        return [*(replace(plan, skipped=None if floats else neurons) for plan in skipping), down]
    if not shape.gated:
        return [whole, down]
    return [replace(whole, weights=("gate",)), skipping[-1], down]


def _choose(stored: _Stored, kind: ListKind, plans: Sequence[MatrixPlan]) -> list[MatrixPlan]:
    """The plans as the engine settles them when it loads a model that no cache holds."""
    candidates = [Candidate(plan.skipped, plan, stored.pack) for plan in plans if plan.skipped is not None]
    times = measure_layouts(candidates, LayoutTimer(_core.default_isa(), stored.pool, "int8", cold=True))
    *first, down = (settle(plan, times) for plan in plans)
    if kind == "exact" and first[-1].layout != plans[-2].layout:
        # Up that is read whole stays in one matrix with the gate.
        first = dense_plans(stored.shape)[:1]
    return [*first, down]


def measure(
    shape: FfnShape,
    *,
    kind: ListKind,
    sparsities: Sequence[float],
    threads: int,
    layout: LayoutRule = "auto",
    rounds: int = 7,
    seed: int = 0,
    copies: int = _COPIES,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Run the experiment; a row a sparsity (fraction of neurons that do not fire), see COLUMNS.

    ``layout`` "auto" chooses layouts at each sparsity as the engine does at load, by time, and leaves out a predictor
    that would read more than it saves; "skip" takes those of skipping. In a row it names those of up and of down, once
    where they are the same: of up in "rows" all is read, and with a list what is not named is 0 all the same. Float
    weights that are read in order are in "columns" too, they have no rows. ``ran`` is the kind of list that ran:
    "exact" where the predictor was left out.

    ``ratio_median`` is the median over rounds of dense time by sparse time; ``byte_ceiling`` the ratio of the bytes
    when nothing but the weights of active neurons is read; ``bytes_ratio`` that of the bytes the kernels counted
    (scales that several channels share, and a predictor, are in it); ``touched_gb_s`` is counted bytes by time.

    Raises:
        UsageError: a sparsity at which no neuron fires.
        ThinferError: the sparse result is not the dense one to the bit: a defect of the engine.
    """
    rng = np.random.default_rng(seed)
    progress("packing")
    stored = _Stored.random(shape, _core.ThreadPool(threads), rng)
    x = rng.standard_normal(shape.hidden, np.float32)
    for sparsity in sparsities:
        progress(f"{shape.type} {kind} {sparsity:g}")
        active = [firing(shape.intermediate, 1 - sparsity, rng) for _ in range(copies)]
        if not any(mask.any() for mask in active):
            raise UsageError(
                f"sparsity {sparsity:g} of {shape.intermediate} neurons leaves none that fires; use a lower one"
            )
        ran = "exact" if layout == "auto" and kind == "predictor" and not stored.predictor_pays(1 - sparsity) else kind
        plans = skipping_plans(shape, ran, sparsity, threads)
        if layout == "auto":
            plans = _choose(stored, ran, plans)
        times, dense_bytes, sparse_bytes = _measure_level(stored, ran, plans, active, rng, x, rounds)
        dense_time, sparse_time = (statistics.median(column) for column in zip(*times, strict=True))
        share = float(np.mean([mask.mean() for mask in active]))
        matrices = 3 if shape.gated else 2
        whole = 1 if ran == "exact" else 0
        yield {
            "type": shape.type.lower(),
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "gated": shape.gated,
            "list": kind,
            "ran": ran,
            "sparsity": sparsity,
            "threads": threads,
            "layout": "+".join(dict.fromkeys(plan.layout for plan in plans[-2:])),
            "active": round(share, 4),
            "dense_us": round(dense_time * 1e6, 1),
            "sparse_us": round(sparse_time * 1e6, 1),
            "ratio_median": round(statistics.median(d / s for d, s in times), 3),
            "byte_ceiling": round(matrices / (whole + (matrices - whole) * share), 3),
            "bytes_ratio": round(dense_bytes / sparse_bytes, 3),
            "touched_gb_s": round(sparse_bytes / sparse_time / 1e9, 2),
            "seed": seed,
        }


def _measure_level(
    stored: _Stored,
    kind: ListKind,
    plans: Sequence[MatrixPlan],
    active: Sequence[NDArray[np.bool_]],
    rng: np.random.Generator,
    x: Float32,
    rounds: int,
) -> tuple[list[tuple[float, float]], float, float]:
    """Seconds of dense and sparse by round, and the bytes each reads; the memory is given back on return."""
    dense = _Runner(stored, "dense", dense_plans(stored.shape), active, rng)
    sparse = _Runner(stored, kind, plans, active, rng)
    times: list[tuple[float, float]] = []
    # The first round wakes threads and pages and is not counted.
    for turn in range(-1, rounds):
        pair = dense.time(x), sparse.time(x)
        if turn >= 0:
            times.append(pair)
    if not np.array_equal(dense.result(), sparse.result()):
        raise ThinferError(f"{stored.shape.type} {kind}: skipping neurons changed the result; please report this")
    return times, dense.bytes_read, sparse.bytes_read


class _Runner:
    """Copies of one FFN as a program, each with the neurons that fire in it."""

    def __init__(
        self,
        stored: _Stored,
        kind: ListKind | Literal["dense"],
        plans: Sequence[MatrixPlan],
        active: Sequence[NDArray[np.bool_]],
        rng: np.random.Generator,
    ) -> None:
        self._shape, self._pool, self._arena = stored.shape, stored.pool, _core.Arena()
        self._program = _core.Program(None, self._pool, 1)
        self._program.set_profiling(True)
        self._x = self._program.add_buffer(self._shape.hidden)
        self._wake(rng)
        self._first = self._program.ops
        self._matrices: list[_core.PackedMatrix] = []
        self._outs: list[int] = []
        self.bytes_read = 0.0
        packed = [stored.pack(plan, self._arena) for plan in plans]
        if kind == "predictor":
            packed.append(self._random(rng, _PREDICTOR_TYPE, _PREDICTOR_RANK, self._shape.hidden))
            packed.append(self._random(rng, _PREDICTOR_TYPE, self._shape.intermediate, _PREDICTOR_RANK))
        for index, fires in enumerate(active):
            matrices = packed if index == 0 else [matrix.copy() for matrix in packed]
            self._matrices += matrices
            self._outs.append(self._program.add_buffer(self._shape.hidden))
            self._add(kind, matrices[: len(plans)], matrices[len(plans) :], fires, self._outs[-1])

    def time(self, x: Float32) -> float:
        """Seconds of one FFN, its weights read from memory."""
        for matrix in self._matrices:
            matrix.evict()
        self._program.buffer(self._x)[0] = x
        self._program.take_counters()
        row = np.zeros(1, np.int32)
        self._program.run(
            0, self._program.ops, row, row, row, np.ones(1, np.uint8), row[:0], np.zeros((1, 1), np.int32)
        )
        counters = self._program.take_counters()[self._first :]
        self.bytes_read = sum(counter.bytes_read for counter in counters) / len(self._outs)
        return sum(counter.nanoseconds for counter in counters) / len(self._outs) / 1e9

    def result(self) -> Float32:
        """Outputs of the last run, [copies, hidden]."""
        return np.stack([self._program.buffer(out)[0] for out in self._outs])

    def _wake(self, rng: np.random.Generator) -> None:
        """A few small ops, so that the threads are awake when the clock runs."""
        matrix = self._random(rng, "Q8_0", 1024, self._shape.hidden)
        out = self._program.add_buffer(1024)
        for _ in range(_WAKE_OPS):
            self._program.op_linear(self._x, out, [matrix], None, "int8")

    def _random(self, rng: np.random.Generator, stored: str, outputs: int, inputs: int) -> _core.PackedMatrix:
        """A matrix in rows."""
        part = (random_blocks(rng, stored, outputs, inputs), stored, None)
        return _core.PackedMatrix.pack([part], inputs, None, "rows", 0, 1, self._pool, self._arena)

    def _add(
        self,
        kind: str,
        matrices: Sequence[_core.PackedMatrix],
        predictor: Sequence[_core.PackedMatrix],
        fires: NDArray[np.bool_],
        out: int,
    ) -> None:
        """The ops of one FFN; `matrices` lie as planned and say what is skipped."""
        program, shape = self._program, self._shape
        *first, down = matrices
        bias = np.where(fires, np.float32(_FIRES), np.float32(_RESTS))
        act = program.add_buffer(shape.intermediate)
        if kind == "dense" or (kind == "exact" and first[-1].layout != "neurons"):
            hidden = program.add_buffer(len(shape.first) * shape.intermediate)
            biases = np.concatenate([bias, np.zeros((len(shape.first) - 1) * shape.intermediate, np.float32)])
            program.op_linear(self._x, hidden, first, biases, "int8")
            (program.op_gated_act if shape.gated else program.op_act)(hidden, act, "relu")
        elif kind == "exact":
            gate = program.add_buffer(shape.intermediate)
            program.op_linear(self._x, gate, first[:1], bias, "int8")
            program.op_neurons(self._x, act, "relu", 0.0, "int8", gate, None, first[1], None, None, None)
        else:
            lists = _core.NeuronLists()
            if kind == "given":
                ids = np.flatnonzero(fires).astype(np.int32)
                lists.set(ids, np.array([0, len(ids)], np.int32))
            else:
                low, scores = program.add_buffer(_PREDICTOR_RANK), program.add_buffer(shape.intermediate)
                program.op_linear(self._x, low, predictor[:1], None, "int8")
                program.op_linear(low, scores, predictor[1:], bias, "int8")
                program.op_pick_neurons(scores, 0.0, lists)
            up = first[1] if shape.gated else None
            program.op_neurons(self._x, act, "relu", 0.0, "int8", None, first[0], up, bias, None, lists)
        last = program.op_linear(act, out, [down], None, "int8")
        if kind != "dense":
            program.set_threshold(last, 0.0, None)
