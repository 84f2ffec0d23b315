"""Times one FFN, dense and with most of its neurons skipped, on weights that no cache holds.

Neurons fire by a power law: neuron of rank r with probability min(1, c · r^-0.9), c such that the mean is the density
that is asked for. At the exponent 0.9, 26 % of the neurons make 80 % of what fires, as in OPT-30B (PowerInfer,
arxiv.org/abs/2312.12456); ranks are shuffled, so that active neurons are scattered. A bias of the gate makes just the
drawn neurons fire, dense and sparse compute the same function, and their results are compared bit for bit.

The dense FFN is the engine's fastest: rows layout, gate and up in one matrix. Runs are interleaved; before each one the
weights are dropped from the caches. What is counted is the time of the FFN's ops; ops before them wake the threads.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thinfer import _core
from thinfer.bench.kernels import STORED_BYTES, random_blocks
from thinfer.engine.executor import Float32
from thinfer.engine.plan import FLOAT_BITS, chunk_outputs, segment_count, stored_bits
from thinfer.errors import ThinferError, UsageError

ListKind = Literal["exact", "given", "predictor"]

EXPONENT = 0.9
COLUMNS = {
    "type": 6,
    "hidden": 6,
    "intermediate": 12,
    "gated": 5,
    "list": 9,
    "sparsity": 8,
    "threads": 7,
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

_FIRES, _RESTS = 1e3, -1e3
_COPIES = 4
_WAKE_OPS = 8
_PREDICTOR_RANK = 512


@dataclass(frozen=True, slots=True)
class FfnShape:
    """The FFN to time: sizes, stored type ("Q4_0", "F16", ...), and whether it has a gate."""

    hidden: int
    intermediate: int
    type: str
    gated: bool


@dataclass(frozen=True, slots=True)
class _Weights:
    """Random stored rows of the matrices."""

    first: list[NDArray[np.uint8]]  # gate and up, or up
    down: NDArray[np.uint8]


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


def measure(
    shape: FfnShape,
    *,
    kind: ListKind,
    sparsities: Sequence[float],
    threads: int,
    rounds: int = 7,
    seed: int = 0,
    copies: int = _COPIES,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Run the experiment; a row a sparsity (fraction of neurons that do not fire), see COLUMNS.

    ``ratio_median`` is the median over rounds of dense time by sparse time; ``byte_ceiling`` the ratio of the bytes
    when nothing but the weights of active neurons is read; ``bytes_ratio`` that of the bytes the kernels counted
    (scales that several channels share, and a predictor, are in it); ``touched_gb_s`` is counted bytes by time.

    Raises:
        UsageError: a sparsity at which no neuron fires.
        ThinferError: the sparse result is not the dense one to the bit: a defect of the engine.
    """
    rng = np.random.default_rng(seed)
    progress("packing")
    pool = _core.ThreadPool(threads)
    weights = _random_weights(shape, rng)
    x = rng.standard_normal(shape.hidden, np.float32)
    for sparsity in sparsities:
        progress(f"{shape.type} {kind} {sparsity:g}")
        active = [firing(shape.intermediate, 1 - sparsity, rng) for _ in range(copies)]
        if not any(mask.any() for mask in active):
            raise UsageError(
                f"sparsity {sparsity:g} of {shape.intermediate} neurons leaves none that fires; use a lower one"
            )
        times, dense_bytes, sparse_bytes = _measure_level(shape, kind, weights, active, pool, rng, x, rounds)
        dense_time, sparse_time = (statistics.median(column) for column in zip(*times, strict=True))
        share = float(np.mean([mask.mean() for mask in active]))
        matrices = 3 if shape.gated else 2
        whole = 1 if kind == "exact" else 0
        yield {
            "type": shape.type.lower(),
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "gated": shape.gated,
            "list": kind,
            "sparsity": sparsity,
            "threads": threads,
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
    shape: FfnShape,
    kind: ListKind,
    weights: _Weights,
    active: Sequence[NDArray[np.bool_]],
    pool: _core.ThreadPool,
    rng: np.random.Generator,
    x: Float32,
    rounds: int,
) -> tuple[list[tuple[float, float]], float, float]:
    """Seconds of dense and sparse by round, and the bytes each reads; the memory is given back on return."""
    dense = _Runner(shape, "dense", weights, active, pool, rng)
    sparse = _Runner(shape, kind, weights, active, pool, rng)
    times: list[tuple[float, float]] = []
    # The first round wakes threads and pages and is not counted.
    for turn in range(-1, rounds):
        pair = dense.time(x), sparse.time(x)
        if turn >= 0:
            times.append(pair)
    if not np.array_equal(dense.result(), sparse.result()):
        raise ThinferError(f"{shape.type} {kind}: skipping neurons changed the result; please report this")
    return times, dense.bytes_read, sparse.bytes_read


