"""Root mean square norm: y[t, i] = w[i] * x[t, i] / sqrt(mean_i(x[t, i]^2) + eps).

x [M, n], w [n] -> y [M, n].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thinfer.kernels.case import Case, Float32, normal


def reference(x: Float32, weight: Float32, eps: float) -> Float32:
    """Normalise each row; NaN in a row makes that row NaN and no other."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    inverse = np.reciprocal(np.sqrt(mean + np.float32(eps)), dtype=np.float32)
    return weight * (x * inverse)


def native(isa: str, x: Float32, weight: Float32, eps: float) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.rms_norm(isa, x, weight, eps)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Odd widths, zero rows (eps alone counts), tiny and large values, NaN in one row."""
    for rows, width in ((1, 1), (3, 7), (2, 64), (5, 576), (1, 1537)):
        args = {"x": normal(rng, rows, width), "weight": normal(rng, width), "eps": 1e-5}
        yield Case(f"m{rows}n{width}", args, 1e-6)
    weight = normal(rng, 96)
    zero = np.zeros((2, 96), np.float32)
    yield Case("zeros", {"x": zero, "weight": weight, "eps": 1e-6}, 1e-6)
    for name, scale in (("tiny", 1e-20), ("large", 1e15)):
        x = normal(rng, 2, 96) * np.float32(scale)
        yield Case(name, {"x": x, "weight": weight, "eps": 1e-6}, 1e-6)
    x = normal(rng, 3, 96)
    x[1, 5] = np.nan
    yield Case("nan_row", {"x": x, "weight": weight, "eps": 1e-6}, 1e-6)
