"""Times the packed layouts at the shapes of real models: codecs, densities, rows of a batch, threads.

Every figure is one linear op of the engine (activations to int8, list of active channels, kernel, partial sums) run
over copies of a matrix that together are larger than the caches. Weights are random; activations are normal, with
the stated fraction of channels kept.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer import _core
from thinfer.engine.cores import usable_cores
from thinfer.engine.executor import Float32
from thinfer.engine.plan import segment_count

DENSITIES = (1.0, 0.8, 0.6, 0.5, 0.3, 0.1)
BATCHES = (4, 16)
CODECS = {"u4": "Q4_1", "u4_k": "Q4_K", "u5": "Q5_1", "u6": "Q6_K", "i8": "Q8_0"}
"""Codec name to the stored type packed into it."""

_STORED_BYTES = {"Q4_1": (32, 20), "Q4_K": (256, 144), "Q5_1": (32, 24), "Q6_K": (256, 210), "Q8_0": (32, 34)}
_WORKING_SET = 480 << 20
_ROUNDS = 7


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
_QUICK = (SHAPES[4], SHAPES[5])


@dataclass(frozen=True, slots=True)
class Packing:
    """A layout to time; `cut` says how the columns layout divides the work."""

    layout: str
    cut: str
    chunk: int
    segments: int


def packings(shape: Shape, threads: int) -> Iterator[Packing]:
    """Rows, and columns cut along the outputs and along input segments."""
    engine = segment_count(shape.inputs, shape.outputs)
    yield Packing("rows", "-", 0, engine)
    per_thread = -(-shape.outputs // threads // 64) * 64
    yield Packing("columns", "outputs", per_thread, 1)
    if shape.inputs >= 512:
        yield Packing("columns", "segments", -(-shape.outputs // 64) * 64, max(2, engine))


def measure(
    *, threads: int | None = None, quick: bool = False, progress: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """Run the experiment.

    Args:
        threads: only this many threads; None: 1 and all usable cores.
        quick: two shapes, one codec.
        progress: told what runs now.

    Returns:
        One row a shape, codec, layout, thread count and rows of the batch: ``{"shape", "inputs", "outputs", "codec",
        "threads", "layout", "cut", "rows", "density", "us", "gb_s"}``; ``us`` is the median microseconds of one op and
        ``gb_s`` counts the bytes that were read.
    """
    counts = sorted({1, usable_cores()}) if threads is None else [threads]
    codecs = ["u4_k"] if quick else list(CODECS)
    rows = []
    for shape in _QUICK if quick else SHAPES:
        for codec in codecs:
            if shape.inputs % _STORED_BYTES[CODECS[codec]][0]:
                continue
            for count in counts:
                progress(f"{shape.model} {codec} {count} threads")
                rows += _measure_shape(shape, codec, count)
    return rows


class _Bench:
    """One layout of a matrix, in copies that together are larger than the caches, as a program of one op a copy."""

    def __init__(
        self, shape: Shape, codec: str, packing: Packing, raw: NDArray[np.uint8], pool: _core.ThreadPool
    ) -> None:
        self.shape, self.packing = shape, packing
        parts = [(raw, CODECS[codec], None)]
        first = _core.PackedMatrix.pack(
            parts, shape.inputs, None, packing.layout, packing.chunk, packing.segments, pool, _core.Arena()
        )
        self.copies = max(2, min(400, _WORKING_SET // first.nbytes))
        self.program = _core.Program(None, pool, max(BATCHES))
        self.x, y = self.program.add_buffer(shape.inputs), self.program.add_buffer(shape.outputs)
        for matrix in (first, *(first.copy() for _ in range(self.copies - 1))):
            self.program.op_linear(self.x, y, [matrix], None, "int8")

    def time(self, x: Float32) -> float:
        """Seconds of one op on the rows of x."""
        self.program.buffer(self.x)[: len(x)] = x
        return _time(self.program, len(x)) / self.copies

    def bytes_read(self, x: Float32) -> float:
        """Weight bytes that one op reads."""
        self.program.take_counters()
        self.time(x)
        return sum(counter.bytes_read for counter in self.program.take_counters()) / self.copies


def _measure_shape(shape: Shape, codec: str, threads: int) -> list[dict[str, Any]]:
    """All layouts of one matrix, in turn within each round, so that the machine's drift does not favour one."""
    pool = _core.ThreadPool(threads)
    rng = np.random.default_rng(0)
    raw = random_blocks(rng, CODECS[codec], shape.outputs, shape.inputs)
    benches = [_Bench(shape, codec, packing, raw, pool) for packing in packings(shape, threads)]
    results = []
    for rows, density in [(1, density) for density in DENSITIES] + [(rows, 1.0) for rows in BATCHES]:
        keep = rng.random((rows, shape.inputs)) < density
        x = np.where(keep, rng.standard_normal((rows, shape.inputs)), 0).astype(np.float32)
        chosen = [bench for bench in benches if bench.packing.layout == "columns" or density == 1.0]
        samples = [[bench.time(x) for bench in chosen] for _ in range(_ROUNDS)]
        for bench, times in zip(chosen, zip(*samples, strict=True), strict=True):
            seconds = statistics.median(times)
            results.append(
                {
                    "shape": shape.model,
                    "inputs": shape.inputs,
                    "outputs": shape.outputs,
                    "codec": codec,
                    "threads": threads,
                    "layout": bench.packing.layout,
                    "cut": bench.packing.cut,
                    "rows": rows,
                    "density": density,
                    "us": round(seconds * 1e6, 1),
                    "gb_s": round(bench.bytes_read(x) / seconds / 1e9, 1),
                }
            )
    return results


def _time(program: _core.Program, rows: int) -> float:
    zeros = np.zeros(rows, np.int32)
    batch = (zeros, zeros, zeros, np.zeros(rows, np.uint8), np.zeros(0, np.int32), np.zeros((1, 1), np.int32))
    begin = time.perf_counter()
    program.run(0, program.ops, *batch)
    return time.perf_counter() - begin


def random_blocks(rng: np.random.Generator, stored: str, rows: int, inputs: int) -> NDArray[np.uint8]:
    """Random stored blocks uint8 [rows, row_bytes] of a type, with finite scales."""
    weights, size = _STORED_BYTES[stored]
    blocks = rng.integers(0, 256, (rows, inputs // weights, size), np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if stored == "Q6_K":
        blocks[..., 208:210] = scale
    else:
        blocks[..., 0:2] = scale
        if stored in ("Q4_1", "Q4_K", "Q5_1"):
            blocks[..., 2:4] = scale
    return blocks.reshape(rows, -1)
