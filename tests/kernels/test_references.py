"""The NumPy references against torch and against the equations in float64."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from thinfer.kernels import attention, gated_act, linear, rms_norm, rope


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.mark.parametrize(
    ("act", "torch_act"),
    [
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_pytorch_tanh", lambda z: functional.gelu(z, approximate="tanh")),
        ("relu", functional.relu),
    ],
)
def test_gated_act_against_torch(act, torch_act):
    z = np.linspace(-30, 30, 2001, dtype=np.float32)[None]
    y = gated_act.reference(np.hstack([z, np.ones_like(z)]), act)
    np.testing.assert_allclose(y, torch_act(torch.from_numpy(z)).numpy(), rtol=2e-6, atol=2e-6)


def test_scatter_leaves_other_columns_zero():
    y = gated_act.reference(np.array([[1.0, 2.0, 3.0, 4.0]], np.float32), "relu", ids=(3, 1), width=5)
    assert y.tolist() == [[0, 8, 0, 3, 0]]


def test_rms_norm_of_a_nan_row_leaves_the_others(rng):
    x = rng.standard_normal((3, 33), dtype=np.float32)
    clean = rms_norm.reference(x, np.ones(33, np.float32), 1e-6)
    x[1, 0] = np.nan
    y = rms_norm.reference(x, np.ones(33, np.float32), 1e-6)
    assert np.isnan(y[1]).all()
    np.testing.assert_array_equal(y[[0, 2]], clean[[0, 2]])


def test_linear_against_float64(rng):
    x, w = rng.standard_normal((5, 96)), rng.standard_normal((40, 96))
    y = linear.reference(x.astype(np.float32), [w[:30].astype(np.float32), w[30:].astype(np.float32)])
    np.testing.assert_allclose(y, x @ w.T, atol=1e-5)


@pytest.mark.parametrize(("width", "outputs"), [(64, 160), (576, 1536), (1530, 33), (8960, 5)])
def test_linear_rows_are_independent(rng, width, outputs):
    x, w = rng.standard_normal((70, width), dtype=np.float32), rng.standard_normal((outputs, width), dtype=np.float32)
    whole = linear.reference(x, [w])
    for rows in (slice(0, 1), slice(69, 70), slice(3, 5), slice(1, 24), slice(5, 69)):
        np.testing.assert_array_equal(linear.reference(x[rows], [w]), whole[rows])
    assert linear.reference(x[:0], [w]).shape == (0, outputs)


def test_quantize_rows_properties(rng):
    x = rng.standard_normal((4, 96), dtype=np.float32) * np.float32(3)
    x[2, 32:64] = 0
    codes, step = linear.quantize_rows(x)
    groups = x.reshape(4, 3, 32)
    assert codes.dtype == np.int8
    assert np.abs(codes).max(axis=2)[groups.any(axis=2)].min() == 127
    assert step[2, 1] == 0
    assert not codes[2, 1].any()
    assert (np.abs(codes * step[..., None] - groups) <= step[..., None] / 2 * 1.0001).all()


def test_quantize_rows_rounds_half_to_even():
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = [127, 0.5, 1.5, -2.5]
    assert linear.quantize_rows(x)[0][0, 0, :4].tolist() == [127, 0, 2, -2]


def test_int8_reference_is_the_product_of_rounded_values(rng):
    x = rng.standard_normal((3, 64), dtype=np.float32)
    codes = rng.integers(0, 16, (10, 64)).astype(np.int8)
    scale, minimum = (rng.standard_normal((10, 2), dtype=np.float32) for _ in range(2))
    bias = rng.standard_normal(10, dtype=np.float32)
    q, step = linear.quantize_rows(x)
    rounded = (q * step[..., None].astype(np.float64)).reshape(3, 64)
    w = (codes.reshape(10, 2, 32) * scale[..., None].astype(np.float64) + minimum[..., None]).reshape(10, 64)
    y = linear.reference_int8(x, codes, scale, minimum, bias)
    np.testing.assert_allclose(y, rounded @ w.T + bias, rtol=1e-5, atol=1e-4)


def test_int8_reference_keeps_nan_in_its_row(rng):
    x = rng.standard_normal((2, 32), dtype=np.float32)
    x[0, 3] = np.nan
    y = linear.reference_int8(x, np.ones((4, 32), np.int8), np.ones((4, 1), np.float32))
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_rope_keeps_norms_and_values(rng):
    qkv = rng.standard_normal((3, (4 + 2 * 2) * 8), dtype=np.float32)
    positions = np.array([0, 1, 999], np.int32)
    y = rope.reference(
        qkv, positions=positions, inv_freq=(1, 0.3, 0.1, 0.01), attention_factor=1.0, heads=4, kv_heads=2, head_dim=8
    )
    np.testing.assert_array_equal(y[0], qkv[0])
    np.testing.assert_array_equal(y[:, 48:], qkv[:, 48:])
    heads = (3, 8, 8)
    np.testing.assert_allclose(
        np.linalg.norm(y.reshape(heads), axis=2), np.linalg.norm(qkv.reshape(heads), axis=2), 1e-5
    )


@pytest.mark.parametrize("window", [None, 1, 7])
def test_attention_against_torch(rng, window):
    rows, heads, kv_heads, d = 75, 6, 2, 16
    qkv = rng.standard_normal((rows, (heads + 2 * kv_heads) * d), dtype=np.float32)
    split = torch.from_numpy(qkv).reshape(rows, heads + 2 * kv_heads, d).transpose(0, 1)
    q, k, v = split.split([heads, kv_heads, kv_heads])
    distance = torch.arange(rows)[:, None] - torch.arange(rows)
    mask = (distance >= 0) & (distance < (window or rows))
    k, v = k.repeat_interleave(heads // kv_heads, 0), v.repeat_interleave(heads // kv_heads, 0)
    expected = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)

    cache = [np.full((3, 64, kv_heads, d), np.nan, np.float32) for _ in range(2)]
    parts = []
    for first, last in ((0, 1), (1, 60), (60, rows)):
        y = attention.reference(
            qkv[first:last],
            keys=cache[0],
            values=cache[1],
            block_table=np.array([[2, 0]], np.int32),
            positions=np.arange(first, last, dtype=np.int32),
            sequence=np.zeros(last - first, np.int32),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=d,
            scale=0.3,
            window=window,
        )
        parts.append(y)
    np.testing.assert_allclose(
        np.concatenate(parts), expected.transpose(0, 1).reshape(rows, -1).numpy(), rtol=1e-5, atol=2e-6
    )
    assert np.isnan(cache[0][1]).all()
