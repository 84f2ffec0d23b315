"""The neurons op: for every stored type the bits of the dense kernels, whichever neurons are computed; its reads."""

import numpy as np
import pytest

pytest.importorskip("thinfer._core")

from native.linear_op import FLOATS, QUANTISED, Linear, layouts, pack, pool, read_back, weights
from thinfer import _core
from thinfer.core.active_set import ActiveSet

NEURONS, INPUTS = 150, 1024
TYPES = (*QUANTISED, *FLOATS)


class Neurons:
    """One neurons op; calling it runs a batch. The gate is a buffer of its own unless a matrix is given."""

    def __init__(
        self, isa, up, inputs=INPUTS, neurons=NEURONS, *, gate=None, activations="int8", threads=1, act="relu", **biases
    ):
        self.program = _core.Program(isa, pool(threads), Linear.MAX_ROWS)
        self.x, self.out = self.program.add_buffer(inputs), self.program.add_buffer(neurons)
        self.gate = self.program.add_buffer(neurons)
        self.lists = _core.NeuronLists()
        self.op = self.program.op_neurons(
            self.x,
            self.out,
            act,
            0.0,
            activations,
            self.gate if gate is None else None,
            gate,
            up,
            biases.get("gate_bias"),
            biases.get("up_bias"),
            self.lists,
        )

    def threshold(self, value, scale=None):
        self.program.set_threshold(self.op, value, scale)
        return self

    def __call__(self, x, gate=None, sparse=True):
        rows = len(x)
        self.program.buffer(self.x)[:rows] = x
        if gate is not None:
            self.program.buffer(self.gate)[:rows] = gate
        self.program.buffer(self.out)[:] = 12345
        zeros = np.zeros(rows, np.int32)
        marks = np.broadcast_to(np.asarray(sparse, np.uint8), rows).copy()
        table = np.zeros((rows, 1), np.int32)
        self.program.run(0, 1, zeros, zeros, np.arange(rows, dtype=np.int32), marks, zeros[:0], table)
        result = self.program.buffer(self.out)
        assert (result[rows:] == 12345).all()
        return result[:rows].copy()

    def counters(self):
        (counter,) = self.program.take_counters()
        return counter


def row_layout(stored):
    return layouts(stored)[0]


def dense(isa, stored, x, *, inputs=INPUTS, neurons=NEURONS, segments=1, seed=0, **options):
    layout, chunk = row_layout(stored)
    raw, _ = weights(stored, neurons, inputs, seed)
    return Linear(isa, [pack([(raw, stored)], inputs, layout, chunk, segments)], inputs, neurons, **options)(x)


def packed(stored, inputs=INPUTS, segments=1, seed=0, neurons=NEURONS):
    return pack([(weights(stored, neurons, inputs, seed)[0], stored)], inputs, "neurons", 0, segments)


def inputs_of(stored):
    """Inputs whose groups end in a whole record, in one group, and between (types of blocks of 256: whole ones)."""
    return (1024, 768) if stored.endswith("_K") else (1024, 1056, 576, 480, 224)


def rows_of(rng, rows, inputs=INPUTS):
    return rng.standard_normal((rows, inputs)).astype(np.float32)


def bits_equal(actual, expected):
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("stored", TYPES)
def test_rows_read_back_and_nothing_is_padded(stored):
    for inputs in inputs_of(stored):
        raw, values = weights(stored, NEURONS, inputs)
        matrix = packed(stored, inputs)
        np.testing.assert_array_equal(read_back(matrix, NEURONS), values)
        assert matrix.layout == "neurons"
        assert matrix.nbytes <= raw.nbytes * 1.03  # K types unpack their 6-bit scales


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_all_neurons_have_the_bits_of_the_dense_kernels(isa, stored, activations):
    rng = np.random.default_rng(0)
    for inputs in inputs_of(stored):
        for segments in (1, 3) if stored in QUANTISED else (1,):
            up = Neurons(isa, packed(stored, inputs, segments), inputs, activations=activations)
            for rows in (1, 2, 7, 130) if inputs == INPUTS else (1, 3):
                x = rows_of(rng, rows, inputs)
                expected = dense(isa, stored, x, inputs=inputs, segments=segments, activations=activations)
                bits_equal(up(x, np.ones((rows, NEURONS), np.float32)), expected)


