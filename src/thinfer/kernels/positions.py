"""Learned positions: y[t, :] = x[t, :] + table[position[t] + offset, :].

x [M, n], table [rows, n], positions int32 [M] -> y [M, n]; OPT's table has two rows before that of position 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thinfer.kernels.case import Case, Float32, Int32, normal


def reference(x: Float32, table: Float32, positions: Int32, offset: int) -> Float32:
    """Add a row of the table to each row; raises IndexError for a position outside the table."""
    return x + table[positions + offset]


def native(isa: str, x: Float32, table: Float32, positions: Int32, offset: int) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.positions(isa, x, table, positions, offset)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """First and last position, repeats, odd widths, with and without an offset."""
    for rows, width, offset, positions in ((8, 64, 0, [0, 7, 7, 3]), (10, 33, 2, [7]), (5, 1, 1, [3, 0])):
        x = normal(rng, len(positions), width)
        args = {"x": x, "table": normal(rng, rows, width), "positions": np.array(positions, np.int32), "offset": offset}
        yield Case(f"r{rows}n{width}", args, 0.0)
