"""The native executor inside the engine: threads, the split FFN, and the reference as its oracle."""

import numpy as np
import pytest

from thinfer.core.graph import split_ffn
from thinfer.core.sampling import SamplingParams
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.llm import LLM
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work

pytest.importorskip("thinfer._core")

IDS = np.random.default_rng(4).integers(0, 256, 90).tolist()
FLOAT = {"activations": "f32", "kv_type": "f32"}


def logits_of(model, *, graph=None, selector=None, **options):
    with Engine(model, EngineOptions(**options), graph=graph, selector=selector) as engine:
        return engine.step([Work(engine.new_sequence(), IDS, "all", sparse=selector is not None)])[0]


def thresholds(model):
    sites = [
        node.attrs["site"] for node in model.graph.nodes if node.op == "linear" and node.attrs["kind"] != "lm_head"
    ]
    return ThresholdSelector("teal", dict.fromkeys(sites, 0.4))


@pytest.mark.parametrize("options", [{}, FLOAT])
@pytest.mark.parametrize("sparse", [False, True])
def test_threads_do_not_change_a_bit(tiny_model, options, sparse):
    selector = thresholds(tiny_model) if sparse else None
    one = logits_of(tiny_model, threads=1, selector=selector, **options)
    for threads in (2, 3):
        assert np.array_equal(logits_of(tiny_model, threads=threads, selector=selector, **options), one)


@pytest.mark.parametrize("sparse", [False, True])
def test_float_mode_agrees_with_the_reference(tiny_model, sparse):
    selector = thresholds(tiny_model) if sparse else None
    native = logits_of(tiny_model, executor="cpu", selector=selector, **FLOAT)
    reference = logits_of(tiny_model, executor="reference", selector=selector)
    assert np.abs(native - reference).max() < 1e-3


@pytest.mark.parametrize("ids", [range(32), range(1, 96, 2), [95]])
def test_an_ffn_split_over_native_and_reference_gives_the_same_logits(tiny_model, ids):
    graph = split_ffn(split_ffn(tiny_model.graph, 0, ids), 1, ids)
    split = logits_of(tiny_model, graph=graph, **FLOAT)
    assert np.abs(split - logits_of(tiny_model, **FLOAT)).max() < 1e-3


def test_a_split_engine_says_so_and_decodes(tiny_model):
    graph = split_ffn(tiny_model.graph, 1, range(48))
    with Engine(tiny_model, EngineOptions(**FLOAT), graph=graph) as engine:
        assert "1 stages run on several executors at once" in "\n".join(engine.describe())
        sequence = engine.new_sequence()
        rows = [engine.step([Work(sequence, [token])])[0][0] for token in IDS[:20]]
    assert np.abs(np.stack(rows) - logits_of(tiny_model, **FLOAT)[:20]).max() < 1e-3


def test_prompts_together_equal_each_alone(tiny_folder):
    prompts = ["Once upon a time", "The quick brown fox " * 5, "x"]
    params = SamplingParams(temperature=0.9, top_k=30, seed=3, max_tokens=20, ignore_eos=True)
    with LLM(tiny_folder, chunk=16) as llm:
        together = llm.generate(prompts, params)
        assert [o.token_ids for o in together] == [llm.generate(p, params).token_ids for p in prompts]


@pytest.mark.parametrize("options", [{}, {"weights": "f16"}, {"activations": "f32"}, {"weights": "q8"}])
def test_bytes_are_counted_for_every_codec(tiny_model, options):
    with Engine(tiny_model, EngineOptions(threads=2, **options)) as engine:
        engine.step([Work(engine.new_sequence(), IDS[:1])])
        packed = sum(linear.nbytes for linear in engine.executor.linears)
        assert 0.9 * packed < engine.usage().bytes_per_token <= packed
