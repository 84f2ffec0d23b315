"""Linear ops for the tests: stored weights of every type, packed in every layout, run on any batch."""

from functools import cache

import gguf
import numpy as np

from formats.gguf_files import TYPES, stored_bytes
from thinfer import _core

FLOATS = ("F32", "F16", "BF16")
QUANTISED = tuple(name for name in TYPES if name not in FLOATS)
# bits of a weight, bytes of scales a group of 32 and output, bytes a block of 256 and output (csrc/codec.h)
SIZES = {
    "F32": (32, 0, 0),
    "F16": (16, 0, 0),
    "BF16": (16, 0, 0),
    "Q8_0": (8, 2, 0),
    "Q4_0": (4, 2, 0),
    "Q4_1": (4, 4, 0),
    "Q5_0": (5, 2, 0),
    "Q5_1": (5, 4, 0),
    "Q4_K": (4, 2, 4),
    "Q5_K": (5, 2, 4),
    "Q6_K": (6, 2, 2),
}
# layout and chunk; 150 outputs are 3 blocks of 64, so that chunks of 128 leave a shorter one
LAYOUTS = (("rows", 0), ("columns", 64), ("columns", 128), ("columns", 1024))
ARENA = _core.Arena()


def layouts(stored):
    """The layouts a stored type can have."""
    return LAYOUTS[1:] if stored in FLOATS else LAYOUTS


@cache
def pool(threads):
    return _core.ThreadPool(threads)


def dequantise(raw, stored):
    """float32 [rows, inputs] by the gguf package."""
    return gguf.dequantize(raw, gguf.GGMLQuantizationType[stored]).astype(np.float32)


@cache
def weights(stored, outputs=150, inputs=1024, seed=0):
    """Raw rows of a type and their float32 values; K types are random blocks."""
    rng = np.random.default_rng(seed)
    raw = stored_bytes(rng.standard_normal((outputs, inputs), np.float32), stored, rng)
    raw = np.ascontiguousarray(raw).view(np.uint8).reshape(outputs, -1)
    return raw, dequantise(raw, stored)


def pack(parts, inputs, layout="rows", chunk=0, segments=1, codec=None):
    """Packed matrix of parts (raw, type) or (raw, type, row order)."""
    parts = [part if len(part) == 3 else (*part, None) for part in parts]
    return _core.PackedMatrix.pack(parts, inputs, codec, layout, chunk, segments, pool(2), ARENA)


def read_back(matrix, rows):
    return np.stack([np.asarray(_core.read_row(matrix, row)) for row in range(rows)])


class Linear:
    """One linear op; calling it runs a batch. Rows of the output past the batch must stay as they were."""

    MAX_ROWS = 140

    def __init__(self, isa, matrices, inputs, outputs, *, activations="int8", threads=1, bias=None):
        self.program = _core.Program(isa, pool(threads), self.MAX_ROWS)
        self.x, self.y = self.program.add_buffer(inputs), self.program.add_buffer(outputs)
        self.op = self.program.op_linear(self.x, self.y, matrices, bias, activations)

    def threshold(self, value, scale=None):
        self.program.set_threshold(self.op, value, scale)
        return self

    def __call__(self, x, sparse=True):
        rows = len(x)
        self.program.buffer(self.x)[:rows] = x
        self.program.buffer(self.y)[:] = 12345
        zeros = np.zeros(rows, np.int32)
        marks = np.broadcast_to(np.asarray(sparse, np.uint8), rows).copy()
        sequence, table = np.arange(rows, dtype=np.int32), np.zeros((rows, 1), np.int32)
        self.program.run(0, 1, zeros, zeros, sequence, marks, zeros[:0], table)
        result = self.program.buffer(self.y)
        assert (result[rows:] == 12345).all()
        return result[:rows].copy()

    def one_by_one(self, x, sparse=True):
        marks = np.broadcast_to(sparse, len(x))
        return np.concatenate([self(x[r : r + 1], marks[r]) for r in range(len(x))])

    def counters(self):
        (counter,) = self.program.take_counters()
        return counter


def steps(rng, rows, inputs):
    """Activations that int8 holds exactly: whole multiples of 1/64 with ±127/64 in every group of 32."""
    q = rng.integers(-127, 128, (rows, inputs // 32, 32))
    q[..., 5] = 127 * rng.choice([-1, 1], q.shape[:2])
    return (q / 64).astype(np.float32).reshape(rows, inputs)
