"""Elementwise sum: y = a + b, all [M, n]."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thinfer.kernels.case import Case, Float32, normal


def reference(a: Float32, b: Float32) -> Float32:
    """The sum, one rounding."""
    return a + b


def native(isa: str, a: Float32, b: Float32) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.add(isa, a, b)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Odd sizes, infinities and NaN."""
    for rows, width in ((1, 1), (3, 7), (16, 576)):
        yield Case(f"m{rows}n{width}", {"a": normal(rng, rows, width), "b": normal(rng, rows, width)}, 0.0)
    a = np.array([[np.inf, np.nan, 0.0, 1.0]], np.float32)
    yield Case("not_finite", {"a": a, "b": np.ones_like(a)}, 0.0)
