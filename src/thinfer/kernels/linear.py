"""Linear layer over one or more weights that share an input: y[t, o] = b[o] + Σ_i W[o, i] · x[t, i].

x [M, K], weights W_1 [N_1, K] .. W_n [N_n, K] -> y [M, N_1 + .. + N_n], outputs in the order of the weights.
With int8 activations each row of x is first rounded per group of 32 inputs: d = max|x| / 127, q = round(x / d).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from thinfer.kernels.case import Case, Float32, normal

GROUP = 32


def reference(x: Float32, weights: Sequence[Float32], biases: Sequence[Float32 | None] = ()) -> Float32:
    """The product in float32; a row of the result does not depend on the other rows of x.

    One product a row: how a matrix product rounds a row may depend on the shape, and on the row's place in it.
    """
    y = np.empty((len(x), sum(len(w) for w in weights)), np.float32)
    left = 0
    for w, bias in zip(weights, biases or [None] * len(weights), strict=True):
        part = y[:, left : left + len(w)]
        for row, result in zip(x, part, strict=True):
            np.matmul(w, row, out=result)
        if bias is not None:
            part += bias
        left += len(w)
    return y


def native(isa: str, x: Float32, weights: Sequence[Float32], biases: Sequence[Float32 | None] = ()) -> Float32:
    """The op on float32 weights, packed for this one call, on the named instruction set."""
    from thinfer import _core

    rows, width = x.shape
    pool, arena = _core.ThreadPool(1), _core.Arena()
    matrices = []
    for w in weights:
        part = (np.ascontiguousarray(w, np.float32).view(np.uint8).reshape(len(w), -1), "F32", None)
        matrices.append(_core.PackedMatrix.pack([part], width, None, "columns", GROUP * 2, 1, pool, arena))
    bias = None
    if any(b is not None for b in biases):
        bias = np.concatenate(
            [np.zeros(len(w), np.float32) if b is None else b for w, b in zip(weights, biases, strict=True)]
        )
    program = _core.Program(isa, pool, rows)
    source, out = program.add_buffer(width), program.add_buffer(sum(len(w) for w in weights))
    program.op_linear(source, out, matrices, bias, "f32")
    program.buffer(source)[:] = x
    zeros = np.zeros(rows, np.int32)
    table, sparse = np.zeros((rows, 1), np.int32), np.zeros(rows, np.uint8)
    program.run(0, 1, zeros, zeros, np.arange(rows, dtype=np.int32), sparse, zeros[:0], table)
    result: Float32 = program.buffer(out).copy()
    return result


def quantize_rows(x: Float32) -> tuple[NDArray[np.int8], Float32]:
    """Round x [M, K] to int8 per group of 32 along K (K a multiple of 32): codes [M, K/32, 32], steps d [M, K/32].

    d = max|x| / 127 and codes are x / d rounded to nearest, ties to even, within ±127; a group of zeros has d = 0.
    NaN in a group makes its d NaN, so that the product is NaN too.
    """
    groups = x.reshape(len(x), -1, GROUP)
    step = (np.max(np.abs(groups), axis=2) / np.float32(127)).astype(np.float32)
    safe = np.where(step > 0, step, np.float32(1))[..., None]
    codes = np.clip(np.rint(groups / safe), -127, 127)
    return np.nan_to_num(codes).astype(np.int8), step


def reference_int8(
    x: Float32, codes: NDArray[np.int8], scale: Float32, minimum: Float32 | None = None, bias: Float32 | None = None
) -> Float32:
    """Product of int8-rounded rows with a quantised weight W = scale · code + minimum, exact inside a group.

    x [M, K]; codes [N, K]; scale and minimum [N, K/32]. Sums groups in ascending order, as the native kernels do:
    y[t, o] = Σ_g d[t, g] · (scale[o, g] · Σ_i q·code + minimum[o, g] · Σ_i q).
    """
    q, step = quantize_rows(x)
    wide = q.astype(np.int32)
    w = codes.reshape(len(codes), -1, GROUP).astype(np.int32)
    y = np.zeros((len(x), len(codes)), np.float32)
    for g in range(w.shape[1]):
        dot = (wide[:, g] @ w[:, g].T).astype(np.float32)
        term = scale[:, g] * dot
        if minimum is not None:
            term += minimum[:, g] * wide[:, g].sum(axis=1, keepdims=True).astype(np.float32)
        y += step[:, g, None] * term
    return y if bias is None else y + bias


def cases(rng: np.random.Generator) -> Iterator[Case]:
    """One to three weights, odd sizes, biases, all-zero and NaN rows, many and single rows."""
    shapes = ((1, 64, (64,)), (2, 64, (96, 32, 32)), (7, 96, (7, 5)), (17, 576, (33,)), (1, 1536, (576,)))
    for rows, width, outputs in shapes:
        weights = [normal(rng, n, width) for n in outputs]
        yield Case(f"m{rows}k{width}w{len(outputs)}", {"x": normal(rng, rows, width), "weights": weights}, 2e-6)
    weights = [normal(rng, 64, 64), normal(rng, 32, 64)]
    biases = [normal(rng, 64), None]
    yield Case("bias", {"x": normal(rng, 3, 64), "weights": weights, "biases": biases}, 2e-6)
    x = normal(rng, 3, 64)
    x[0] = 0
    x[1, 9] = np.nan
    yield Case("zero_and_nan_rows", {"x": x, "weights": weights}, 2e-6)
