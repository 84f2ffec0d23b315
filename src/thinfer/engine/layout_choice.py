"""Whether skipping pays: where channels or neurons are dropped, the layouts are timed on this machine, at load.

Skipping saves bytes, but not always time: short channel slices are read slower than whole rows, by how much depends on
the machine. Both layouts give the same bits, so the choice is speed alone.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from thinfer import _core
from thinfer.engine.options import ActivationType
from thinfer.engine.plan import MatrixPlan, Skipped

_GAIN = 0.03
"""Columns must be faster by more than this: less is noise."""
_SHAPE_SECONDS = 0.1
_TOTAL_SECONDS = 1.5
_ROUNDS = 5
_LEAST_TURNS = 5
_SET_BYTES = 32 << 20
"""Copies of a matrix together, in each layout: more than a core's caches hold."""
_SET_SHARE = 16
_PIECE_BYTES = 4 << 20
"""Read in one layout before the other takes its turn: a fraction of a millisecond, shorter than a disturbance."""
_MEMINFO = Path("/proc/meminfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

Pack = Callable[[MatrixPlan, _core.Arena], _core.PackedMatrix]


@dataclass(frozen=True, slots=True)
class LayoutTimes:
    """Seconds of one product at decode, the weights read from memory.

    Example:
        >>> print(LayoutTimes(columns=0.00041, rows=0.0007))
        columns 0.41 ms against rows 0.70 ms
    """

    columns: float
    rows: float
    name: str = "columns"
    """The layout that skips: of neurons it is their own."""

    @property
    def columns_win(self) -> bool:
        """Whether the layout that skips is faster beyond noise."""
        return self.columns < (1 - _GAIN) * self.rows

    def __str__(self) -> str:
        digits = 2 if self.rows >= 1e-4 else 3
        return f"{self.name} {self.columns * 1e3:.{digits}f} ms against rows {self.rows * 1e3:.{digits}f} ms"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A matrix planned in a layout that skips, which could lie in rows: what is known of it, and what packs it."""

    skipped: Skipped
    plan: MatrixPlan
    pack: Pack


class Timer(Protocol):
    """Times one matrix."""

    def __call__(self, candidate: Candidate, rates: Sequence[float], seconds: float) -> Mapping[float, LayoutTimes]:
        """Times by rate (fraction of the channels dropped), in about this many seconds."""
        ...


def settle(plan: MatrixPlan, times: Mapping[Skipped, LayoutTimes]) -> MatrixPlan:
    """The plan with the layout that was measured to be faster, and the figures as its reason.

    What was not measured lies in rows, which is as fast as dense.
    """
    if plan.skipped is None:
        return plan
    measured = times.get(plan.skipped)
    if measured is None:
        return plan.as_rows("what is dropped is read: there was no time to measure whether skipping is faster")
    why = f"{measured} at {plan.skipped}"
    return replace(plan, why=why) if measured.columns_win else plan.as_rows(why)


def measure_layouts(
    candidates: Iterable[Candidate],
    timer: Timer,
    *,
    seconds: float = _TOTAL_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Skipped, LayoutTimes]:
    """Time one matrix of each shape at all its rates, those with the most weights in the model first.

    Args:
        candidates: matrices of the model.
        timer: times one of them.
        seconds: no shape is begun after that.
        clock: seconds that pass.
    """
    groups: dict[Skipped, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(replace(candidate.skipped, rate=0.0), []).append(candidate)
    times: dict[Skipped, LayoutTimes] = {}
    begin = clock()
    for members in sorted(groups.values(), key=_weights, reverse=True):
        left = seconds - (clock() - begin)
        if left <= 0:
            break
        by_rate = {member.skipped.rate: member.skipped for member in members}
        measured = timer(members[0], sorted(by_rate), min(left, _SHAPE_SECONDS))
        times |= {by_rate[rate]: result for rate, result in measured.items()}
    return times


class LayoutTimer:
    """Times the engine's op that will read a matrix over copies of it, the two layouts taking turns.

    With `cold` the weights are dropped from the caches before each turn: those of a model larger than the caches come
    from memory, though these few copies would not.
    """

    def __init__(self, isa: str, pool: _core.ThreadPool, activations: ActivationType, *, cold: bool = False) -> None:
        self._cold = cold
        self._isa = isa
        self._pool = pool
        self._activations = activations

    def __call__(self, candidate: Candidate, rates: Sequence[float], seconds: float) -> dict[float, LayoutTimes]:
        """Times by rate; memory is given back on return."""
        deadline = time.perf_counter() + seconds
        plan, inputs = candidate.plan, candidate.skipped.inputs
        arenas = _core.Arena(), _core.Arena()
        rows = [candidate.pack(plan.as_rows(plan.why), arenas[0])]
        columns = [candidate.pack(plan, arenas[1])]
        copies = max(1, (_PIECE_BYTES if self._cold else set_bytes()) // max(rows[0].nbytes, columns[0].nbytes))
        copying_ends = (time.perf_counter() + deadline) / 2
        while len(rows) < copies and time.perf_counter() < copying_ends:
            rows.append(rows[0].copy())
            columns.append(columns[0].copy())
        copies = len(rows)
        piece = min(copies, max(1, -(-_PIECE_BYTES // rows[0].nbytes)))
        program = _core.Program(self._isa, self._pool, 1)
        x, y = program.add_buffer(inputs), program.add_buffer(candidate.skipped.outputs)
        neurons, listed = plan.layout == "neurons", candidate.skipped.listed
        gate, lists = program.add_buffer(candidate.skipped.outputs), _core.NeuronLists()
        for matrix in (*rows, *columns):
            if listed:
                program.op_neurons(x, y, "relu", 0.0, self._activations, None, matrix, None, None, None, lists)
            elif neurons and matrix.layout == "neurons":
                program.op_neurons(x, y, "relu", 0.0, self._activations, gate, None, matrix, None, None, None)
            else:
                program.op_linear(x, y, [matrix], None, self._activations)
        # Of neurons the gate decides: what is dropped there does not fire; or the list.
        decides, other = (gate, x) if neurons else (x, gate)
        activations = [_activations(program.buffer(decides).shape[1], rate, positive=neurons) for rate in rates]
        program.buffer(other)[0] = _activations(program.buffer(other).shape[1], 0.0)
        samples: list[list[float]] = [[] for _ in range(len(rates) + 1)]
        # The first piece wakes the threads and is not counted.
        for turn in range(-1, _ROUNDS * max(1, copies // piece)):
            if turn >= _LEAST_TURNS and time.perf_counter() > deadline:
                break
            first = max(turn, 0) % max(1, copies // piece) * piece
            for index in range(len(rates) + 1):
                program.buffer(decides)[0] = values = activations[max(index - 1, 0)]
                if listed:
                    ids = np.flatnonzero(values).astype(np.int32)
                    lists.set(ids, np.array([0, len(ids)], np.int32))
                start = first + (copies if index else 0)
                if self._cold:
                    for matrix in (*rows, *columns)[start : start + piece]:
                        matrix.evict()
                passed = _run(program, start, start + piece) / piece
                if turn >= 0:
                    samples[index].append(passed)
        rows_time, *columns_times = map(undisturbed, samples)
        return {
            rate: LayoutTimes(columns_time, rows_time, plan.layout)
            for rate, columns_time in zip(rates, columns_times, strict=True)
        }


def undisturbed(samples: Sequence[float]) -> float:
    """The lower quartile: other work on the machine only ever adds time, and in a few samples often to half of them."""
    return sorted(samples)[len(samples) // 4]


def set_bytes(meminfo: Path = _MEMINFO) -> int:
    """Bytes of the copies of one layout: 32 MiB, or a sixteenth of the memory that is available."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return _SET_BYTES
    return min(_SET_BYTES, available // _SET_SHARE)


def exceeds_caches(weights: int, caches: Path = _CACHES) -> bool:
    """Whether this many bytes of weights are more than the largest cache holds, as far as the system tells."""
    return weights > largest_cache(caches)


def largest_cache(caches: Path = _CACHES) -> int:
    """Bytes of the largest cache; 0 when the system does not tell."""
    return max((_cache_bytes(path) for path in caches.glob("index*/size")), default=0)


def _cache_bytes(path: Path) -> int:
    """Bytes in a line like "32768K"; 0 when it cannot be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
        return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0)
    except (OSError, ValueError):
        return 0


def _weights(members: Sequence[Candidate]) -> int:
    """Weights of a model's matrices of one shape."""
    return len(members) * members[0].skipped.inputs * members[0].skipped.outputs


def _activations(inputs: int, rate: float, *, positive: bool = False) -> NDArray[np.float32]:
    """Normal values with this fraction of zeros, the same on every run."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(inputs, np.float32)
    values[rng.permutation(inputs)[: round(rate * inputs)]] = 0
    return np.abs(values) if positive else values


def _run(program: _core.Program, first: int, last: int) -> float:
    """Seconds of some ops for one row."""
    zeros = np.zeros(1, np.int32)
    batch = (zeros, zeros, zeros, np.zeros(1, np.uint8), np.zeros(0, np.int32), np.zeros((1, 1), np.int32))
    begin = time.perf_counter()
    program.run(first, last, *batch)
    return time.perf_counter() - begin
