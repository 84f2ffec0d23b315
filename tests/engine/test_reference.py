"""ReferenceExecutor: invariance, thresholds, observers, counts, segments and the FFN split."""

import numpy as np
import pytest

from models.tiny_hf import make_model, tokens
from thinfer.core.graph import split_ffn
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.batch import Batch
from thinfer.engine.kv_cache import KvLayout
from thinfer.engine.reference import ReferenceExecutor
from thinfer.errors import UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

LAYOUT = KvLayout(num_blocks=6, type="f32")
IDS = tokens(90)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", "biases").save_pretrained(folder)
    return load_model(open_checkpoint(folder))


def batch(first, last, *, sparse=0, out=None, blocks=(3, 1), sequence=0):
    rows = last - first
    return Batch(
        tokens=IDS[first:last],
        positions=np.arange(first, last, dtype=np.int32),
        sequence=np.full(rows, sequence, np.int32),
        sparse=np.broadcast_to(np.uint8(sparse), rows).copy() if np.isscalar(sparse) else np.asarray(sparse, np.uint8),
        out_rows=np.arange(rows, dtype=np.int32) if out is None else np.array(out, np.int32),
        block_table=np.array([blocks], np.int32),
    )


def chunked(executor, chunk, last=90, **given):
    return np.concatenate([executor.run(batch(i, min(i + chunk, last), **given)) for i in range(0, last, chunk)])


@pytest.fixture(scope="module")
def dense(model):
    return chunked(ReferenceExecutor(model, LAYOUT), 90)


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunking_does_not_change_a_bit(model, dense, chunk):
    np.testing.assert_array_equal(chunked(ReferenceExecutor(model, LAYOUT), chunk), dense)


def test_neighbours_do_not_change_a_bit(model, dense):
    executor = ReferenceExecutor(model, LAYOUT)
    executor.run(batch(0, 70))
    executor.run(batch(0, 20, blocks=(0, 4)))
    a, b = batch(70, 90), batch(20, 22)
    both = Batch(
        tokens=np.concatenate([b.tokens, a.tokens]),
        positions=np.concatenate([b.positions, a.positions]),
        sequence=np.array([1] * 2 + [0] * 20, np.int32),
        sparse=np.zeros(22, np.uint8),
        out_rows=np.arange(22, dtype=np.int32),
        block_table=np.array([[3, 1], [0, 4]], np.int32),
    )
    logits = executor.run(both)
    np.testing.assert_array_equal(logits[2:], dense[70:])
    np.testing.assert_array_equal(logits[:2], dense[20:22])


def test_only_wanted_rows_come_back(model, dense):
    executor = ReferenceExecutor(model, LAYOUT)
    np.testing.assert_array_equal(executor.run(batch(0, 10, out=[4, 9])), dense[[4, 9]])
    assert executor.run(batch(10, 12, out=[])).shape == (0, model.config.vocab_size)


def selector(model, threshold, **given):
    sites = [
        node.attrs["site"] for node in model.graph.nodes if node.op == "linear" and node.attrs["kind"] != "lm_head"
    ]
    return ThresholdSelector("teal", dict.fromkeys(sites, threshold), **given)


def test_threshold_zero_is_dense_to_the_bit(model, dense):
    executor = ReferenceExecutor(model, LAYOUT, selector=selector(model, 0.0))
    np.testing.assert_array_equal(chunked(executor, 7, sparse=1), dense)


def test_thresholds_act_on_sparse_rows_only(model, dense):
    executor = ReferenceExecutor(model, LAYOUT)
    executor.set_selector(selector(model, 0.3))
    np.testing.assert_array_equal(executor.run(batch(0, 8)), dense[:8])
    mixed = executor.run(batch(8, 12, sparse=[0, 1, 0, 1]))
    np.testing.assert_array_equal(mixed[0], dense[8])
    assert not np.array_equal(mixed[1], dense[9])
    executor.set_selector(None)
    np.testing.assert_array_equal(chunked(executor, 30, sparse=1), dense)


def test_thresholds_equal_masked_inputs(model):
    """What the first linear computes under a threshold is its product with the masked input."""
    seen = {}
    executor = ReferenceExecutor(model, LAYOUT, selector=selector(model, 0.5))
    names = ("layers.0.attn_norm", "layers.0.qkv")
    out = executor.run_nodes(0, 3, batch(0, 4, sparse=1), {}, names, observe=lambda s, x: seen.update({s: x.copy()}))
    np.testing.assert_array_equal(seen["layers.0.qkv"], out[names[0]])
    x = np.where(np.abs(out[names[0]]) <= 0.5, 0, out[names[0]])
    w = np.concatenate([model.weights.float32(f"model.layers.0.self_attn.{p}_proj.weight") for p in "qkv"])
    b = np.concatenate([model.weights.float32(f"model.layers.0.self_attn.{p}_proj.bias") for p in "qkv"])
    np.testing.assert_allclose(out[names[1]], x @ w.T + b, atol=1e-5)


