"""The linear op: values against the gguf package in float64, and the same bits however it is computed."""

from functools import cache

import gguf
import numpy as np
import pytest

pytest.importorskip("thinfer._core")

from native.linear_op import (
    FLOATS,
    QUANTISED,
    TYPES,
    Linear,
    dequantise,
    layouts,
    pack,
    read_back,
    steps,
    weights,
)
from thinfer.kernels.linear import quantize_rows

OUTPUTS, INPUTS = 150, 1024
SEGMENTS = (1, 3, 4)


def activations(rows=16, inputs=INPUTS, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, inputs), np.float32)


def rounded(x):
    """x as the int8 path sees it, in float64; a group with NaN or infinity is NaN."""
    q, step = quantize_rows(x)
    return (q * step[..., None].astype(np.float64)).reshape(x.shape)


@cache
def packed(stored, layout, chunk, segments):
    return pack([(weights(stored)[0], stored)], INPUTS, layout, chunk, segments)


def linear(isa, stored, layout, chunk, segments=1, **options):
    return Linear(isa, [packed(stored, layout, chunk, segments)], INPUTS, OUTPUTS, **options)


# ---- values


@pytest.mark.parametrize("stored", TYPES)
def test_packed_rows_are_exactly_what_gguf_decodes(stored):
    """Exactly: the products d * (q - offset) + m are done in the package's order, each step rounded once."""
    raw, values = weights(stored)
    other, other_values = weights(stored, 70, seed=1)
    order = np.random.default_rng(2).permutation(OUTPUTS)[:101].astype(np.int32)
    expected = np.concatenate([values[order], other_values])
    for layout, chunk in layouts(stored):
        matrix = pack([(raw, stored, order), (other, stored)], INPUTS, layout, chunk)
        np.testing.assert_array_equal(read_back(matrix, 171), expected)
        assert (matrix.layout, matrix.segments) == (layout, 1)
        np.testing.assert_array_equal(read_back(matrix.copy(), 171), expected)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize(("codec", "kind"), [("i8_d", "Q8_0"), ("u4_dm", "Q4_1"), ("f16", "F16")])
def test_float_types_are_requantised_as_gguf_does(stored, codec, kind):
    raw, values = weights(stored)
    values = values.copy()
    values[3, :32] = 0
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[stored]).view(np.uint8).reshape(OUTPUTS, -1)
    expected = dequantise(gguf.quantize(values, gguf.GGMLQuantizationType[kind]), kind)
    for layout, chunk in layouts(kind):
        matrix = pack([(raw, stored)], INPUTS, layout, chunk, codec=codec)
        assert matrix.codec == codec
        np.testing.assert_array_equal(read_back(matrix, OUTPUTS), expected)


@pytest.mark.parametrize("stored", TYPES)
def test_float_mode_is_the_product(isa, stored):
    w, x = weights(stored)[1].astype(np.float64), activations(3)
    expected, size = x @ w.T, np.abs(x) @ np.abs(w).T
    for layout, chunk in layouts(stored):
        y = linear(isa, stored, layout, chunk, activations="f32")(x)
        assert (np.abs(y - expected) <= 2e-6 * size).all()


@pytest.mark.parametrize("stored", QUANTISED)
def test_int8_mode_is_the_product_of_rounded_activations(isa, stored):
    w = weights(stored)[1].astype(np.float64)
    x = np.concatenate([steps(np.random.default_rng(3), 3, INPUTS), activations(3)])
    z = rounded(x)
    np.testing.assert_array_equal(z[:3], x[:3])
    expected, size = z @ w.T, np.abs(z) @ np.abs(w).T
    for layout, chunk in layouts(stored):
        for segments in (1, 4):
            op = linear(isa, stored, layout, chunk, segments)
            for y in (op(x), op.one_by_one(x)):
                assert (np.abs(y - expected) <= 1e-6 * size).all()


