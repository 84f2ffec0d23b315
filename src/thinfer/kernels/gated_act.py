"""Gated activation: y[t, j] = act(x[t, j]) · x[t, n + j], x being gate|up.

x [M, 2n] -> y [M, n]; with `ids` neuron j goes to column ids[j] of a zeroed [M, width].
Acts: those of the op act, and drelu, which is relu of the gate times relu of up (TurboSparse, arxiv 2406.05955).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from thinfer.kernels.act import ACTS, extremes, native_name, scatter
from thinfer.kernels.case import Case, Float32, normal

DRELU = "drelu"
GATED_ACTS = (*ACTS, DRELU)


def reference(
    gate_up: Float32, act: str, threshold: float = 0.0, ids: Sequence[int] | None = None, width: int | None = None
) -> Float32:
    """Activate the gate half and multiply with the up half; `ids` and `width` go together."""
    n = gate_up.shape[1] // 2
    gate, up = gate_up[:, :n], gate_up[:, n:]
    if act == DRELU:
        act, up = "relu", ACTS["relu"](up, 0.0)
    return scatter(ACTS[act](gate, threshold) * up, ids, width)


def native(
    isa: str,
    gate_up: Float32,
    act: str,
    threshold: float = 0.0,
    ids: Sequence[int] | None = None,
    width: int | None = None,
) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.gated_act(isa, gate_up, native_name(act), ids, width, threshold)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Every act, odd widths, extreme gates, NaN, a threshold, a scatter."""
    for act in GATED_ACTS:
        for rows, n in ((1, 64), (3, 7), (2, 1536)):
            yield Case(f"{act}_m{rows}n{n}", {"gate_up": normal(rng, rows, 2 * n) * 4, "act": act}, 2e-6)
        gate = extremes()
        yield Case(f"{act}_extremes", {"gate_up": np.hstack([gate, np.ones_like(gate)]), "act": act}, 2e-6)
    yield Case("fatrelu_threshold", {"gate_up": normal(rng, 3, 96), "act": "fatrelu", "threshold": 0.4}, 2e-6)
    args = {"gate_up": normal(rng, 3, 10), "act": "silu", "ids": (0, 3, 4, 31, 40), "width": 64}
    yield Case("scatter", args, 2e-6)
