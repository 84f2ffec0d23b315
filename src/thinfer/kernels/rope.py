"""Rotary position embedding, the two halves of a head, or of its first channels, rotated against each other.

With angle a[t, i] = position[t] · inv_freq[i] and c the attention factor, for each q and k head of width d:
y[i] = c·(x[i]·cos a[i] - x[i + r]·sin a[i]), y[i + r] = c·(x[i + r]·cos a[i] + x[i]·sin a[i]),
where r is the number of frequencies; the channels from 2r on pass.

qkv [M, (heads + 2 kv_heads) d], positions int32 [M] -> same shape; values pass through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from thinfer.kernels.case import Case, Float32, Int32, normal


def angles(positions: Int32, inv_freq: Sequence[float], attention_factor: float) -> tuple[Float32, Float32]:
    """Cosines and sines [M, r], each times the attention factor.

    The angle is rounded to float32 as in transformers; its cosine and sine are computed in float64, so the result
    does not depend on a platform's float32 library.
    """
    angle = positions.astype(np.float32)[:, None] * np.asarray(inv_freq, np.float32)
    wide = angle.astype(np.float64)
    factor = np.float32(attention_factor)
    return np.cos(wide).astype(np.float32) * factor, np.sin(wide).astype(np.float32) * factor


def reference(
    qkv: Float32,
    *,
    positions: Int32,
    inv_freq: Sequence[float],
    attention_factor: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> Float32:
    """Rotate the q and k slices."""
    cos, sin = (table[:, None, :] for table in angles(positions, inv_freq, attention_factor))
    y = qkv.reshape(len(qkv), heads + 2 * kv_heads, head_dim).copy()
    half = len(inv_freq)
    a = y[:, : heads + kv_heads, :half].copy()
    b = y[:, : heads + kv_heads, half : 2 * half].copy()
    y[:, : heads + kv_heads, :half] = a * cos - b * sin
    y[:, : heads + kv_heads, half : 2 * half] = b * cos + a * sin
    return y.reshape(qkv.shape)


def native(isa: str, qkv: Float32, **args: Any) -> Float32:
    """The op on the named instruction set; arguments as for `reference`."""
    from thinfer import _core

    result: Float32 = _core.rope(isa, qkv, **args)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Position 0, far positions, grouped heads, small and odd half widths, a part of the head, an attention factor."""
    shapes = (
        (1, 1, 1, 2, 2, 1.0),
        (3, 4, 2, 32, 32, 1.0),
        (5, 3, 1, 6, 6, 1.25),
        (2, 9, 3, 64, 64, 1.0),
        (3, 4, 2, 32, 8, 1.0),
        (2, 2, 2, 80, 40, 1.5),
        (2, 2, 1, 7, 6, 1.0),
    )
    for rows, heads, kv_heads, d, turned, factor in shapes:
        positions = np.sort(rng.integers(0, 100_000, rows)).astype(np.int32)
        positions[0] = 0
        args = {
            "qkv": normal(rng, rows, (heads + 2 * kv_heads) * d),
            "positions": positions,
            "inv_freq": tuple(float(10000 ** (-2 * i / turned)) for i in range(turned // 2)),
            "attention_factor": factor,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": d,
        }
        yield Case(f"m{rows}h{heads}kv{kv_heads}d{d}r{turned}", args, 1e-6)
