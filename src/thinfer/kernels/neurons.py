"""Neurons of an FFN, only some of them: y[t, j] = act(gate_j · x[t]) · (up_j · x[t]) for j active in row t, else 0.

x [M, K], gate [N, K], up [N, K] -> y [M, N]; without up y[t, j] = act(gate_j · x[t]). Neuron j is active in row t
when `mask` [M, N] has it (no mask: all) and its activation is not 0; NaN is active. Deja Vu (arxiv.org/abs/2310.17157)
guesses the mask; ReLU models (arxiv.org/abs/2310.04564) need none, for what does not fire multiplies by an exact 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from thinfer.core.active_set import ActiveSet
from thinfer.kernels import gated_act, linear
from thinfer.kernels.act import native_name
from thinfer.kernels.case import Case, Float32, normal


def reference(
    x: Float32,
    gate: Float32,
    up: Float32 | None = None,
    act: str = "relu",
    threshold: float = 0.0,
    mask: NDArray[np.bool_] | None = None,
) -> Float32:
    """All neurons, then zeros where they are not active."""
    gates = linear.reference(x, [gate])
    ups = np.ones_like(gates) if up is None else linear.reference(x, [up])
    y = gated_act.reference(np.hstack([gates, ups]), act, threshold)
    active = gated_act.reference(np.hstack([gates, np.ones_like(gates)]), act, threshold) != 0
    return np.where(active if mask is None else active & mask, y, np.float32(0))


def native(
    isa: str,
    x: Float32,
    gate: Float32,
    up: Float32 | None = None,
    act: str = "relu",
    threshold: float = 0.0,
    mask: NDArray[np.bool_] | None = None,
) -> Float32:
    """The op on float32 weights, packed for this one call, on the named instruction set."""
    from thinfer import _core

    rows, width = x.shape
    pool, arena = _core.ThreadPool(1), _core.Arena()

    def pack(w: Float32) -> _core.PackedMatrix:
        part = (np.ascontiguousarray(w, np.float32).view(np.uint8).reshape(len(w), -1), "F32", None)
        return _core.PackedMatrix.pack([part], width, None, "neurons", 0, 1, pool, arena)

    program = _core.Program(isa, pool, rows)
    source, out = program.add_buffer(width), program.add_buffer(len(gate))
    lists = _core.NeuronLists()
    if mask is not None:
        active = ActiveSet.where(mask)
        lists.set(active.ids, active.offsets)
    name = native_name(act)
    program.op_neurons(
        source, out, name, threshold, "f32", None, pack(gate), None if up is None else pack(up), None, None, lists
    )
    program.buffer(source)[:] = x
    zeros = np.zeros(rows, np.int32)
    table, sparse = np.zeros((rows, 1), np.int32), np.zeros(rows, np.uint8)
    program.run(0, 1, zeros, zeros, np.arange(rows, dtype=np.int32), sparse, zeros[:0], table)
    result: Float32 = program.buffer(out).copy()
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Gated and plain, one and several rows, odd sizes, lists that are empty, full and different by row, NaN."""
    for rows, width, neurons in ((1, 64, 48), (3, 70, 37), (2, 256, 2100)):
        args = {"x": normal(rng, rows, width), "gate": normal(rng, neurons, width), "up": normal(rng, neurons, width)}
        name = f"m{rows}k{width}n{neurons}"
        yield Case(name, args, 2e-6)
        yield Case(f"plain_{name}", {"x": args["x"], "gate": args["gate"]}, 2e-6)
        for density in (0.0, 0.1, 1.0):
            mask = rng.random((rows, neurons)) < density
            yield Case(f"listed_{density}_{name}", args | {"mask": mask}, 2e-6)
            yield Case(f"listed_silu_{density}_{name}", args | {"mask": mask, "act": "silu"}, 2e-6)
            yield Case(f"listed_drelu_{density}_{name}", args | {"mask": mask, "act": "drelu"}, 2e-6)
            yield Case(f"plain_listed_{density}_{name}", {"x": args["x"], "gate": args["gate"], "mask": mask}, 2e-6)
    args = {"x": normal(rng, 2, 64), "gate": normal(rng, 40, 64), "up": normal(rng, 40, 64)}
    for act in ("relu2", "fatrelu", "drelu"):
        yield Case(act, args | {"act": act, "threshold": 3.0}, 2e-6)
    x = normal(rng, 2, 64)
    x[0] = 0
    x[1, 9] = np.nan
    yield Case("zero_and_nan_rows", {"x": x, "gate": normal(rng, 40, 64), "up": normal(rng, 40, 64)}, 2e-6)
