"""Times the packed layouts at the shapes of real models: codecs, densities, rows of a batch, threads.

Every figure is one linear op of the engine (activations to int8, list of active channels, kernel, partial sums).
Weights are random; activations are normal, with the stated fraction of channels kept, drawn anew for every sample. The
layouts of a matrix are copied until all together are larger than the largest cache, and a sample runs over some of the
copies, the next sample over the next ones: so weights come from memory, though a sample takes a few milliseconds.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer import _core
from thinfer.engine.cores import usable_cores
from thinfer.engine.executor import Float32
from thinfer.engine.layout_choice import largest_cache
from thinfer.engine.plan import segment_count

DENSITIES = (1.0, 0.8, 0.6, 0.5, 0.3, 0.1)
BATCHES = (4, 16)
STORED = {"u4": "Q4_1", "u5": "Q5_1", "u6": "Q6_K", "i8": "Q8_0", "u4_k": "Q4_K"}
"""Codec name to the stored type packed into it."""
CODECS = ("u4", "u5", "u6", "i8")
"""Those measured unless others are named; u4_k has the bits of u4 and smaller scales."""

STORED_BYTES = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q4_K": (256, 144),
    "Q5_1": (32, 24),
    "Q6_K": (256, 210),
    "Q8_0": (32, 34),
}
"""Weights of a stored block and its bytes, by type."""

_LEAST_SET, _MOST_SET = 128 << 20, 512 << 20
_SAMPLE_BYTES = 16 << 20
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_CASE_SECONDS = 0.2
COLUMNS = {
    "shape": 20,
    "inputs": 6,
    "outputs": 7,
    "codec": 5,
    "threads": 7,
    "layout": 7,
    "cut": 8,
    "rows": 4,
    "density": 7,
    "us": 8,
    "gb_s": 5,
}
"""Names of a row's values, and how wide they are shown."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One linear of a model: inputs x outputs."""

    model: str
    inputs: int
    outputs: int


SHAPES = (
    Shape("SmolLM2 q|k|v", 576, 960),
    Shape("SmolLM2 gate|up", 576, 3072),
    Shape("SmolLM2 down", 1536, 576),
    Shape("Qwen2.5-1.5B q|k|v", 1536, 2048),
    Shape("Qwen2.5-1.5B gate|up", 1536, 17920),
    Shape("Qwen2.5-1.5B down", 8960, 1536),
    Shape("Llama-8B up", 4096, 14336),
    Shape("Llama-8B down", 14336, 4096),
)


@dataclass(frozen=True, slots=True)
class Packing:
    """A layout to time; `cut` says how the columns layout divides the work."""

    layout: str
    cut: str
    chunk: int
    segments: int


