"""Row selection: y[l, :] = x[rows[l], :], the rows whose logits are wanted.

x [M, n], rows int32 [L] -> y [L, n]; L may be 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thinfer.kernels.case import Case, Float32, Int32, normal


def reference(x: Float32, rows: Int32) -> Float32:
    """The chosen rows, in the order of `rows`."""
    return x[rows]


def native(isa: str, x: Float32, rows: Int32) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.select(isa, x, rows)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """No row, the last one, all of them."""
    for name, rows in (("none", []), ("last", [6]), ("all", list(range(7)))):
        yield Case(name, {"x": normal(rng, 7, 33), "rows": np.array(rows, np.int32)}, 0.0)
