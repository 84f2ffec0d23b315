"""Layer norm: y[t, i] = w[i] · (x[t, i] - mean(x[t])) / sqrt(variance(x[t]) + eps) + b[i] (arxiv 1607.06450).

x [M, n], w [n], b [n] -> y [M, n]; the variance is the mean of squared differences.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thinfer.kernels.case import Case, Float32, normal


def reference(x: Float32, weight: Float32, bias: Float32, eps: float) -> Float32:
    """Normalise each row; NaN in a row makes that row NaN and no other."""
    difference = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
    variance = np.mean(np.square(difference), axis=-1, keepdims=True, dtype=np.float32)
    inverse = np.reciprocal(np.sqrt(variance + np.float32(eps)), dtype=np.float32)
    return weight * (difference * inverse) + bias


def native(isa: str, x: Float32, weight: Float32, bias: Float32, eps: float) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.layer_norm(isa, x, weight, bias, eps)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Odd widths, equal values (eps alone counts), an offset, tiny and large values, NaN in one row."""
    for rows, width in ((1, 1), (3, 7), (2, 64), (5, 576), (1, 1537)):
        args = {"x": normal(rng, rows, width), "weight": normal(rng, width), "bias": normal(rng, width), "eps": 1e-5}
        yield Case(f"m{rows}n{width}", args, 2e-6)
    weight, bias = normal(rng, 96), normal(rng, 96)
    yield Case("equal", {"x": np.ones((2, 96), np.float32), "weight": weight, "bias": bias, "eps": 1e-6}, 1e-6)
    # Differences keep 20 of their 24 bits.
    offset = normal(rng, 2, 96) + np.float32(8)
    yield Case("offset", {"x": offset, "weight": weight, "bias": bias, "eps": 1e-6}, 1e-5)
    for name, scale in (("tiny", 1e-18), ("large", 1e15)):
        x = normal(rng, 2, 96) * np.float32(scale)
        yield Case(name, {"x": x, "weight": weight, "bias": bias, "eps": 1e-6}, 2e-6)
    x = normal(rng, 3, 96)
    x[1, 5] = np.nan
    yield Case("nan_row", {"x": x, "weight": weight, "bias": bias, "eps": 1e-6}, 2e-6)
