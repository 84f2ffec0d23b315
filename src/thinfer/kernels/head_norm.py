"""RMS norm of every query and key head (Qwen3): each head of width d is normalised over d; values pass through.

qkv [M, (heads + 2 kv_heads) d], q_norm [d], k_norm [d] -> same shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from thinfer.kernels import rms_norm
from thinfer.kernels.case import Case, Float32, normal


def reference(
    qkv: Float32, *, q_norm: Float32, k_norm: Float32, eps: float, heads: int, kv_heads: int, head_dim: int
) -> Float32:
    """Normalise the q and k slices head by head."""
    y = qkv.reshape(len(qkv), heads + 2 * kv_heads, head_dim).copy()
    y[:, :heads] = rms_norm.reference(y[:, :heads], q_norm, eps)
    y[:, heads : heads + kv_heads] = rms_norm.reference(y[:, heads : heads + kv_heads], k_norm, eps)
    return y.reshape(qkv.shape)


def native(isa: str, qkv: Float32, **args: Any) -> Float32:
    """The op on the named instruction set; arguments as for `reference`."""
    from thinfer import _core

    result: Float32 = _core.head_norm(isa, qkv, **args)
    return result


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """Grouped and equal heads, odd head widths, zero rows."""
    for rows, heads, kv_heads, d in ((1, 4, 4, 16), (5, 4, 2, 32), (2, 3, 1, 6)):
        args = {
            "qkv": normal(rng, rows, (heads + 2 * kv_heads) * d),
            "q_norm": normal(rng, d),
            "k_norm": normal(rng, d),
            "eps": 1e-6,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": d,
        }
        yield Case(f"m{rows}h{heads}kv{kv_heads}d{d}", args, 1e-6)
    yield Case("zeros", {**args, "qkv": np.zeros_like(args["qkv"])}, 1e-6)