class _Runner:
    """Copies of one FFN as a program, each with the neurons that fire in it."""

    def __init__(
        self,
        shape: FfnShape,
        kind: ListKind | Literal["dense"],
        weights: _Weights,
        active: Sequence[NDArray[np.bool_]],
        pool: _core.ThreadPool,
        rng: np.random.Generator,
    ) -> None:
        self._shape, self._pool, self._arena = shape, pool, _core.Arena()
        self._program = _core.Program(None, pool, 1)
        self._program.set_profiling(True)
        self._x = self._program.add_buffer(shape.hidden)
        self._wake(rng)
        self._first = self._program.ops
        self._matrices: list[_core.PackedMatrix] = []
        self._outs: list[int] = []
        self.bytes_read = 0.0
        packed = self._packed(kind, weights, rng)
        for index, fires in enumerate(active):
            matrices = packed if index == 0 else [matrix.copy() for matrix in packed]
            self._matrices += matrices
            self._outs.append(self._program.add_buffer(shape.hidden))
            self._add(kind, matrices, fires, self._outs[-1])

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
        raw = random_blocks(rng, "Q8_0", 1024, self._shape.hidden)
        matrix = self._pack(raw, "rows", 0, 1, "Q8_0")
        out = self._program.add_buffer(1024)
        for _ in range(_WAKE_OPS):
            self._program.op_linear(self._x, out, [matrix], None, "int8")

    def _packed(self, kind: str, weights: _Weights, rng: np.random.Generator) -> list[_core.PackedMatrix]:
        """The matrices in the layouts of a kind: what comes first, then down, then a predictor's."""
        shape, floats = self._shape, self._shape.type in FLOAT_BITS
        plain = ("columns", 64) if floats else ("rows", 0)
        first = 1 if floats else segment_count(shape.hidden, len(weights.first) * shape.intermediate)
        last = 1 if floats else segment_count(shape.intermediate, shape.hidden)
        chunk = chunk_outputs(shape.hidden, stored_bits(shape.type), last, self._pool.threads)
        if kind == "dense":
            return [
                self._pack(np.concatenate(weights.first), *plain, first, shape.type),
                self._pack(weights.down, *plain, last, shape.type),
            ]
        layouts = [plain if kind == "exact" and index == 0 else ("neurons", 0) for index in range(len(weights.first))]
        packed = [
            self._pack(raw, *layout, first, shape.type) for raw, layout in zip(weights.first, layouts, strict=True)
        ]
        packed.append(self._pack(weights.down, "columns", chunk, last, shape.type))
        if kind == "predictor":
            packed.append(self._pack(random_blocks(rng, "Q4_0", _PREDICTOR_RANK, shape.hidden), "rows", 0, 1, "Q4_0"))
            packed.append(
                self._pack(random_blocks(rng, "Q4_0", shape.intermediate, _PREDICTOR_RANK), "rows", 0, 1, "Q4_0")
            )
        return packed

    def _pack(self, raw: NDArray[np.uint8], layout: str, chunk: int, segments: int, stored: str) -> _core.PackedMatrix:
        inputs = raw.shape[1] // (FLOAT_BITS[stored] // 8) if stored in FLOAT_BITS else _inputs(raw, stored)
        part = (raw, stored, None)
        return _core.PackedMatrix.pack([part], inputs, None, layout, chunk, segments, self._pool, self._arena)

    def _add(self, kind: str, matrices: list[_core.PackedMatrix], fires: NDArray[np.bool_], out: int) -> None:
        program, shape = self._program, self._shape
        bias = np.where(fires, np.float32(_FIRES), np.float32(_RESTS))
        act = program.add_buffer(shape.intermediate)
        if kind == "dense" or (kind == "exact" and not shape.gated):
            width = 2 * shape.intermediate if shape.gated else shape.intermediate
            hidden = program.add_buffer(width)
            biases = np.concatenate([bias, np.zeros(width - len(bias), np.float32)])
            program.op_linear(self._x, hidden, [matrices[0]], biases, "int8")
            (program.op_gated_act if shape.gated else program.op_act)(hidden, act, "relu")
        elif kind == "exact":
            gate = program.add_buffer(shape.intermediate)
            program.op_linear(self._x, gate, [matrices[0]], bias, "int8")
            program.op_neurons(self._x, act, "relu", 0.0, "int8", gate, None, matrices[1], None, None, None)
        else:
            lists = _core.NeuronLists()
            if kind == "given":
                ids = np.flatnonzero(fires).astype(np.int32)
                lists.set(ids, np.array([0, len(ids)], np.int32))
            else:
                low, scores = program.add_buffer(_PREDICTOR_RANK), program.add_buffer(shape.intermediate)
                program.op_linear(self._x, low, [matrices[-2]], None, "int8")
                program.op_linear(low, scores, [matrices[-1]], bias, "int8")
                program.op_pick_neurons(scores, 0.0, lists)
            up = matrices[1] if shape.gated else None
            program.op_neurons(self._x, act, "relu", 0.0, "int8", None, matrices[0], up, bias, None, lists)
        down = program.op_linear(act, out, [matrices[2 if shape.gated and kind != "dense" else 1]], None, "int8")
        if kind != "dense":
            program.set_threshold(down, 0.0, None)


def _random_weights(shape: FfnShape, rng: np.random.Generator) -> _Weights:
    def rows(outputs: int, inputs: int) -> NDArray[np.uint8]:
        if shape.type in FLOAT_BITS:
            values = (rng.standard_normal((outputs, inputs), np.float32) * 0.02).astype(np.float16)
            return values.view(np.uint8)
        return random_blocks(rng, shape.type, outputs, inputs)

    count = 2 if shape.gated else 1
    return _Weights(
        [rows(shape.intermediate, shape.hidden) for _ in range(count)], rows(shape.hidden, shape.intermediate)
    )


def _inputs(raw: NDArray[np.uint8], stored: str) -> int:
    weights, size = STORED_BYTES[stored]
    return int(raw.shape[1]) // size * weights
