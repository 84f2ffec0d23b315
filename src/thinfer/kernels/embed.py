"""Token embedding: y[t, :] = table[token[t], :].

table [vocab, hidden], tokens int32 [M] -> y [M, hidden].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thinfer.kernels.case import Case, Float32, Int32, normal


def reference(table: Float32, tokens: Int32) -> Float32:
    """Rows of the table; raises IndexError for a token outside the vocabulary."""
    return table[tokens]


def native(isa: str, table: Float32, tokens: Int32) -> Float32:
    """The op on the named instruction set; equal to `reference` within the cases' tolerance."""
    from thinfer import _core

    result: Float32 = _core.embed(isa, table, tokens)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """First and last token, repeats, odd widths."""
    for vocab, hidden, tokens in ((8, 64, [0, 7, 7, 3]), (33, 7, [32]), (5, 1, [4, 0])):
        args = {"table": normal(rng, vocab, hidden), "tokens": np.array(tokens, np.int32)}
        yield Case(f"v{vocab}h{hidden}", args, 0.0)
