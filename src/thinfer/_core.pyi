# ruff: noqa
# Written by scripts/write_stub.py from the native module: do not edit.
"""
The native core of thinfer: a program of ops over float32 buffers, run in one call per step.
"""

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

def isas() -> list[str]:
    """Names of the instruction sets this machine can run, worst first."""

def default_isa() -> str:
    """
    The instruction set used unless one is named: the best, or what THINFER_ISA says. Raises ValueError when that is unknown or not available.
    """

BLOCK_SIZE: int = 64

class ThreadPool:
    """
    Worker threads that sleep between steps; the calling thread is one of them.

    Example: ThreadPool(2). ValueError unless 1 to 1024.
    """

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int:
        """Number of threads, the caller's included."""

    @threads.setter
    def threads(self, arg: int, /) -> None: ...

class KvCache:
    """
    Keys and values of all layers, in blocks of BLOCK_SIZE positions, as "f16" or "f32".

    Memory becomes resident as it is written. Example: KvCache(30, 3, 64, "f16").
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, type: str = "f16") -> None: ...
    @property
    def blocks(self) -> int:
        """Blocks allocated so far."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    @property
    def type(self) -> str:
        """ "f16" or "f32"."""

    def ensure_blocks(self, count: int) -> None:
        """Grow to at least `count` blocks; raises MemoryError."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block over all layers; ValueError when there is no such block."""

    def read(self, layer: int, block: int) -> tuple[NDArray[numpy.float32], NDArray[numpy.float32]]:
        """
        Keys and values of one layer of a block, float32 [BLOCK_SIZE, kv_heads, head_dim] each.
        """

    def write(self, layer: int, block: int, keys: NDArray[numpy.float32], values: NDArray[numpy.float32]) -> None:
        """
        Set keys and values of one layer of a block, float32 [BLOCK_SIZE, kv_heads, head_dim] each.
        """

class OpCounters:
    """What one op did since the counters were last taken."""

    @property
    def name(self) -> str:
        """Name of the op."""

    @property
    def calls(self) -> int:
        """Times it ran."""

    @property
    def nanoseconds(self) -> int:
        """Wall time, while profiling."""

    @property
    def bytes_read(self) -> int:
        """Bytes of weights, or of cached keys and values."""

    @property
    def channels_active(self) -> int:
        """Input channels used, summed over rows."""

    @property
    def channels_total(self) -> int:
        """Input channels there were, summed over rows."""

    @property
    def needed(self) -> int:
        """Neurons that fired in the rows where lists were checked."""

    @property
    def found(self) -> int:
        """Of them those that were listed."""

class RowSource:
    """Rows of a matrix as float32: what op_embed reads."""

    @property
    def rows(self) -> int:
        """Number of rows."""

    @property
    def width(self) -> int:
        """Floats in a row."""

class Float32Rows(RowSource):
    """A copy of a float32 matrix [rows, width]."""

    def __init__(self, values: NDArray[numpy.float32]) -> None: ...

