"""Gated activation: y[t, j] = act(x[t, j]) · x[t, n + j], x being gate|up.

x [M, 2n] -> y [M, n]; with `ids` neuron j goes to column ids[j] of a zeroed [M, width].
Acts: silu z/(1+e^-z), gelu z·Φ(z), gelu_pytorch_tanh (its tanh approximation), relu max(z, 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from thinfer.kernels.case import Case, Float32, normal


def _silu(z: Float32) -> Float32:
    # exp overflows to infinity for z far below zero, and z / inf is the right limit.
    with np.errstate(over="ignore"):
        y: Float32 = np.divide(z, 1 + np.exp(-z), dtype=np.float32)
    return y


def _gelu(z: Float32) -> Float32:
    erf = np.vectorize(math.erf, otypes=[np.float64])(z / math.sqrt(2))
    y: Float32 = np.multiply(0.5 * z, 1 + erf).astype(np.float32)
    return y


def _gelu_tanh(z: Float32) -> Float32:
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)
    y: Float32 = np.multiply(0.5 * z, 1 + np.tanh(inner), dtype=np.float32)
    return y


def _relu(z: Float32) -> Float32:
    return np.maximum(z, np.float32(0))


ACTS: Mapping[str, Callable[[Float32], Float32]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": _relu,
}

# What thinfer._core calls them.
NATIVE_NAMES: Mapping[str, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def reference(gate_up: Float32, act: str, ids: Sequence[int] | None = None, width: int | None = None) -> Float32:
    """Activate the gate half and multiply with the up half; `ids` and `width` go together."""
    n = gate_up.shape[1] // 2
    y = ACTS[act](gate_up[:, :n]) * gate_up[:, n:]
    if ids is None or width is None:
        return y
    scattered = np.zeros((len(y), width), np.float32)
    scattered[:, list(ids)] = y
    return scattered


def native(isa: str, gate_up: Float32, act: str, ids: Sequence[int] | None = None, width: int | None = None) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.gated_act(isa, gate_up, NATIVE_NAMES[act], ids, width)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Every act, odd widths, extreme gates, NaN, a scatter."""
    for act in ACTS:
        for rows, n in ((1, 64), (3, 7), (2, 1536)):
            yield Case(f"{act}_m{rows}n{n}", {"gate_up": normal(rng, rows, 2 * n) * 4, "act": act}, 2e-6)
        gate = np.array([[-200, -88, -30, -0.0, 0.0, 30, 88, 200, np.nan]], np.float32)
        yield Case(f"{act}_extremes", {"gate_up": np.hstack([gate, np.ones_like(gate)]), "act": act}, 2e-6)
    args = {"gate_up": normal(rng, 3, 10), "act": "silu", "ids": (0, 3, 4, 31, 40), "width": 64}
    yield Case("scatter", args, 2e-6)
