"""Times the packed layouts at the shapes of real models: codecs, densities, rows of a batch, threads.

Every figure is one linear op of the engine (activations to int8, list of active channels, kernel, partial sums) run
over copies of a matrix that together are larger than the caches. Weights are random; activations are normal, with
the stated fraction of channels kept.
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
from thinfer.engine.plan import segment_count

DENSITIES = (1.0, 0.8, 0.6, 0.5, 0.3, 0.1)
BATCHES = (4, 16)
CODECS = {"u4": "Q4_1", "u5": "Q5_1", "u6": "Q6_K", "i8": "Q8_0"}
"""Codec name to the stored type packed into it."""

_BITS = {"u4": 4, "u5": 5, "u6": 6, "i8": 8}
_STORED_BYTES = {"Q4_1": (32, 20), "Q5_1": (32, 24), "Q6_K": (256, 210), "Q8_0": (32, 34)}
_WORKING_SET = 640 << 20


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


def packings(shape: Shape, bits: int, threads: int) -> Iterator[Packing]:
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
    codecs = ["u4"] if quick else list(CODECS)
    rows = []
    for shape in _QUICK if quick else SHAPES:
        for codec in codecs:
            if shape.inputs % _STORED_BYTES[CODECS[codec]][0]:
                continue
            for count in counts:
                for packing in packings(shape, _BITS[codec], count):
                    progress(f"{shape.model} {codec} {packing.layout} {packing.cut} {count} threads")
                    rows += _measure_packing(shape, codec, count, packing)
    return rows


def _measure_packing(shape: Shape, codec: str, threads: int, packing: Packing) -> list[dict[str, Any]]:
    pool = _core.ThreadPool(threads)
    rng = np.random.default_rng(0)
    raw = random_blocks(rng, CODECS[codec], shape.outputs, shape.inputs)
    parts = [(raw, CODECS[codec], None)]
    first = _core.PackedMatrix.pack(
        parts, shape.inputs, None, packing.layout, packing.chunk, packing.segments, pool, _core.Arena()
    )
    copies = max(2, min(400, _WORKING_SET // first.nbytes))
    matrices = [first, *(first.copy() for _ in range(copies - 1))]
    program = _core.Program(None, pool, max(BATCHES))
    x, y = program.add_buffer(shape.inputs), program.add_buffer(shape.outputs)
    for matrix in matrices:
        program.op_linear(x, y, [matrix], None, "int8")
    densities: Sequence[float] = DENSITIES if packing.layout == "columns" else (1.0,)
    tests = [(1, density) for density in densities] + [(rows, 1.0) for rows in BATCHES]
    results = []
    for rows, density in tests:
        keep = rng.random((rows, shape.inputs)) < density
        program.buffer(x)[:rows] = np.where(keep, rng.standard_normal((rows, shape.inputs)), 0)
        seconds = statistics.median(_time(program, rows) for _ in range(5)) / copies
        program.take_counters()
        _time(program, rows)
        read = sum(counter.bytes_read for counter in program.take_counters()) / copies
        results.append(
            {
                "shape": shape.model,
                "inputs": shape.inputs,
                "outputs": shape.outputs,
                "codec": codec,
                "threads": threads,
                "layout": packing.layout,
                "cut": packing.cut,
                "rows": rows,
                "density": density,
                "us": round(seconds * 1e6, 1),
                "gb_s": round(read / seconds / 1e9, 1),
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
        if stored in ("Q4_1", "Q5_1"):
            blocks[..., 2:4] = scale
    return blocks.reshape(rows, -1)