def packings(shape: Shape, threads: int) -> Iterator[Packing]:
    """Rows, and columns cut along the outputs (for up to ``threads`` threads) and along input segments."""
    engine = segment_count(shape.inputs, shape.outputs)
    yield Packing("rows", "-", 0, engine)
    per_thread = -(-shape.outputs // threads // 64) * 64
    yield Packing("columns", "outputs", per_thread, 1)
    if shape.inputs >= 512:
        yield Packing("columns", "segments", -(-shape.outputs // 64) * 64, max(2, engine))


def set_bytes() -> int:
    """Bytes of all copies of a matrix: a quarter more than the largest cache, between 128 and 512 MiB."""
    return min(max(largest_cache() * 5 // 4, _LEAST_SET), _MOST_SET)


def measure(
    *,
    shapes: Sequence[Shape] = SHAPES,
    codecs: Sequence[str] = CODECS,
    threads: Sequence[int] | None = None,
    seconds: float = _CASE_SECONDS,
    working_set: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Run the experiment; rows come as they are measured.

    Args:
        shapes: matrices; a codec whose blocks do not divide the inputs is passed over.
        codecs: keys of STORED.
        threads: numbers of threads; None: 1 and all usable cores.
        seconds: after this no further round of one case (all layouts at one density or batch) begins; there are at
            least 3 rounds and at most 15.
        working_set: bytes of all copies of a matrix; None: `set_bytes`.
        progress: told what is packed.

    Yields:
        One row a shape, codec, thread count, layout, and density or rows of the batch: see COLUMNS. ``us`` is the
        median microseconds of one op and ``gb_s`` counts the bytes that were read.
    """
    counts = sorted({1, usable_cores()} if threads is None else set(threads))
    for shape in shapes:
        for codec in codecs:
            if shape.inputs % STORED_BYTES[STORED[codec]][0]:
                continue
            progress(f"packing {shape.model} {codec}")
            packed = _pack(shape, codec, max(counts), working_set or set_bytes())
            for count in counts:
                yield from _measure_threads(shape, codec, packed, count, seconds)


@dataclass(frozen=True, slots=True)
class _Packed:
    """One layout of a matrix, in copies."""

    packing: Packing
    copies: list[_core.PackedMatrix]


def _pack(shape: Shape, codec: str, threads: int, working_set: int) -> list[_Packed]:
    """Every layout once, for all thread counts, and then copied."""
    pool = _core.ThreadPool(usable_cores())
    raw = random_blocks(np.random.default_rng(0), STORED[codec], shape.outputs, shape.inputs)
    wanted = list(packings(shape, threads))
    packed = []
    for p in wanted:
        parts = [(raw, STORED[codec], None)]
        first = _core.PackedMatrix.pack(parts, shape.inputs, None, p.layout, p.chunk, p.segments, pool, _core.Arena())
        copies = max(2, -(-working_set // (len(wanted) * first.nbytes)))
        packed.append(_Packed(p, [first, *(first.copy() for _ in range(copies - 1))]))
    return packed


class _Bench:
    """One layout on some threads: a program of one op a copy, of which each sample runs the next few."""

    def __init__(self, shape: Shape, packed: _Packed, pool: _core.ThreadPool) -> None:
        self.packing = packed.packing
        self._copies = len(packed.copies)
        self._piece = max(1, min(self._copies // 2, _SAMPLE_BYTES // packed.copies[0].nbytes))
        self._next = 0
        self._program = _core.Program(None, pool, max(BATCHES))
        self._x = self._program.add_buffer(shape.inputs)
        y = self._program.add_buffer(shape.outputs)
        for matrix in packed.copies:
            self._program.op_linear(self._x, y, [matrix], None, "int8")

    def time(self, x: Float32) -> float:
        """Seconds of one op on the rows of x."""
        self._program.buffer(self._x)[: len(x)] = x
        first = self._next if self._next + self._piece <= self._copies else 0
        self._next = first + self._piece
        return _time(self._program, first, self._next, len(x)) / self._piece

    def bytes_read(self) -> float:
        """Weight bytes that one op read, on average since the last call."""
        counters = self._program.take_counters()
        return sum(counter.bytes_read for counter in counters) / max(1, sum(counter.calls for counter in counters))


def _measure_threads(
    shape: Shape, codec: str, packed: Sequence[_Packed], threads: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """All cases on some threads; the layouts take turns, so that the machine's drift does not favour one."""
    pool = _core.ThreadPool(threads)
    rng = np.random.default_rng(0)
    benches = [_Bench(shape, each, pool) for each in packed]
    for rows, density in [(1, density) for density in DENSITIES] + [(rows, 1.0) for rows in BATCHES]:
        chosen = [bench for bench in benches if bench.packing.layout == "columns" or density == 1.0]
        samples: list[list[float]] = [[] for _ in chosen]
        deadline = time.perf_counter() + seconds
        # The first round wakes the threads and is not counted.
        for turn in range(-1, _MOST_ROUNDS):
            if turn >= _LEAST_ROUNDS and time.perf_counter() > deadline:
                break
            keep = rng.random((rows, shape.inputs)) < density
            x = np.where(keep, rng.standard_normal((rows, shape.inputs)), 0).astype(np.float32)
            for bench, times in zip(chosen, samples, strict=True):
                passed = bench.time(x)
                if turn >= 0:
                    times.append(passed)
        for bench, times in zip(chosen, samples, strict=True):
            median = statistics.median(times)
            yield {
                "shape": shape.model,
                "inputs": shape.inputs,
                "outputs": shape.outputs,
                "codec": codec,
                "threads": threads,
                "layout": bench.packing.layout,
                "cut": bench.packing.cut,
                "rows": rows,
                "density": density,
                "us": round(median * 1e6, 1),
                "gb_s": round(bench.bytes_read() / median / 1e9, 1),
            }


def _time(program: _core.Program, first: int, last: int, rows: int) -> float:
    zeros = np.zeros(rows, np.int32)
    batch = (zeros, zeros, zeros, np.zeros(rows, np.uint8), np.zeros(0, np.int32), np.zeros((1, 1), np.int32))
    begin = time.perf_counter()
    program.run(first, last, *batch)
    return time.perf_counter() - begin


def random_blocks(rng: np.random.Generator, stored: str, rows: int, inputs: int) -> NDArray[np.uint8]:
    """Random stored blocks uint8 [rows, row_bytes] of a type, with finite scales."""
    weights, size = STORED_BYTES[stored]
    blocks = rng.integers(0, 256, (rows, inputs // weights, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if stored == "Q6_K":
        blocks[..., 208:210] = scale
    else:
        blocks[..., 0:2] = scale
        if stored in ("Q4_1", "Q4_K", "Q5_1"):
            blocks[..., 2:4] = scale
    return blocks.reshape(rows, -1)
