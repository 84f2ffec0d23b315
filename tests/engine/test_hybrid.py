"""Segments of several executors give what one executor gives, and independent ones overlap."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from thinfer.core.graph import Graph, split_ffn
from thinfer.engine.hybrid import HybridExecutor, concurrent_stages, cut_segments
from thinfer.engine.kv_cache import KvLayout
from thinfer.engine.options import EngineOptions
from thinfer.engine.reference import ReferenceExecutor
from thinfer.engine.runtime import Engine, Work

IDS = np.random.default_rng(2).integers(0, 256, 40).tolist()


def split(model, layers=(0, 1)):
    graph = model.graph
    for layer in layers:
        graph = split_ffn(graph, layer, range(0, 96, 3), "other")
    return graph


def logits_with(engine, executor=None):
    if executor is not None:
        engine.executor = executor
    return engine.step([Work(engine.new_sequence(), IDS, "all")])[0]


def test_the_halves_of_a_split_ffn_are_neighbours_that_need_nothing_of_each_other(tiny_model):
    segments = cut_segments(split(tiny_model))
    assert segments[0].first == 0
    assert segments[-1].last == len(split(tiny_model).nodes)
    assert [b.first for b in segments[1:]] == [a.last for a in segments[:-1]]
    stages = concurrent_stages(segments)
    pairs = [stage for stage in stages if len(stage) == 2]
    assert [{segment.executor for segment in pair} for pair in pairs] == [{"cpu", "other"}] * 2
    assert concurrent_stages(cut_segments(tiny_model.graph)) == [cut_segments(tiny_model.graph)]


def test_split_over_two_executors_gives_the_same_logits(tiny_model):
    graph = split(tiny_model)
    layout = KvLayout(num_blocks=8)
    parts = {name: ReferenceExecutor(tiny_model, layout, graph=graph) for name in ("cpu", "other")}
    with Engine(tiny_model, EngineOptions(executor="reference", max_model_len=128)) as engine:
        expected = logits_with(engine)
        hybrid = HybridExecutor(graph, parts)
        assert np.abs(logits_with(engine, hybrid) - expected).max() < 1e-3
        assert {site.split(".")[-1] for site in hybrid.counters()} == {"qkv", "o", "gate_up", "down", "lm_head"}
        assert "2 stages run on several executors at once" in hybrid.describe()[0]
        hybrid.reset_counters()
        assert not hybrid.counters()


class Meeting(ReferenceExecutor):
    """Waits for the other branch, so the test fails unless both run at once."""

    def __init__(self, barrier, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._barrier = barrier

    def run_nodes(self, first, last, *args, **kwargs):
        if any("rows" in node.attrs for node in self._graph.nodes[first:last]):
            self._barrier.wait(timeout=20)
        return super().run_nodes(first, last, *args, **kwargs)


def test_the_two_branches_run_at_the_same_time(tiny_model):
    graph, barrier = split(tiny_model), threading.Barrier(2)
    parts = {name: Meeting(barrier, tiny_model, KvLayout(8), graph=graph) for name in ("cpu", "other")}
    with Engine(tiny_model, EngineOptions(executor="reference", max_model_len=128)) as engine:
        logits_with(engine, HybridExecutor(graph, parts))


class Failing(ReferenceExecutor):
    """Fails in its branch."""

    def run_nodes(self, *args, **kwargs):
        raise MemoryError("branch")


def test_a_failing_branch_reaches_the_caller(tiny_model):
    graph = split(tiny_model)
    layout = KvLayout(num_blocks=8)
    parts = {
        "cpu": ReferenceExecutor(tiny_model, layout, graph=graph),
        "other": Failing(tiny_model, layout, graph=graph),
    }
    engine = Engine(tiny_model, EngineOptions(executor="reference", max_model_len=128))
    with engine, pytest.raises(MemoryError, match="branch"):
        logits_with(engine, HybridExecutor(graph, parts))


def test_layers_may_alternate_between_executors(tiny_model):
    nodes = [
        replace(node, executor="other" if ".1." in str(node.weights) else "cpu") for node in tiny_model.graph.nodes
    ]
    graph = Graph(tuple(nodes), tiny_model.graph.buffers, tiny_model.graph.logits)
    parts = {name: ReferenceExecutor(tiny_model, KvLayout(8), graph=graph) for name in ("cpu", "other")}
    with Engine(tiny_model, EngineOptions(executor="reference", max_model_len=128)) as engine:
        expected = logits_with(engine)
        assert np.array_equal(logits_with(engine, HybridExecutor(graph, parts)), expected)