@pytest.mark.parametrize("stored", TYPES)
def test_only_what_fires_is_computed_and_each_row_has_its_own(isa, stored):
    rng = np.random.default_rng(1)
    matrix = packed(stored, segments=2 if stored in QUANTISED else 1)
    up = Neurons(isa, matrix, threads=2)
    for rows, density in ((1, 0.0), (1, 1 / NEURONS), (1, 0.1), (3, 0.1), (3, 0.0), (5, 0.6)):
        fires = rng.random((rows, NEURONS)) < density
        gate = np.where(fires, rng.uniform(0.5, 2, fires.shape), -1).astype(np.float32)
        x = rows_of(rng, rows)
        ups = dense(isa, stored, x, segments=2 if stored in QUANTISED else 1)
        actual = up(x, gate)
        np.testing.assert_array_equal(actual, np.where(fires, gate * ups, np.float32(0)))
        union = int(fires.any(axis=0).sum())
        counter = up.counters()
        assert counter.bytes_read == union * matrix.nbytes // NEURONS
        assert counter.channels_total == rows * INPUTS
        assert counter.channels_active == int(fires.sum()) * INPUTS // NEURONS


@pytest.mark.parametrize("stored", ["Q4_0", "Q6_K", "F16", "F32"])
@pytest.mark.parametrize("gated", [True, False])
def test_listed_neurons_have_a_gate_of_their_own(isa, stored, gated):
    rng = np.random.default_rng(2)
    gate_bias, up_bias = (rng.standard_normal(NEURONS).astype(np.float32) for _ in range(2))
    gate, up = packed(stored, seed=1), packed(stored) if gated else None
    biases = {"gate_bias": gate_bias, "up_bias": up_bias if gated else None}
    op = Neurons(isa, up, gate=gate, threads=2, act="silu", **biases)
    for rows in (1, 4, 20):
        x = rows_of(rng, rows)
        gates = dense(isa, stored, x, seed=1) + gate_bias
        ups = dense(isa, stored, x) + up_bias
        fires = _core.act(isa, gates, "silu", None, None, 0.0) != 0
        full = _core.gated_act(isa, np.hstack([gates, ups if gated else np.ones_like(ups)]), "silu", None, None, 0.0)
        op.lists.clear()
        np.testing.assert_array_equal(op(x), full)  # what does not fire is 0, never -0
        op.counters()
        for density in (0.0, 0.2, 1.0):
            mask = rng.random((rows, NEURONS)) < density
            active = ActiveSet.where(mask)
            op.lists.set(active.ids, active.offsets)
            np.testing.assert_array_equal(op(x), np.where(mask, full, np.float32(0)))
            counter = op.counters()
            matrices = 2 if gated else 1
            ups_read = int((mask & fires).any(axis=0).sum()) if gated else 0
            assert counter.bytes_read == (len(active.union()) + ups_read) * gate.nbytes // NEURONS
            assert counter.channels_total == matrices * rows * INPUTS


@pytest.mark.parametrize("activations", ["int8", "f32"])
@pytest.mark.parametrize("gated", [True, False])
def test_rows_longer_than_an_item_are_whole(isa, gated, activations):
    """2304 inputs and 2200 neurons: their last pieces are short, and several threads share a row."""
    rng, inputs, neurons = np.random.default_rng(6), 2304, 2200
    shape = {"inputs": inputs, "neurons": neurons}
    scale = rng.uniform(0.5, 2, inputs).astype(np.float32)
    gate = packed("Q4_0", seed=1, **shape)
    op = Neurons(
        isa, packed("Q4_0", **shape) if gated else None, **shape, gate=gate, activations=activations, threads=3
    )
    op.threshold(0.5, scale)
    for rows in (1, 3):
        x = rows_of(rng, rows, inputs)
        cut = np.where(np.abs(x) * scale > 0.5, x, np.float32(0))
        gates = dense(isa, "Q4_0", cut, seed=1, **shape, activations=activations)
        ups = dense(isa, "Q4_0", cut, **shape, activations=activations) if gated else np.ones_like(gates)
        full = np.maximum(gates, 0) * ups + np.float32(0)
        op.lists.clear()
        np.testing.assert_array_equal(op(x), full)
        for every, density in ((0, 0.0), (0, 0.3), (1, 0.3), (0, 1.0)):
            mask = rng.random((rows, neurons)) < density
            active = ActiveSet.where(mask)
            op.lists.set(active.ids, active.offsets)
            op.program.check_lists(op.op, every, 0)
            np.testing.assert_array_equal(op(x), np.where(mask, full, np.float32(0)))


