"""Channels and bytes that the linear op counts are those of the active set, computed here by hand."""

import numpy as np
import pytest

pytest.importorskip("thinfer._core")

from native.linear_op import FLOATS, QUANTISED, SIZES, Linear, layouts, pack, weights
from thinfer.kernels.linear import quantize_rows

OUTPUTS, PADDED, INPUTS = 150, 192, 1024


def rows_of_densities():
    """Rows with none, one, two far apart, a whole group, a tenth, half and all of their channels above 1."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-0.1, 0.1, (7, INPUTS)).astype(np.float32)
    chosen = [[], [700], [3, 1000], range(64, 96), *(rng.choice(INPUTS, n, replace=False) for n in (102, 512, 1024))]
    for row, channels in zip(x, chosen, strict=True):
        row[list(channels)] = rng.uniform(1, 2, len(channels))
    return x


def slices(active, stored):
    """Bytes of the channels in a mask [inputs], and of the scales of the groups and blocks they lie in."""
    bits, group, block = SIZES[stored]
    groups = active.reshape(-1, 32).any(axis=1).sum()
    blocks = active.reshape(-1, 256).any(axis=1).sum()
    return PADDED * int(active.sum()) * bits // 8 + PADDED * (int(groups) * group + int(blocks) * block)


@pytest.mark.parametrize("stored", QUANTISED)
def test_a_decode_row_reads_its_active_channels(isa, stored):
    x = rows_of_densities()
    for layout, chunk in layouts(stored)[1:]:
        for segments, threads in ((1, 1), (3, 2)):
            matrix = pack([(weights(stored)[0], stored)], INPUTS, layout, chunk, segments)
            assert matrix.nbytes == slices(np.ones(INPUTS, bool), stored)
            op = Linear(isa, [matrix], INPUTS, OUTPUTS, threads=threads)
            for row in x:
                for value, sparse in ((0.5, True), (0.5, False), (-1.0, True)):
                    op.threshold(value)([row], sparse)
                    seen = np.where(np.abs(row) <= value, 0, row) if sparse else row
                    active = (quantize_rows(seen[None].astype(np.float32))[0] != 0).reshape(-1)
                    counter = op.counters()
                    assert counter.calls == 1
                    assert counter.channels_total == INPUTS
                    assert counter.channels_active == active.sum()
                    assert counter.bytes_read == slices(active, stored)


def quants(x, marks, value=0.5):
    """Which channels of each row have a quant that is not 0, thresholds applied in marked rows."""
    seen = np.where((np.abs(x) <= value) & (np.asarray(marks)[:, None] != 0), 0, x).astype(np.float32)
    return quantize_rows(seen)[0].reshape(len(x), -1) != 0


@pytest.mark.parametrize("stored", QUANTISED)
def test_the_rows_layout_reads_everything(isa, stored):
    x = rows_of_densities()
    matrix = pack([(weights(stored)[0], stored)], INPUTS, "rows", 0, 2)
    op = Linear(isa, [matrix], INPUTS, OUTPUTS, threads=2).threshold(0.5)
    op(x, [1, 1, 1, 0, 1, 1, 0])
    counter = op.counters()
    assert counter.bytes_read == matrix.nbytes
    assert counter.channels_total == 7 * INPUTS
    # Row 3 and row 6 are dense.
    assert counter.channels_active == 0 + 1 + 2 + INPUTS + 102 + 512 + INPUTS
    op(x[1:2])
    counter = op.counters()
    assert (counter.bytes_read, counter.channels_active) == (matrix.nbytes, 1)


@pytest.mark.parametrize("stored", QUANTISED)
def test_a_few_rows_read_the_channels_of_any_of_them(isa, stored):
    x = rows_of_densities()
    for layout, chunk in layouts(stored)[1:]:
        matrix = pack([(weights(stored)[0], stored)], INPUTS, layout, chunk, 2)
        op = Linear(isa, [matrix], INPUTS, OUTPUTS, threads=2).threshold(0.5)
        for rows, marks in (([0, 1], [1, 1]), ([1, 2, 4], [1, 1, 1]), (range(7), [1, 1, 1, 0, 1, 1, 0])):
            op(x[rows], marks)
            active = quants(x[rows], marks)
            counter = op.counters()
            assert counter.bytes_read == slices(active.any(axis=0), stored)
            assert counter.channels_active == active.sum()
            assert counter.channels_total == active.size
        many = np.tile(x[1:2], (17, 1))
        op(many)
        counter = op.counters()
        assert (counter.bytes_read, counter.channels_active) == (matrix.nbytes, 17)


@pytest.mark.parametrize("stored", FLOATS)
def test_float_weights_read_the_channels_that_some_row_needs(isa, stored):
    x = rows_of_densities()
    for layout, chunk in layouts(stored):
        matrix = pack([(weights(stored)[0], stored)], INPUTS, layout, chunk)
        op = Linear(isa, [matrix], INPUTS, OUTPUTS, threads=2).threshold(0.5)
        for rows in ([0], [1], [5], [6], [1, 2], [0, 1, 3]):
            op(x[rows])
            active = np.abs(x[rows]) > 0.5
            counter = op.counters()
            assert counter.channels_active == active.sum()
            assert counter.bytes_read == slices(active.any(axis=0), stored)
        op(x[:2], sparse=False)
        assert op.counters().bytes_read == matrix.nbytes


@pytest.mark.parametrize("stored", QUANTISED)
def test_float_mode_unpacks_whole_groups_and_says_so(isa, stored):
    """The oracle decodes every group that some row needs in full, so those are the bytes it counts."""
    x = rows_of_densities()
    for layout, chunk in layouts(stored):
        matrix = pack([(weights(stored)[0], stored)], INPUTS, layout, chunk)
        op = Linear(isa, [matrix], INPUTS, OUTPUTS, activations="f32").threshold(0.5)
        for rows in ([0], [1], [4], [6], [1, 3]):
            op(x[rows])
            active = (np.abs(x[rows]) > 0.5).any(axis=0)
            whole = np.repeat(active.reshape(-1, 32).any(axis=1), 32)
            outputs = PADDED if layout == "columns" else 160
            assert op.counters().bytes_read == slices(whole, stored) * outputs // PADDED
        op(x, sparse=False)
        assert op.counters().bytes_read == matrix.nbytes


@pytest.mark.parametrize("activations", ["int8", "f32"])
@pytest.mark.parametrize("rows", [1, 7])
def test_without_a_threshold_every_channel_counts(isa, activations, rows):
    x = rows_of_densities()[:rows]
    matrix = pack([(weights("Q4_1")[0], "Q4_1")], INPUTS, "rows", 0, 2)
    op = Linear(isa, [matrix], INPUTS, OUTPUTS, activations=activations, threads=2)
    op(x)
    counter = op.counters()
    assert counter.channels_active == counter.channels_total == rows * INPUTS
