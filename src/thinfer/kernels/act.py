"""Plain activation: y[t, j] = act(x[t, j]), between the two linears of an FFN without a gate.

x [M, n] -> y [M, n]; with `ids` neuron j goes to column ids[j] of a zeroed [M, width].
Acts: silu z/(1+e^-z), gelu z·Φ(z), its tanh approximation (gelu_pytorch_tanh, gelu_new, gelu_fast), relu max(z, 0),
relu2 max(z, 0)², fatrelu z where z > threshold and else 0 (Kurtz et al., ICML 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from thinfer.kernels.case import Case, Float32, normal


def _silu(z: Float32, _: float) -> Float32:
    # exp overflows to infinity for z far below zero, and z / inf is the right limit.
    with np.errstate(over="ignore"):
        y: Float32 = np.divide(z, 1 + np.exp(-z), dtype=np.float32)
    return y


def _gelu(z: Float32, _: float) -> Float32:
    erf = np.vectorize(math.erf, otypes=[np.float64])(z / math.sqrt(2))
    y: Float32 = np.multiply(0.5 * z, 1 + erf).astype(np.float32)
    return y


def _gelu_tanh(z: Float32, _: float) -> Float32:
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z * z * z)
    y: Float32 = np.multiply(0.5 * z, 1 + np.tanh(inner), dtype=np.float32)
    return y


def _relu(z: Float32, _: float) -> Float32:
    return np.maximum(z, np.float32(0))


def _relu2(z: Float32, _: float) -> Float32:
    return np.square(np.maximum(z, np.float32(0)))


def _fatrelu(z: Float32, threshold: float) -> Float32:
    # Not "z > threshold", so that NaN is kept.
    return np.where(z <= np.float32(threshold), np.float32(0), z)


ACTS: Mapping[str, Callable[[Float32, float], Float32]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "relu": _relu,
    "relu2": _relu2,
    "fatrelu": _fatrelu,
}

# What thinfer._core calls them, where it is something else.
_NATIVE_NAMES = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh")


def native_name(act: str) -> str:
    """What thinfer._core calls an activation."""
    return _NATIVE_NAMES.get(act, act)


def scatter(y: Float32, ids: Sequence[int] | None, width: int | None) -> Float32:
    """Column j of y [M, n] as column ids[j] of zeros [M, width]; y itself without them."""
    if ids is None or width is None:
        return y
    wide = np.zeros((len(y), width), np.float32)
    wide[:, list(ids)] = y
    return wide


def reference(
    x: Float32, act: str, threshold: float = 0.0, ids: Sequence[int] | None = None, width: int | None = None
) -> Float32:
    """Activate every value; `ids` and `width` go together."""
    return scatter(ACTS[act](x, threshold), ids, width)


def native(
    isa: str,
    x: Float32,
    act: str,
    threshold: float = 0.0,
    ids: Sequence[int] | None = None,
    width: int | None = None,
) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.act(isa, x, native_name(act), ids, width, threshold)
    return result


def extremes() -> Float32:
    """Values far out on both sides, zeros of both signs and NaN."""
    return np.array([[-200, -88, -30, -0.0, 0.0, 30, 88, 200, np.nan]], np.float32)


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Every act, odd widths, extreme values, NaN, a threshold that values equal, a scatter."""
    for act in ACTS:
        for rows, n in ((1, 64), (3, 7), (2, 1536)):
            yield Case(f"{act}_m{rows}n{n}", {"x": normal(rng, rows, n) * 4, "act": act}, 2e-6)
        yield Case(f"{act}_extremes", {"x": extremes(), "act": act}, 2e-6)
    x = np.array([[0.5, 0.25, -0.5, np.nextafter(np.float32(0.5), np.float32(1)), 3.0, np.inf, -np.inf]], np.float32)
    yield Case("fatrelu_at_threshold", {"x": x, "act": "fatrelu", "threshold": 0.5}, 0.0)
    args = {"x": normal(rng, 3, 5), "act": "relu2", "ids": (0, 3, 4, 31, 40), "width": 64}
    yield Case("scatter", args, 2e-6)