@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_thresholds_act_as_in_the_linear_op(isa, activations):
    rng = np.random.default_rng(3)
    scale = rng.uniform(0.5, 2, INPUTS).astype(np.float32)
    layout, chunk = row_layout("Q4_0")
    matrix = pack([(weights("Q4_0")[0], "Q4_0")], INPUTS, layout, chunk)
    linear = Linear(isa, [matrix], INPUTS, NEURONS, activations=activations)
    up = Neurons(isa, packed("Q4_0"), activations=activations)
    for rows in (1, 5):
        x, marks = rows_of(rng, rows), rng.integers(0, 2, rows)
        for value, scales in ((0.7, None), (0.7, scale), (-1.0, None)):
            expected = linear.threshold(value, scales)(x, marks)
            bits_equal(up.threshold(value, scales)(x, np.ones((rows, NEURONS), np.float32), marks), expected)


def test_nan_counts_as_firing_and_reaches_its_neuron_alone(isa):
    rng = np.random.default_rng(4)
    x, gate = rows_of(rng, 2), np.full((2, NEURONS), -1, np.float32)
    gate[1, 7] = np.nan
    result = Neurons(isa, packed("Q4_0"))(x, gate)
    assert np.isnan(result[1, 7])
    result[1, 7] = 0
    assert not result.any()


@pytest.mark.parametrize("stored", ["Q4_0", "F16"])
def test_threads_change_no_bit(isa, stored):
    rng = np.random.default_rng(5)
    for rows in (1, 6):
        x, gate = rows_of(rng, rows), rng.standard_normal((rows, NEURONS)).astype(np.float32)
        one, three = (Neurons(isa, packed(stored), threads=threads)(x, gate) for threads in (1, 3))
        bits_equal(one, three)


