"""Causal attention over a cache of keys and values in blocks, with grouped heads and an optional window.

Rows first write their k and v at slot block_table[sequence, position // B] · B + position % B; then for each row t
and head h with g = h // (heads / kv_heads): y[t, h] = Σ_p softmax_p(scale · q[t, h] · k[p, g]) v[p, g], over the
positions p of the row's sequence with position[t] - window < p <= position[t] (no lower bound without a window).
With slopes, slopes[h] · (p - position[t]) is added to a score (ALiBi, arxiv 2108.12409).

qkv [M, (heads + 2 kv_heads) d] -> y [M, heads · d]; keys and values [blocks, B, kv_heads, d] are changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from thinfer.kernels.case import Case, Float32, Int32, normal


def reference(
    qkv: Float32,
    *,
    keys: Float32,
    values: Float32,
    block_table: Int32,
    positions: Int32,
    sequence: Int32,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None,
    slopes: Sequence[float] | None = None,
) -> Float32:
    """Attend row by row, so that a row's result does not depend on the others' number."""
    rows, block = len(qkv), keys.shape[1]
    split = qkv.reshape(rows, heads + 2 * kv_heads, head_dim)
    queries = split[:, :heads].reshape(rows, kv_heads, heads // kv_heads, head_dim)
    blocks = block_table[sequence, positions // block]
    keys[blocks, positions % block] = split[:, heads : heads + kv_heads]
    values[blocks, positions % block] = split[:, heads + kv_heads :]

    slope = None if slopes is None else np.asarray(slopes, np.float32).reshape(kv_heads, -1, 1)
    y = np.empty((rows, kv_heads, heads // kv_heads, head_dim), np.float32)
    for s in np.unique(sequence):
        members = np.flatnonzero(sequence == s)
        used = block_table[s, : positions[members].max() // block + 1]
        k = keys[used].reshape(-1, kv_heads, head_dim).swapaxes(0, 1)
        v = values[used].reshape(-1, kv_heads, head_dim).swapaxes(0, 1)
        for t in members:
            last = int(positions[t]) + 1
            first = 0 if window is None else max(0, last - window)
            scores = np.float32(scale) * (queries[t] @ k[:, first:last].swapaxes(1, 2))
            if slope is not None:
                scores += slope * np.arange(first - last + 1, 1, dtype=np.float32)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            y[t] = (scores / scores.sum(axis=-1, keepdims=True)) @ np.ascontiguousarray(v[:, first:last])
    return y.reshape(rows, heads * head_dim)


def native(isa: str, qkv: Float32, **args: Any) -> Float32:
    """The op on the named instruction set with a float32 cache; arguments as for `reference`."""
    from thinfer import _core

    result: Float32 = _core.attention(isa, qkv, **args, kv_type="f32")
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Prefill, decode over full blocks, two sequences, windows shorter and longer than the context, ALiBi, NaN."""
    # name, sequences as (rows, first position), heads, kv_heads, head_dim, window
    shapes = (
        ("first_token", [(1, 0)], 4, 4, 16, None),
        ("prefill", [(7, 0)], 4, 2, 32, None),
        ("decode", [(1, 200)], 4, 1, 64, None),
        ("block_border", [(3, 62)], 6, 2, 8, None),
        ("chunk", [(16, 50)], 9, 3, 64, None),
        ("two_sequences", [(3, 70), (2, 10)], 4, 2, 32, None),
        ("window_inside", [(5, 90)], 4, 2, 32, 17),
        ("window_longer", [(5, 3)], 4, 2, 32, 100),
        ("window_one", [(2, 5)], 2, 1, 16, 1),
    )
    for name, members, heads, kv_heads, d, window in shapes:
        yield Case(name, _arguments(rng, members, heads=heads, kv_heads=kv_heads, head_dim=d, window=window), 2e-6)
    for name, members, window in (("alibi", [(3, 62), (2, 200)], None), ("alibi_window", [(2, 90)], 17)):
        args = _arguments(rng, members, heads=6, kv_heads=2, head_dim=16, window=window)
        yield Case(name, {**args, "slopes": (0.5, 0.25, 0.125, 0.0625, 0.7, 0.0)}, 4e-6)
    args = _arguments(rng, [(2, 9), (1, 4)], heads=4, kv_heads=2, head_dim=16, window=None)
    args["qkv"][1, 0] = np.nan
    yield Case("nan_query", args, 2e-6)


def _arguments(
    rng: np.random.Generator,
    members: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
) -> dict[str, Any]:
    per_sequence = 4
    total = len(members) * per_sequence
    rows = sum(count for count, _ in members)
    cache = (total, 64, kv_heads, head_dim)
    return {
        "qkv": normal(rng, rows, (heads + 2 * kv_heads) * head_dim),
        "keys": normal(rng, *cache),
        "values": normal(rng, *cache),
        # Blocks out of order, so that a kernel that forgets the table is found out.
        "block_table": rng.permutation(total).astype(np.int32).reshape(len(members), per_sequence),
        "positions": np.concatenate([np.arange(p, p + n, dtype=np.int32) for n, p in members]),
        "sequence": np.concatenate([np.full(n, s, np.int32) for s, (n, _) in enumerate(members)]),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "window": window,
    }