class Program:
    """
    Ops over numbered float32 buffers [max_rows, width], run in one call per step without the GIL.

    isa None: the default. Ops that fit may write the buffer they read. ValueError names whatever does not fit.
    Example: p = Program(None, ThreadPool(2), 64, cache); x = p.add_buffer(576); p.op_embed(rows, x).
    """

    def __init__(self, isa: str | None, pool: ThreadPool, max_rows: int, cache: KvCache | None = None) -> None: ...
    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""

    @property
    def max_rows(self) -> int:
        """Rows a buffer has room for."""

    @property
    def ops(self) -> int:
        """Number of ops."""

    def add_buffer(self, width: int) -> int:
        """Add a buffer and return its id."""

    def buffer(self, id: int) -> NDArray[numpy.float32]:
        """
        A writable view float32 [max_rows, width] of a buffer; rows a step did not write hold no meaning.
        """

    def set_selected(self, buffer: int, selected: bool) -> None:
        """
        Say of a buffer written from outside whether it holds only the rows of out_rows; for ops added later.
        """

    def set_sparse_only(self, op: int) -> None:
        """Run this op only in steps that have a sparse row."""

    def run(
        self,
        first: int,
        last: int,
        tokens: NDArray[numpy.int32],
        positions: NDArray[numpy.int32],
        sequence: NDArray[numpy.int32],
        sparse: NDArray[numpy.uint8],
        out_rows: NDArray[numpy.int32],
        block_table: NDArray[numpy.int32],
    ) -> None:
        """
        Run ops [first, last) on a batch.

        tokens, positions, sequence int32 [M], sparse uint8 [M], out_rows int32 [L], block_table int32 [S, max_blocks].
        Every index is checked first: ValueError names the row. Calls from several threads take turns.
        """

    def set_profiling(self, on: bool) -> None:
        """Whether to time every op."""

    def take_counters(self) -> list[OpCounters]:
        """The counters of every op in order; taking them resets them."""

    def op_linear(
        self, x: int, out: int, parts: Sequence[PackedMatrix], bias: NDArray[numpy.float32] | None, activations: str
    ) -> int:
        """
        out = W x + bias over packed matrices stacked along the outputs; activations 'int8' or 'f32'. Returns the op's index.
        """

    def set_threshold(self, op: int, threshold: float, channel_scale: NDArray[numpy.float32] | None) -> None:
        """
        Inputs with |x| * channel_scale <= threshold count as 0 in sparse rows of this linear or neurons op; below 0: none.
        """

    def set_beside(self, first: int, last: int, until: int) -> None:
        """
        Run ops [first, last) beside those that follow, done when op `until` begins. Until then nothing may change what they read. ValueError when they are not in front of `until`, or run beside something already.
        """

    def op_neurons(
        self,
        x: int,
        out: int,
        act: str,
        threshold: float,
        activations: str,
        gate_buffer: int | None,
        gate: PackedMatrix | None,
        up: PackedMatrix | None,
        gate_bias: NDArray[numpy.float32] | None,
        up_bias: NDArray[numpy.float32] | None,
        lists: NeuronLists | None,
    ) -> int:
        """
        out = act(gate x) * (up x) for the neurons listed whose act(gate x) is not 0, 0 elsewhere; without up act(gate x).

        act and threshold as in op_gated_act. The gate is a buffer computed before, or a matrix; matrices are in the neurons layout, or in rows, which are read whole. Returns the op's index.
        """

    def op_pick_neurons(self, scores: int, threshold: float, lists: NeuronLists) -> int:
        """
        List the neurons whose score is above the threshold (all of them in rows that are not sparse) for the ops after this one. Returns the op's index.
        """

    def check_lists(self, op: int, every: int, turn: int) -> None:
        """
        In one run of `every` (0: none), those whose number is `turn` modulo it, compute all neurons of this neurons op, and count of those that fire in sparse rows how many were listed; the others are left out all the same.
        """

    def op_embed(self, source: RowSource, out: int) -> int:
        """out[r] = source row tokens[r]. Returns the op's index."""

    def op_rms_norm(self, x: int, out: int, weight: NDArray[numpy.float32], eps: float) -> int:
        """out = x / rms(x) * weight [width]; out may be x."""

    def op_layer_norm(
        self, x: int, out: int, weight: NDArray[numpy.float32], bias: NDArray[numpy.float32], eps: float
    ) -> int:
        """
        out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias [width]; out may be x.
        """

    def op_positions(self, source: RowSource, x: int, out: int, offset: int) -> int:
        """out[r] = x[r] + source row positions[r] + offset; out may be x."""

    def op_head_norm(
        self,
        x: int,
        out: int,
        q_norm: NDArray[numpy.float32],
        k_norm: NDArray[numpy.float32],
        eps: float,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> int:
        """
        rms_norm of every query head by q_norm and key head by k_norm [head_dim] of q|k|v; out may be x.
        """

    def op_rope(
        self,
        x: int,
        out: int,
        inv_freq: Sequence[float],
        attention_factor: float,
        heads: int,
        kv_heads: int,
        head_dim: int,
    ) -> int:
        """
        Rotate the query and key heads of q|k|v by position times inv_freq; out may be x.

        inv_freq has up to head_dim / 2 entries: twice as many channels of a head turn, the rest pass.
        """

    def op_attention(
        self,
        x: int,
        out: int,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        slopes: Sequence[float] | None = None,
        lists: NeuronLists | None = None,
    ) -> int:
        """
        Write the rows' keys and values of q|k|v to the cache, then causal attention: out is heads * head_dim wide.

        slopes: per head, times the distance to a key, is what its score loses (ALiBi). lists: heads that a row computes; the others are 0.
        """

    def op_gated_act(self, x: int, out: int, act: str, ids: Sequence[int] | None = None, threshold: float = 0.0) -> int:
        """
        out = act(gate) * up for x = gate|up; with ids (ascending) neuron j goes to column ids[j], the rest is 0.

        act: silu, gelu, gelu_tanh, relu, relu2, fatrelu (0 up to the threshold) or drelu (relu of both).
        """

    def op_act(self, x: int, out: int, act: str, ids: Sequence[int] | None = None, threshold: float = 0.0) -> int:
        """
        out = act(x); act, ids and threshold as in op_gated_act, but for drelu.
        """

    def op_add(self, a: int, b: int, out: int) -> int:
        """out = a + b; out may be either."""

    def op_select(self, x: int, out: int) -> int:
        """out[i] = x[out_rows[i]]; later ops work on those rows."""

class Arena:
    """
    Memory on huge pages that packed matrices share; freed with the last of them.
    """

    def __init__(self) -> None: ...

class PackedMatrix(RowSource):
    """Weights packed for the kernels; also a source of rows."""

    @staticmethod
    def pack(
        parts: Sequence[tuple[NDArray[numpy.uint8], str, NDArray[numpy.int32] | None]],
        inputs: int,
        codec: str | None,
        layout: str,
        chunk: int,
        segments: int,
        pool: ThreadPool,
        arena: Arena,
    ) -> PackedMatrix:
        """
        Packs stored tensors, stacked along the outputs. parts: (raw uint8 [rows, row_bytes], type, row order int32 or None); codec: None keeps the type's, 'i8_d', 'u4_dm' or 'f16' re-quantise float types. Raises ValueError.
        """

    @property
    def codec(self) -> str:
        """In-memory codec."""

    @property
    def layout(self) -> str:
        """'rows', 'columns' or 'neurons'."""

    @property
    def chunk(self) -> int:
        """Outputs per channel slice (columns)."""

    @property
    def segments(self) -> int:
        """Partial sums over the input."""

    def copy(self) -> PackedMatrix:
        """The same weights at other addresses."""

    def evict(self) -> None:
        """Drop the weights from the processor's caches where it can."""

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights."""

class StoredRows(RowSource):
    """Rows decoded from a stored tensor on each read; nothing is copied."""

    def __init__(self, part: tuple[NDArray[numpy.uint8], str, NDArray[numpy.int32] | None], inputs: int) -> None: ...

def read_row(source: RowSource, index: int) -> object:
    """One row of a RowSource as float32 [width]."""

class NeuronLists:
    """
    Neurons that a neurons op is asked for, by row of the batch; empty: all of them.
    """

    def __init__(self) -> None: ...
    def set(self, ids: NDArray[numpy.int32], offsets: NDArray[numpy.int32]) -> None:
        """
        Row r asks for ids[offsets[r]:offsets[r + 1]], ascending. ValueError when they are not. Not while a step runs.
        """

    def clear(self) -> None:
        """Ask for all neurons again. Not while a step runs."""

    @property
    def given(self) -> bool:
        """Whether neurons are listed."""

    @property
    def count(self) -> int:
        """Neurons listed, summed over rows."""

def embed(isa: str, table: NDArray[numpy.float32], tokens: NDArray[numpy.int32]) -> NDArray[numpy.float32]:
    """The op embed of kernels/embed.py on the named instruction set."""

def rms_norm(isa: str, x: NDArray[numpy.float32], weight: NDArray[numpy.float32], eps: float) -> NDArray[numpy.float32]:
    """The op rms_norm of kernels/rms_norm.py on the named instruction set."""

def layer_norm(
    isa: str, x: NDArray[numpy.float32], weight: NDArray[numpy.float32], bias: NDArray[numpy.float32], eps: float
) -> NDArray[numpy.float32]:
    """
    The op layer_norm of kernels/layer_norm.py on the named instruction set.
    """

def positions(
    isa: str, x: NDArray[numpy.float32], table: NDArray[numpy.float32], positions: NDArray[numpy.int32], offset: int
) -> NDArray[numpy.float32]:
    """The op positions of kernels/positions.py on the named instruction set."""

def head_norm(
    isa: str,
    qkv: NDArray[numpy.float32],
    q_norm: NDArray[numpy.float32],
    k_norm: NDArray[numpy.float32],
    eps: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> NDArray[numpy.float32]:
    """The op head_norm of kernels/head_norm.py on the named instruction set."""

def rope(
    isa: str,
    qkv: NDArray[numpy.float32],
    positions: NDArray[numpy.int32],
    inv_freq: Sequence[float],
    attention_factor: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> NDArray[numpy.float32]:
    """The op rope of kernels/rope.py on the named instruction set."""

def attention(
    isa: str,
    qkv: NDArray[numpy.float32],
    keys: NDArray[numpy.float32],
    values: NDArray[numpy.float32],
    block_table: NDArray[numpy.int32],
    positions: NDArray[numpy.int32],
    sequence: NDArray[numpy.int32],
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None = None,
    slopes: Sequence[float] | None = None,
    kv_type: str = "f32",
) -> NDArray[numpy.float32]:
    """
    The op attention of kernels/attention.py on the named instruction set.

    keys and values [blocks, BLOCK_SIZE, kv_heads, head_dim] go through a cache of kv_type and are updated.
    """

def gated_act(
    isa: str,
    gate_up: NDArray[numpy.float32],
    act: str,
    ids: Sequence[int] | None = None,
    width: int | None = None,
    threshold: float = 0.0,
) -> NDArray[numpy.float32]:
    """The op gated_act of kernels/gated_act.py on the named instruction set."""

def act(
    isa: str,
    x: NDArray[numpy.float32],
    act: str,
    ids: Sequence[int] | None = None,
    width: int | None = None,
    threshold: float = 0.0,
) -> NDArray[numpy.float32]:
    """The op act of kernels/act.py on the named instruction set."""

def add(isa: str, a: NDArray[numpy.float32], b: NDArray[numpy.float32]) -> NDArray[numpy.float32]:
    """The op add of kernels/add.py on the named instruction set."""

def select(isa: str, x: NDArray[numpy.float32], rows: NDArray[numpy.int32]) -> NDArray[numpy.float32]:
    """The op select of kernels/select.py on the named instruction set."""

class Softmax:
    """
    Weights e^((score - top) / temperature) over a vocabulary: top is the largest of scores [vocab].
    """

    def __init__(self, isa: str | None = None) -> None:
        """isa: an instruction set; None: the best of this machine."""

    @property
    def isa(self) -> str: ...
    def draw(
        self, scores: NDArray[numpy.float32], top: float, temperature: float, least: float, uniform: float
    ) -> int | None:
        """
        The id whose share of the summed weights holds the point uniform in [0, 1), in order of ids.

        Weights below least count for nothing. None where another way of rounding weights and sums could give
        another id: that is for the caller to compute.
        """

    def total(self, scores: NDArray[numpy.float32], top: float, temperature: float) -> float:
        """The sum of the weights, within error of itself."""

    @property
    def error(self) -> float: ...