def test_worst_values_do_not_saturate(isa):
    """All quants at their ends against activations of ±127: int16 sums at their widest, with and without offset."""
    every = np.arange(INPUTS)
    signs = np.stack([every >= 0, every < 0, every % 3 > 0, every % 2 > 0, every // 2 % 2 > 0, every // 4 % 2 > 0])
    xs = np.where(signs, 1, -1).astype(np.float32)
    for stored in QUANTISED:
        raw, _ = weights(stored)
        for byte in (0x00, 0xFF, 0x80, 0x7F):
            blocks = raw.copy()
            size = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
            view = blocks.reshape(len(blocks), -1, size[stored])
            quants = (
                slice(0, 192)
                if stored == "Q6_K"
                else slice(16 if stored.endswith("_K") else 2 + 2 * (stored[3] == "1"), None)
            )
            view[..., quants] = byte
            neurons = pack([(blocks, stored)], INPUTS, "neurons", 0, 1)
            rows = pack([(blocks, stored)], INPUTS)
            dense, op = Linear(isa, [rows], INPUTS, NEURONS), Neurons(isa, neurons)
            for x in xs[:, None]:
                bits_equal(op(x, np.ones((1, NEURONS), np.float32)), dense(x))


def test_a_predictor_lists_what_scores_above_its_threshold_in_sparse_rows(isa):
    rng = np.random.default_rng(6)
    program = _core.Program(isa, pool(1), 4)
    scores = program.add_buffer(NEURONS)
    lists = _core.NeuronLists()
    program.op_pick_neurons(scores, 0.25, lists)
    x, out = program.add_buffer(INPUTS), program.add_buffer(NEURONS)
    program.op_neurons(
        x, out, "relu", 0.0, "int8", None, packed("Q4_0"), None, np.full(NEURONS, 1e4, np.float32), None, lists
    )
    given = rng.standard_normal((3, NEURONS)).astype(np.float32)
    given[0, 3] = np.nan
    program.buffer(scores)[:3] = given
    program.buffer(x)[:3] = rows_of(rng, 3)
    zeros = np.zeros(3, np.int32)
    marks = np.array([1, 1, 0], np.uint8)
    program.run(0, 2, zeros, zeros, np.arange(3, dtype=np.int32), marks, zeros[:0], np.zeros((3, 1), np.int32))
    computed = program.buffer(out)[:3] != 0
    np.testing.assert_array_equal(computed[:2], ~(given[:2] <= 0.25))
    assert computed[2].all()
    assert lists.count == computed.sum()


@pytest.mark.parametrize("stored", ["Q4_0", "Q6_K", "F16"])
@pytest.mark.parametrize("act", ["relu", "relu2", "fatrelu", "drelu", "plain"])
def test_a_check_counts_what_lists_left_out_and_changes_no_bit(isa, stored, act):
    rng = np.random.default_rng(7)
    gate, up = packed(stored, seed=1), None if act == "plain" else packed(stored)
    name = "relu" if act == "plain" else act
    op = Neurons(isa, up, gate=gate, threads=2, act=name)
    for rows, density in ((1, 0.2), (1, 0.0), (5, 0.3), (20, 1.0)):
        x, mask = rows_of(rng, rows), rng.random((rows, NEURONS)) < density
        marks = np.ones(rows, np.uint8) if rows == 1 else rng.integers(0, 2, rows)
        mask |= marks[:, None] == 0
        active = ActiveSet.where(mask)
        op.lists.set(active.ids, active.offsets)
        ups = np.ones((rows, NEURONS), np.float32) if up is None else dense(isa, stored, x)
        full = _core.gated_act(isa, np.hstack([dense(isa, stored, x, seed=1), ups]), name, None, None, 0.0)
        op.program.check_lists(op.op, 0, 0)
        expected = op(x, sparse=marks)
        plain = op.counters()
        assert plain.needed == plain.found == 0
        op.program.check_lists(op.op, 3, 1)
        counted = []
        for _ in range(3):
            bits_equal(op(x, sparse=marks), expected)
            counted.append(op.counters())
        (checked,) = (counter for counter in counted if counter.needed)
        fired = (full != 0) & (marks[:, None] != 0)
        assert (checked.needed, checked.found) == (fired.sum(), (fired & mask).sum())
        for counter in counted:
            assert (counter.channels_active, counter.channels_total) == (plain.channels_active, plain.channels_total)
            assert counter is checked or counter.bytes_read == plain.bytes_read
        # All gates, and up for all whose gate fires.
        gates = dense(isa, stored, x, seed=1) > 0
        read = NEURONS + (0 if up is None else int(((marks[:, None] != 0) & gates | mask & gates).any(axis=0).sum()))
        assert checked.bytes_read == read * gate.nbytes // NEURONS


def test_a_check_looks_at_the_rows_selected(isa):
    rng = np.random.default_rng(8)
    program = _core.Program(isa, pool(1), 4)
    x, chosen = program.add_buffer(INPUTS), program.add_buffer(INPUTS)
    out = program.add_buffer(NEURONS)
    lists = _core.NeuronLists()
    program.op_select(x, chosen)
    matrix = packed("Q4_0")
    op = program.op_neurons(chosen, out, "relu", 0.0, "int8", None, matrix, None, None, None, lists)
    program.check_lists(op, 1, 0)
    given = rows_of(rng, 4)
    program.buffer(x)[:] = given
    active = ActiveSet.where(rng.random((2, NEURONS)) < 0.5)
    lists.set(active.ids, active.offsets)
    zeros, marks = np.zeros(4, np.int32), np.array([1, 0, 0, 1], np.uint8)
    places, table = np.array([1, 3], np.int32), np.zeros((4, 1), np.int32)
    program.run(0, 2, zeros, zeros, np.arange(4, dtype=np.int32), marks, places, table)
    counter = program.take_counters()[op]
    fired = dense(isa, "Q4_0", given[3:])[0] > 0
    assert (counter.needed, counter.found) == (fired.sum(), (fired & active.mask()[1]).sum())


@pytest.mark.parametrize("stored", ["Q4_0", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("activations", ["int8", "f32"])
@pytest.mark.parametrize("layouts", [("rows", "rows"), ("rows", "neurons"), ("neurons", "rows"), ("rows", None)])
def test_lists_over_matrices_that_are_read_whole_give_the_same_bits(isa, stored, activations, layouts):
    rng = np.random.default_rng(9)

    def op(layouts):
        gate, up = (
            None
            if layout is None
            else pack([(weights(stored, NEURONS, INPUTS, seed)[0], stored)], INPUTS, layout, 0, 2)
            for seed, layout in zip((1, 0), layouts, strict=True)
        )
        biases = {"gate_bias": bias, "up_bias": None if up is None else bias}
        return Neurons(isa, up, gate=gate, threads=2, activations=activations, **biases), gate

    bias = rng.standard_normal(NEURONS).astype(np.float32)
    whole, gate = op(layouts)
    some, _ = op([None if layout is None else "neurons" for layout in layouts])
    for rows, density in ((1, 0.2), (1, 0.0), (1, 1.0), (5, 0.3), (20, 0.9)):
        x, active = rows_of(rng, rows), ActiveSet.where(rng.random((rows, NEURONS)) < density)
        for every in (0, 1):  # with and without a check
            counters = []
            for each in (whole, some):
                each.lists.set(active.ids, active.offsets)
                each.program.check_lists(each.op, every, 0)
            bits_equal(whole(x), some(x))
            for each in (whole, some):
                counter = each.counters()
                counters.append((counter.channels_active, counter.channels_total, counter.needed, counter.found))
                if each is whole and every == 0 and "neurons" not in layouts:
                    assert counter.bytes_read == gate.nbytes * (2 - layouts.count(None))
            assert counters[0] == counters[1]
            assert (counters[0][2] > 0) == bool(every)
        for each in (whole, some):
            each.lists.clear()
        bits_equal(whole(x), some(x))
        assert whole.counters().channels_active == some.counters().channels_active


def test_what_cannot_be_checked_is_refused(isa):
    up = packed("Q4_0")
    for op in (Neurons(isa, up), Linear(isa, [pack([(weights("Q4_0")[0], "Q4_0")], INPUTS)], INPUTS, NEURONS)):
        for index, message in ((0, "neurons op"), (1, "none of the program's")):
            with pytest.raises(ValueError, match=message):
                op.program.check_lists(index, 64, 0)
    op = Neurons(isa, up, gate=packed("Q4_0", seed=1))
    with pytest.raises(ValueError, match="0 or more"):
        op.program.check_lists(op.op, -1, 0)


def test_what_does_not_fit_is_refused(isa):
    up = packed("Q4_0")
    program = _core.Program(isa, pool(1), 2)
    x, out, gate = program.add_buffer(INPUTS), program.add_buffer(NEURONS), program.add_buffer(NEURONS)
    wide = program.add_buffer(NEURONS + 1)

    def add(x=x, out=out, gate=gate, matrix=None, up=up, **biases):
        given = biases.get("gate_bias"), biases.get("up_bias")
        program.op_neurons(x, out, "relu", 0.0, "int8", gate, matrix, up, *given, None)

    for message, wrong in {
        "either a buffer or a matrix": {"gate": None},
        "needs a matrix": {"up": None},
        "neurons layout": {"up": pack([(weights("Q4_0", NEURONS)[0], "Q4_0")], INPUTS, "columns", 64)},
        "same shape": {"gate": None, "matrix": packed("Q4_0", 576)},
        "one float a neuron": {"up_bias": np.ones(3, np.float32)},
        "reads": {"out": gate},
        "wide": {"out": wide},
    }.items():
        with pytest.raises(ValueError, match=message):
            add(**wrong)
    with pytest.raises(ValueError, match="neurons op"):
        Linear(isa, [up], INPUTS, NEURONS)
    for ids, offsets in (([1, 1], [0, 2]), ([2, 1], [0, 2]), ([-1], [0, 1]), ([1], [0, 2]), ([], [])):
        with pytest.raises(ValueError, match=r"ascend|offsets"):
            _core.NeuronLists().set(np.array(ids, np.int32), np.array(offsets, np.int32))
    op = Neurons(isa, up, gate=packed("Q4_0", seed=1))
    op.lists.set(np.array([1], np.int32), np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match="listed for 1 rows, the batch has 2"):
        op(rows_of(np.random.default_rng(0), 2))
    op.lists.set(np.array([NEURONS], np.int32), np.array([0, 1], np.int32))
    with pytest.raises(ValueError, match=f"neuron {NEURONS} of {NEURONS}"):
        op(rows_of(np.random.default_rng(0), 1))