@pytest.mark.parametrize("stored", ["Q4_0", "Q5_0", "Q6_K", "Q8_0"])
def test_long_rows_and_wide_slices_are_cut_into_the_same_values(isa, stored):
    """2560 inputs are two items to quantise, 1100 outputs several parts of a slice, 2200 two items to add up."""
    inputs, outputs = 2560, 1100
    (raw, w), (other, v) = weights(stored, outputs, inputs), weights(stored, outputs, inputs, seed=1)
    rng = np.random.default_rng(7)
    scale = rng.uniform(0.5, 2, inputs).astype(np.float32)
    bias = rng.standard_normal(2 * outputs).astype(np.float32)
    x = steps(rng, 17, inputs)
    z = np.where(np.abs(x) * scale > 0.7, x, np.float32(0)).astype(np.float64)
    w = np.concatenate([w, v]).astype(np.float64)
    expected, size = z @ w.T + bias, np.abs(z) @ np.abs(w).T + np.abs(bias)
    for segments in (1, 3):
        results, reads = [], []
        for layout, chunk in (("rows", 0), ("columns", 1024), ("columns", 320), ("columns", 576)):
            matrices = [pack([(part, stored)], inputs, layout, chunk, segments) for part in (raw, other)]
            for threads in (1, 3):
                op = Linear(isa, matrices, inputs, 2 * outputs, threads=threads, bias=bias).threshold(0.7, scale)
                op.program.take_counters()
                results.append(op.one_by_one(x))
                (counter,) = op.program.take_counters()
                assert counter.channels_active == np.count_nonzero(z)
                reads.append(counter.bytes_read)
                results += [op(x), np.concatenate([op(x[:3]), op(x[3:])])]
            assert reads[-1] == reads[-2]
        assert (np.abs(results[0] - expected) <= 1e-6 * size).all()
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("stored", "chunk"), [("Q4_0", 2048), ("Q4_K", 4096), ("Q5_0", 8192), ("Q6_K", 4096), ("Q8_0", 1024)]
)
def test_a_line_left_free_among_channels_of_whole_kib_changes_nothing(isa, stored, chunk):
    """It keeps them out of the same cache sets, and costs one line in at least 4 KiB."""
    inputs, outputs = 512, chunk + 64
    raw, w = weights(stored, outputs, inputs)
    x = steps(np.random.default_rng(3), 17, inputs)
    rows, columns = (pack([(raw, stored)], inputs, layout, size) for layout, size in (("rows", 0), ("columns", chunk)))
    assert rows.nbytes < columns.nbytes <= (1 + 64 / 4096) * rows.nbytes
    np.testing.assert_array_equal(read_back(columns, outputs), w)
    ops = [Linear(isa, [matrix], inputs, outputs).threshold(0.7) for matrix in (rows, columns)]
    for batch in (x[:1], x[:3], x):
        np.testing.assert_array_equal(*(op(batch) for op in ops))