def test_counters_count_channels(model):
    executor = ReferenceExecutor(model, LAYOUT, selector=selector(model, 1e9))
    executor.run(batch(0, 3, sparse=[0, 1, 1], out=[2]))
    counts = executor.counters()
    layers, hidden, ffn = 2, 64, 96
    kinds = ("qkv", "o", "gate_up", "down")
    assert set(counts) == {"lm_head"} | {f"layers.{layer}.{kind}" for layer in range(layers) for kind in kinds}
    assert (counts["layers.0.qkv"].active, counts["layers.0.qkv"].total) == (hidden, 3 * hidden)
    assert (counts["layers.1.down"].active, counts["layers.1.down"].total) == (ffn, 3 * ffn)
    assert counts["layers.1.gate_up"].bytes == counts["layers.1.gate_up"].dense_bytes == 2 * ffn * hidden * 4
    assert counts["lm_head"].total == hidden
    executor.reset_counters()
    assert not executor.counters()


def test_observer_sees_every_site_of_every_row(model):
    shapes = {}
    ReferenceExecutor(model, LAYOUT).run(batch(0, 5, out=[4]), observe=lambda s, x: shapes.update({s: x.shape}))
    assert shapes == {
        f"layers.{i}.{kind}": (5, width)
        for i in range(2)
        for kind, width in (("qkv", 64), ("o", 64), ("gate_up", 64), ("down", 96))
    } | {"lm_head": (1, 64)}


def test_segments_pass_buffers(model, dense):
    executor = ReferenceExecutor(model, LAYOUT)
    cut, nodes = 11, model.graph.nodes
    read_later = {name for node in nodes[cut:] for name in node.inputs}
    names = [node.output for node in nodes[:cut] if node.output in read_later]
    middle = executor.run_nodes(0, cut, batch(0, 6), {}, names)
    logits = executor.run_nodes(cut, len(nodes), batch(0, 6), middle, (model.graph.logits,))
    np.testing.assert_array_equal(logits[model.graph.logits], dense[:6])


@pytest.mark.parametrize("executors", ["reference", "cpu"])
def test_split_ffn_gives_the_whole_ffn(model, dense, executors):
    """Both ways to write a branch: exact columns, and whole groups of columns with a scatter."""
    graph = model.graph
    ids = np.random.default_rng(5).permutation(96)[:37]
    for layer in range(2):
        graph = split_ffn(graph, layer, ids.tolist(), executors)
    split = ReferenceExecutor(model, LAYOUT, graph=graph)
    assert np.abs(chunked(split, 90) - dense).max() < 1e-4
    with pytest.raises(UsageError, match="split"):
        split.run(batch(0, 1), observe=lambda *_: None)


def test_split_ffn_under_thresholds(model):
    """The parts drop the channels that the whole drops, WINA's factors included."""
    scale = {f"layers.{i}.down": np.linspace(0.1, 3, 96, dtype=np.float32) for i in range(2)}
    chosen = selector(model, 0.2, channel_scale=scale)
    whole = ReferenceExecutor(model, LAYOUT, selector=chosen)
    graph = split_ffn(model.graph, 1, range(10, 60), "reference")
    split = ReferenceExecutor(model, LAYOUT, graph=graph, selector=chosen)
    assert np.abs(chunked(split, 90, sparse=1) - chunked(whole, 90, sparse=1)).max() < 1e-3


def test_nan_is_not_dropped(model):
    executor = ReferenceExecutor(model, LAYOUT, selector=selector(model, 0.5))
    nodes = model.graph.nodes
    index = next(i for i, n in enumerate(nodes) if n.output == "layers.0.gate_up")
    x = np.zeros((2, 64), np.float32)
    x[0, 3] = np.nan
    out = executor.run_nodes(
        index, index + 1, batch(0, 2, sparse=1), {nodes[index].inputs[0]: x}, ("layers.0.gate_up",)
    )
    assert np.isnan(out["layers.0.gate_up"][0]).all()
    assert np.isfinite(out["layers.0.gate_up"][1]).all()


def test_close_and_describe(model):
    executor = ReferenceExecutor(model, LAYOUT)
    assert "reference" in executor.describe()[0]
    executor.run(batch(0, 1))
    executor.close()