def extreme(stored, level):
    """Rows whose quants are all at their lowest (0) or highest (1) and whose scales are powers of two."""
    fill = 0xFF if level else 0
    d, m = (np.array([v], np.float16).tobytes() for v in (0.5, -0.25))
    k_scales = bytes([1] * 8 + [0x11] * 4)
    block = {
        "Q8_0": d + bytes([0x7F if level else 0x80] * 32),
        "Q4_0": d + bytes([fill] * 16),
        "Q4_1": d + m + bytes([fill] * 16),
        "Q5_0": d + bytes([fill] * 20),
        "Q5_1": d + m + bytes([fill] * 20),
        "Q4_K": d + d + k_scales + bytes([fill] * 128),
        "Q5_K": d + d + k_scales + bytes([fill] * 160),
        "Q6_K": bytes([fill] * 192) + bytes([1] * 16) + d,
    }[stored]
    per_block = 256 if stored.endswith("_K") else 32
    return np.frombuffer(block * (512 // per_block), np.uint8)


@pytest.mark.parametrize("stored", QUANTISED)
def test_worst_case_values_do_not_saturate(isa, stored):
    """Exactly: every product and sum here is a whole number of 1/8 below 2^24/8."""
    rng = np.random.default_rng(4)
    raw = np.stack([extreme(stored, row % 2) for row in range(130)])
    w = dequantise(raw, stored).astype(np.float64)
    assert len(np.unique(w)) == 2
    signs = np.stack(
        [
            np.ones(512),
            -np.ones(512),
            np.tile([1, -1], 256),
            np.tile([1, 1, -1, -1], 128),
            np.tile([1, 1, 1, 1, -1, -1, -1, -1], 64),
            rng.choice([-1, 1], 512),
            rng.choice([-1, 0, 1], 512),
        ]
    )
    signs[-1, ::32] = 1
    x = (signs * 127).astype(np.float32)
    expected = x @ w.T
    for layout, chunk in layouts(stored):
        op = Linear(isa, [pack([(raw, stored)], 512, layout, chunk)], 512, 130)
        np.testing.assert_array_equal(op(x), expected)
        np.testing.assert_array_equal(op.one_by_one(x), expected)


# ---- bits


@cache
def expected_bits(stored, segments, mode, value):
    """What the portable build makes of each row alone, one thread, dense layout; rows masked beforehand."""
    x = activations(17)
    if value >= 0:
        x = np.where(np.abs(x) <= np.float32(value), np.float32(0), x)
    return linear("scalar", stored, *layouts(stored)[0], segments, activations=mode).one_by_one(x)


@pytest.mark.parametrize("mode", ["int8", "f32"])
@pytest.mark.parametrize("stored", TYPES)
def test_layouts_rows_threads_and_instruction_sets_change_no_bit(isa, stored, mode):
    x = activations(17)
    for segments in SEGMENTS if mode == "int8" and stored not in FLOATS else (1,):
        expected = expected_bits(stored, segments, mode, -1.0)
        for layout, chunk in layouts(stored):
            for rows, threads in ((1, 1), (1, 2), (1, 3), (2, 3), (7, 2), (16, 1), (17, 2)):
                y = linear(isa, stored, layout, chunk, segments, activations=mode, threads=threads)(x[:rows])
                assert y.tobytes() == expected[:rows].tobytes(), (layout, chunk, segments, rows, threads)


@pytest.mark.parametrize("stored", ["Q4_1", "Q6_K", "F16"])
def test_more_rows_than_a_tile_keeps(isa, stored):
    x = activations(131)
    for layout, chunk in layouts(stored)[:2]:
        op = linear(isa, stored, layout, chunk, 3 if stored in QUANTISED else 1, threads=2)
        assert op(x)[[0, 127, 128, 130]].tobytes() == op.one_by_one(x[[0, 127, 128, 130]]).tobytes()


@pytest.mark.parametrize("mode", ["int8", "f32"])
@pytest.mark.parametrize("stored", TYPES)
def test_thresholds_equal_masked_rows(isa, stored, mode):
    """Sparse and dense rows mixed; the skipping kernels and the dense ones see the same zeros."""
    x, value = activations(17), 0.7
    sparse = np.arange(17) % 3 != 1
    sparse[:2] = True, False
    segments = 3 if mode == "int8" and stored not in FLOATS else 1
    masked, dense = (expected_bits(stored, segments, mode, t) for t in (value, -1.0))
    expected = np.where(sparse[:, None], masked, dense)
    assert (masked != dense).any(axis=1).all()
    for layout, chunk in layouts(stored):
        for threads in (1, 3):
            op = linear(isa, stored, layout, chunk, segments, activations=mode, threads=threads).threshold(value)
            for rows in (1, 2, 7, 17):
                assert op(x[:rows], sparse[:rows]).tobytes() == expected[:rows].tobytes(), (layout, chunk, rows)
            assert op.one_by_one(x, sparse).tobytes() == expected.tobytes(), (layout, chunk)
            assert op.threshold(-1.0)(x[:7]).tobytes() == dense[:7].tobytes()


@pytest.mark.parametrize("mode", ["int8", "f32"])
def test_channel_scales_weigh_the_threshold(isa, mode):
    rng = np.random.default_rng(6)
    scale = rng.uniform(0, 3, INPUTS).astype(np.float32)
    scale[::50] = 0
    x = activations(7)
    x[0, 10] = 0.5 / scale[10]
    masked = np.where(np.abs(x) * scale <= np.float32(0.5), np.float32(0), x)
    for stored, (layout, chunk) in [("Q4_1", ("rows", 0)), ("Q6_K", ("columns", 64)), ("Q5_0", ("columns", 128))]:
        op = linear(isa, stored, layout, chunk, 2, activations=mode)
        expected = op(masked)
        op.threshold(0.5, scale)
        assert op(x).tobytes() == expected.tobytes()
        assert op.one_by_one(x).tobytes() == expected.tobytes()
        assert op(x, sparse=False).tobytes() != expected.tobytes()
        # A scale of one on every channel is no scale.
        assert op.threshold(0.5, np.ones(INPUTS, np.float32))(x).tobytes() == op.threshold(0.5)(x).tobytes()


def with_active(rng, rows, count, inputs=INPUTS):
    """Rows in which `count` channels are above 1 and the others below 0.1."""
    x = rng.uniform(-0.1, 0.1, (rows, inputs)).astype(np.float32)
    for row in x:
        chosen = rng.choice(inputs, count, replace=False)
        row[chosen] = rng.uniform(1, 2, count) * rng.choice([-1, 1], count)
    return x


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, INPUTS // 2, INPUTS])
@pytest.mark.parametrize("stored", QUANTISED)
def test_densities_from_none_to_all(isa, stored, count):
    x = with_active(np.random.default_rng(count), 4, count)
    z = rounded(np.where(np.abs(x) <= 0.5, np.float32(0), x))
    w = weights(stored)[1].astype(np.float64)
    # Scaled quants and minimum are added up apart, so few channels may cancel: relative to the largest weight.
    bound = 1e-6 * np.abs(z).sum(axis=1, keepdims=True) * np.abs(w).max()
    dense = linear(isa, stored, "rows", 0, 3).threshold(0.5)
    for layout, chunk in layouts(stored)[1:]:
        op = linear(isa, stored, layout, chunk, 3, threads=2).threshold(0.5)
        y = op.one_by_one(x)
        assert op.counters().channels_active == 4 * count
        assert (np.abs(y - z @ w.T) <= bound).all()
        assert y.tobytes() == dense(x).tobytes() == op(x).tobytes()
        if count == 0:
            assert not y.any()


# ---- numbers that are none


@pytest.mark.parametrize("mode", ["int8", "f32"])
@pytest.mark.parametrize("stored", ["Q4_0", "Q5_1", "Q8_0", "Q6_K", "F32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_the_outputs_of_their_row_alone(isa, stored, mode, bad):
    clean = activations(7)
    spoiled = clean.copy()
    spoiled[3, 77] = bad
    floats = mode == "f32" or stored == "F32"
    w = weights(stored)[1]
    for layout, chunk in layouts(stored):
        for value in (-1.0, 0.5, 100.0):  # with the last, that channel alone is left
            op = linear(isa, stored, layout, chunk, activations=mode).threshold(value)
            expected = op(clean)
            for y in (op(spoiled), op.one_by_one(spoiled)):
                others = np.arange(7) != 3
                assert y[others].tobytes() == expected[others].tobytes()
                if floats and np.isinf(bad):
                    with np.errstate(invalid="ignore"):
                        np.testing.assert_array_equal(y[3], np.float32(bad) * w[:, 77])
                else:
                    assert np.isnan(y[3]).all()


def test_zero_rows_give_the_bias(isa):
    bias = activations(1, OUTPUTS)[0]
    x = activations(5)
    x[[0, 3]] = 0
    for stored in TYPES:
        for layout, chunk in layouts(stored):
            for mode in ("int8", "f32"):
                op = linear(isa, stored, layout, chunk, activations=mode, bias=bias).threshold(0.25)
                for y in (op(x), op.one_by_one(x)):
                    np.testing.assert_array_equal(y[[0, 3]], np.stack([bias, bias]))
                    assert (y[[1, 2, 4]] != bias).any(axis=1).all()


# ---- parts


@pytest.mark.parametrize("outputs", [(1,), (7, 33), (64, 16, 130), (63, 65), (48, 1, 17), (128, 192)])
def test_parts_of_any_size_stand_side_by_side(isa, outputs):
    """Parts of different types and layouts; the op equals its parts alone plus the bias."""
    x = activations(5, 512)
    kinds = [("Q4_K", "rows", 0), ("Q6_K", "columns", 64), ("Q8_0", "rows", 0), ("Q4_0", "columns", 128)]
    bias = activations(1, sum(outputs), seed=9)[0]
    for shift in range(4):
        for mode in ("int8", "f32"):
            parts, alone = [], []
            for number, count in enumerate(outputs):
                stored, layout, chunk = kinds[(number + shift) % 4]
                matrix = pack([(weights(stored, count, 512, number)[0], stored)], 512, layout, chunk, 2)
                parts.append(matrix)
                alone.append(Linear(isa, [matrix], 512, count, activations=mode)(x))
            expected = np.concatenate(alone, axis=1)
            for added in (None, bias):
                total = expected if added is None else expected + added
                op = Linear(isa, parts, 512, sum(outputs), bias=added, threads=2, activations=mode)
                assert op(x).tobytes() == total.tobytes()
                assert op.one_by_one(x).tobytes() == total.tobytes()


@pytest.mark.parametrize("order", [("Q8_0", "F16"), ("F16", "Q8_0")])
def test_a_float_part_makes_the_op_take_float32_activations(isa, order):
    x = activations(3, 512)
    parts = [pack([(weights(kind, 40, 512)[0], kind)], 512, "columns", 64) for kind in order]
    expected = [Linear(isa, [part], 512, 40, activations="f32")(x) for part in parts]
    assert Linear(isa, parts, 512, 80)(x).tobytes() == np.concatenate(expected, axis=1).tobytes()


def test_float_weights_take_any_number_of_inputs(isa):
    for inputs in (1, 5, 31, 33, 100):
        for stored in FLOATS:
            raw, w = weights(stored, 9, inputs)
            op = Linear(isa, [pack([(raw, stored)], inputs, "columns", 64)], inputs, 9)
            for value in (-1.0, 0.5):
                x = activations(3, inputs)
                masked = np.where(np.abs(x) <= value, 0, x.astype(np.float64))
                bound = 1e-6 * (np.abs(masked) @ np.abs(w.astype(np.float64)).T)
                assert (np.abs(op.threshold(value)(x) - masked @ w.T.astype(np.float64)) <= bound).all()


def test_what_does_not_fit_is_refused():
    raw = weights("Q4_0", 8, 64)[0]
    k = weights("Q4_K", 8, 512)[0]
    order = np.array([8], np.int32)
    for call, message in (
        (lambda: pack([(raw, "Q4_0")], 96), "have 54 bytes, not 36"),
        (lambda: pack([(raw, "Q9_9")], 64), "no decoder for tensor type Q9_9"),
        (lambda: pack([(raw, "Q4_0")], 33), "blocks of 32: 33 inputs do not fit"),
        (lambda: pack([(raw, "Q4_0", order)], 64), "row_index 8 is outside"),
        (lambda: pack([(raw, "Q4_0", -order)], 64), "row_index -8 is outside"),
        (lambda: pack([(raw, "Q4_0")], 64, "columns", 63), "multiple of 64"),
        (lambda: pack([(raw, "Q4_0")], 64, "columns", 0), "multiple of 64"),
        (lambda: pack([(raw, "Q4_0")], 64, "tiles"), "layout is"),
        (lambda: pack([(raw, "Q4_0")], 64, segments=3), "too many segments"),
        (lambda: pack([(k, "Q4_K")], 512, segments=0), "too many segments"),
        (lambda: pack([(raw, "Q4_0")], 64, codec="i8_d"), "does not fit the codec"),
        (lambda: pack([(raw, "Q4_0")], 64, codec="u3"), "unknown codec u3"),
        (lambda: pack([(weights("F32", 8, 64)[0], "F32")], 64), "no rows layout"),
        (lambda: pack([], 64), "needs a part"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    good = pack([(raw, "Q4_0")], 64)
    for call, message in (
        (lambda: Linear(None, [good], 65, 8), "x"),
        (lambda: Linear(None, [good], 64, 9), "out"),
        (lambda: Linear(None, [], 64, 8), "needs a matrix"),
        (lambda: Linear(None, [good, pack([(k, "Q4_K")], 512)], 64, 16), "same inputs"),
        (lambda: Linear(None, [good], 64, 8, bias=np.zeros(7, np.float32)), "one float an output"),
        (lambda: Linear(None, [good], 64, 8, activations="i4"), "'int8' or 'f32'"),
        (lambda: Linear(None, [good], 64, 8).threshold(1.0, np.zeros(63, np.float32)), "one float an input"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
