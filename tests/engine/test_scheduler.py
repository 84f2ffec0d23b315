"""The scheduler: blocks that run out, texts that begin alike, neighbours and failures change no token."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from thinfer.core.sampling import SamplingParams
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine
from thinfer.engine.scheduler import Scheduler, share_rows
from thinfer.errors import ResourceError, UsageError

RNG = np.random.default_rng(3)
IDS = RNG.integers(0, 256, 400).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=3)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=11, repetition_penalty=1.2)
REFERENCE = {"executor": "reference"}
INT8 = {"executor": "cpu", "threads": 1}
F32 = {"executor": "cpu", "activations": "f32", "kv_type": "f32", "threads": 1}
# An executor, and where thresholds act: nowhere (None), at decode (False), or in prompts too (True).
KINDS = {
    "reference-decode": (REFERENCE, False),
    "int8-dense": (INT8, None),
    "int8-decode": (INT8, False),
    "int8-prefill": (INT8, True),
    "f32-dense": (F32, None),
    "f32-decode": (F32, False),
}


class Sink:
    """Text that is its token ids."""

    def push(self, token):
        return f"{token} ", False

    def finish(self):
        return ""


@pytest.fixture(params=KINDS)
def make_engine(request, tiny_model):
    """Builds engines of one kind."""
    executor, prefill = KINDS[request.param]
    if executor is not REFERENCE and find_spec("thinfer._core") is None:
        pytest.skip("the native part is not built")
    sites = [node.attrs["site"] for node in tiny_model.graph.nodes if node.op == "linear"]
    thresholds = {site: 0.4 for site in sites if site.startswith("layers.")}
    selector = None if prefill is None else ThresholdSelector("teal", thresholds, prefill=prefill)
    return lambda **options: Engine(tiny_model, EngineOptions(**(executor | options)), selector=selector)


@pytest.fixture
def engine(tiny_model):
    with Engine(tiny_model, EngineOptions(executor="reference")) as engine:
        yield engine


def scheduler_of(engine, sink=Sink, eos=(), clock=None):
    given = {} if clock is None else {"clock": clock}
    return Scheduler(engine, lambda params, continues: sink(), eos, **given)


def drain(scheduler, limit=5000):
    """Run to the end; returns all chunks."""
    chunks = []
    for _ in range(limit):
        if not scheduler.busy:
            return chunks
        chunks += scheduler.step()
    raise AssertionError(f"still busy after {limit} steps")


def run(engine, *asked):
    """Requests for (prompt, params) pairs, run together."""
    scheduler = scheduler_of(engine)
    requests = [scheduler.add(prompt, params) for prompt, params in asked]
    drain(scheduler)
    assert engine.pool.num_free == engine.pool.layout.num_blocks
    return requests, scheduler


def result(request):
    return request.generated, request.logprobs, request.finish_reason


# ---- preemption


def test_blocks_that_run_out_change_no_token(make_engine):
    asked = [(IDS[:60], GREEDY), (IDS[100:155], SEEDED), (IDS[200:262], SEEDED), (IDS[262:330], GREEDY)]
    with make_engine(prefix_cache=False) as large:
        expected = [result(run(large, one)[0][0]) for one in asked]
    for cached in (False, True):
        with make_engine(kv_tokens=384, chunk=40, prefix_cache=cached) as small:
            requests, scheduler = run(small, *asked)
            assert scheduler.preemptions > 0
            assert [result(request) for request in requests] == expected


def test_a_preempted_request_finds_its_own_blocks_again(make_engine):
    with make_engine(kv_tokens=64 * 5) as engine:
        scheduler = scheduler_of(engine)
        first, second = scheduler.add(IDS[:60], GREEDY), scheduler.add(IDS[100:160], GREEDY)
        while not scheduler.preemptions:
            scheduler.step()
        before = engine.usage().rows
        assert second.sequence.length == 0
        counts = [len(first.generated), len(second.generated)]
        drain(scheduler)
        rest = sum(100 - count for count in counts)
        assert min(counts) > 64
        # The second one's full blocks were not computed again.
        assert engine.usage().rows - before - rest < 64


def test_the_youngest_waits_and_the_oldest_never_does(engine, tiny_model):
    with Engine(tiny_model, EngineOptions(executor="reference", kv_tokens=384)) as small:
        scheduler = scheduler_of(small)
        requests = [scheduler.add(IDS[i : i + 20], replace(GREEDY, max_tokens=200)) for i in range(4)]
        ends = [request for request, chunk in drain(scheduler) if chunk.finish_reason is not None]
        assert scheduler.preemptions > 0
        assert ends == requests


def test_a_prompt_in_the_middle_may_be_preempted(make_engine):
    with make_engine(kv_tokens=448, chunk=16) as engine:
        scheduler = scheduler_of(engine)
        asked = [(IDS[:60], GREEDY), (IDS[60:180], replace(GREEDY, prompt_logprobs=2))]
        requests = [scheduler.add(*one) for one in asked]
        while requests[1].sequence.length < 64:
            scheduler.step()
        scheduler._preempt(requests[1])
        drain(scheduler)
        for one, request in zip(asked, requests, strict=True):
            (alone,), _ = run(engine, one)
            assert result(alone) == result(request)
            assert alone.prompt_logprobs == request.prompt_logprobs


# ---- prefix reuse


@pytest.mark.parametrize("length", [64, 65, 128, 200])
def test_a_hit_gives_the_tokens_and_logits_of_a_cold_run(make_engine, length):
    prompt = IDS[:length]
    with make_engine(prefix_cache=False) as engine:
        (cold,), _ = run(engine, (prompt, GREEDY))
    with make_engine() as engine:
        run(engine, (prompt, SEEDED))
        (warm,), _ = run(engine, (prompt, GREEDY))
        assert cold.cached_tokens == 0
        assert warm.cached_tokens == (length - 1) // 64 * 64
        assert warm.timings.cached_tokens == warm.cached_tokens
        assert result(warm) == result(cold)


def test_an_answer_is_reused_only_where_it_was_written_as_a_prompt_is(make_engine):
    with make_engine() as engine:
        (first,), _ = run(engine, (IDS[:100], GREEDY))
        (again,), _ = run(engine, ([*IDS[:100], *first.generated, *IDS[300:310]], GREEDY))
        selector = engine.selector
        assert again.cached_tokens == (64 if selector is not None and not selector.prefill else 192)
        engine.selector = selector
        (cold,), _ = run(engine, ([*IDS[:100], *first.generated, *IDS[300:310]], GREEDY))
        assert cold.cached_tokens == 0
        assert result(again) == result(cold)


def test_other_thresholds_reuse_nothing(make_engine):
    with make_engine() as engine:
        run(engine, (IDS[:100], GREEDY))
        engine.selector = None
        (dense,), _ = run(engine, (IDS[:100], GREEDY))
        assert dense.cached_tokens == 0


def test_requests_that_begin_alike_compute_once(make_engine):
    asked = [(IDS[:150], replace(SEEDED, seed=seed, max_tokens=5)) for seed in range(4)]
    asked.append(([*IDS[:100], *IDS[200:250]], replace(SEEDED, max_tokens=5)))
    with make_engine(prefix_cache=False) as engine:
        expected = [result(run(engine, one)[0][0]) for one in asked]
    with make_engine(chunk=100) as engine:
        requests, _ = run(engine, *asked)
        assert [result(request) for request in requests] == expected
        assert [request.cached_tokens for request in requests] == [0, 128, 128, 128, 64]
        assert engine.usage().rows == 150 + 3 * 22 + 86 + 5 * 4


def test_cached_blocks_give_way(engine, tiny_model):
    with Engine(tiny_model, EngineOptions(executor="reference", kv_tokens=256)) as small:
        for start in range(0, 200, 40):
            (got,), _ = run(small, (IDS[start : start + 130], replace(GREEDY, max_tokens=10)))
            (expected,), _ = run(engine, (IDS[start : start + 130], replace(GREEDY, max_tokens=10)))
            assert result(got) == result(expected)


# ---- neighbours, order, rows


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_neighbours_change_no_token(make_engine, params):
    settings = replace(params, max_tokens=40)
    asked = [(IDS[7 * i : 7 * i + 5 + 31 * i], replace(settings, seed=i)) for i in range(8)]
    with make_engine(prefix_cache=False) as engine:
        expected = [result(run(engine, one)[0][0]) for one in asked]
    with make_engine(chunk=48) as engine:
        scheduler = scheduler_of(engine)
        requests = []
        # They join while others decode, and one leaves early.
        for one in asked:
            requests.append(scheduler.add(*one))
            for _ in range(3):
                scheduler.step()
        scheduler.cancel(requests[2])
        drain(scheduler)
        for place, (request, alone) in enumerate(zip(requests, expected, strict=True)):
            if place == 2:
                assert request.finish_reason == "cancelled"
                assert request.generated == alone[0][: len(request.generated)]
            else:
                assert result(request) == alone


def test_prompts_beside_decode_have_64_rows_in_equal_parts(engine):
    scheduler = scheduler_of(engine)
    scheduler.add(IDS[:5], GREEDY)
    scheduler.step()
    long, short = scheduler.add(IDS[:300], GREEDY), scheduler.add(IDS[50:70], GREEDY)
    before = engine.usage().rows
    scheduler.step()
    assert engine.usage().rows - before == 65
    assert (long.sequence.length, short.sequence.length) == (44, 20)
    assert len(short.generated) == 1
    scheduler.step()
    assert long.sequence.length == 108
    drain(scheduler)


def test_a_step_without_decode_takes_a_whole_chunk(engine):
    scheduler = scheduler_of(engine)
    request = scheduler.add(IDS[:300], GREEDY)
    scheduler.step()
    assert len(request.generated) == 1
    drain(scheduler)


def test_more_requests_than_rows_take_turns(tiny_model):
    ticks = iter(range(10**6))
    with Engine(tiny_model, EngineOptions(executor="reference", chunk=2)) as engine:
        scheduler = scheduler_of(engine, clock=lambda: next(ticks))
        requests = [scheduler.add([i], replace(GREEDY, max_tokens=20)) for i in range(1, 6)]
        while not all(request.generated for request in requests):
            scheduler.step()
        for _ in range(10):
            scheduler.step()
        counts = [len(request.generated) for request in requests if request.finish_reason is None]
        assert max(counts) - min(counts) <= 1
        drain(scheduler)


@pytest.mark.parametrize(
    ("needs", "budget", "expected"),
    [
        ([], 5, []),
        ([3], 5, [3]),
        ([9, 9], 5, [3, 2]),
        ([1, 9, 9], 9, [1, 4, 4]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([9], 0, [0]),
        ([0, 4], 9, [0, 4]),
    ],
)
def test_shares(needs, budget, expected):
    assert share_rows(needs, budget) == expected


def test_arrivals_start_in_order_and_know_how_long_they_waited(tiny_model):
    ticks = iter(range(10**6))
    with Engine(tiny_model, EngineOptions(executor="reference", max_sequences=1)) as engine:
        scheduler = scheduler_of(engine, clock=lambda: next(ticks))
        requests = [scheduler.add(IDS[:5], replace(GREEDY, max_tokens=3)) for _ in range(3)]
        assert (scheduler.num_waiting, scheduler.num_running) == (3, 0)
        scheduler.step()
        assert (scheduler.num_waiting, scheduler.num_running) == (2, 1)
        drain(scheduler)
        waits = [request.timings.queue_seconds for request in requests]
        assert waits == sorted(waits)
        assert waits[0] > 0


# ---- log-probabilities


def test_logprobs_are_the_model_s_own(engine):
    prompt = IDS[:150]
    params = replace(SEEDED, max_tokens=6, prompt_logprobs=2, logit_bias={5: 50.0})
    scheduler = scheduler_of(engine)
    request = scheduler.add(prompt, params)
    chunks = [chunk for _, chunk in drain(scheduler)]
    (plain,), _ = run(engine, (prompt, replace(params, temperature=0.0, logit_bias={}, repetition_penalty=1.0)))
    assert request.logprobs[0].top == plain.logprobs[0].top
    assert [entry.token for entry in request.logprobs] == request.generated
    assert [chunk.logprobs for chunk in chunks] == [(entry,) for entry in request.logprobs]
    assert chunks[0].prompt_logprobs == tuple(request.prompt_logprobs)
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
    assert request.prompt_logprobs[0] is None
    assert [entry.token for entry in request.prompt_logprobs[1:]] == prompt[1:]
    assert all(len(entry.top) == 2 for entry in request.prompt_logprobs[1:])


def test_a_prompt_s_logprobs_are_those_of_a_text_generated(make_engine):
    with make_engine() as engine:
        if engine.selector is not None and not engine.selector.prefill:
            pytest.skip("answers are written under thresholds and prompts are not, so they differ on purpose")
        (first,), _ = run(engine, (IDS[:70], GREEDY))
        both = [*IDS[:70], *first.generated]
        (second,), _ = run(engine, (both, replace(GREEDY, max_tokens=1, prompt_logprobs=3)))
        assert second.cached_tokens == 0
        assert second.prompt_logprobs[70:] == first.logprobs


# ---- ends and failures


def test_stop_tokens_end_as_end_tokens_do(engine):
    (plain,), _ = run(engine, (IDS[:9], GREEDY))
    token = plain.generated[4]
    first = plain.generated.index(token)
    (stopped,), _ = run(engine, (IDS[:9], replace(GREEDY, stop_token_ids=(token,))))
    assert stopped.finish_reason == "stop"
    assert stopped.generated == plain.generated[: first + 1]
    assert stopped.text == "".join(f"{token} " for token in plain.generated[:first])


class BadSink(Sink):
    """A sink that fails in the middle."""

    def __init__(self):
        self.count = 0

    def push(self, token):
        self.count += 1
        if self.count == 3:
            raise RuntimeError("sink")
        return "x", False

    def finish(self):
        raise RuntimeError("finish")


class BadConstraint:
    def mask(self):
        raise ValueError("grammar")

    def accept(self, token):
        pass


def test_one_failure_ends_one_request(engine):
    expected = result(run(engine, (IDS[:9], GREEDY))[0][0])
    sinks = iter([Sink(), BadSink(), Sink()])
    scheduler = scheduler_of(engine, sink=lambda: next(sinks))
    good = scheduler.add(IDS[:9], GREEDY)
    bad = scheduler.add(IDS[9:20], GREEDY)
    worse = scheduler.add(IDS[9:20], SamplingParams(allowed=BadConstraint))
    last = dict(drain(scheduler))
    assert result(good) == expected
    for request, message in ((bad, "sink"), (worse, "grammar")):
        assert last[request].finish_reason == request.finish_reason == "error"
        assert str(last[request].error) == message
    assert engine.pool.num_free == engine.pool.layout.num_blocks


def test_cancel_never_raises_and_works_at_any_time(engine, tiny_model):
    with Engine(tiny_model, EngineOptions(executor="reference", max_sequences=2, chunk=8)) as small:
        scheduler = scheduler_of(small, sink=BadSink)
        requests = [scheduler.add(IDS[:30], GREEDY) for _ in range(3)]
        scheduler.step()
        assert scheduler.cancel(requests[2]).finish_reason == "error"
        assert str(scheduler.cancel(requests[0]).error) == "finish"
        scheduler.cancel(requests[1])
        assert scheduler.cancel(requests[1]).finish_reason == "error"
        assert not scheduler.busy
        assert small.pool.num_free == small.pool.layout.num_blocks
    scheduler = scheduler_of(engine)
    waiting = scheduler.add(IDS[:30], GREEDY)
    chunk = scheduler.cancel(waiting)
    assert (chunk.finish_reason, chunk.text, chunk.timings.queue_seconds) == ("cancelled", "", 0.0)
    assert scheduler.step() == []


def test_ids_outside_the_vocabulary_are_refused_before_they_meet_others(engine):
    scheduler = scheduler_of(engine)
    with pytest.raises(UsageError, match="prompt: token 260 is outside the vocabulary of 260"):
        scheduler.add([1, 260], GREEDY)
    with pytest.raises(UsageError, match="logit_bias: token 999"):
        scheduler.add([1], replace(GREEDY, logit_bias={999: 1.0}))
    with pytest.raises(UsageError, match="stop_token_ids: token 300"):
        scheduler.add([1], replace(GREEDY, stop_token_ids=(300,)))
    assert not scheduler.busy


def test_blocks_held_elsewhere_end_a_lone_request_with_the_remedy(tiny_model):
    with Engine(tiny_model, EngineOptions(executor="reference", kv_tokens=128)) as engine:
        elsewhere, here = scheduler_of(engine), scheduler_of(engine)
        paused = elsewhere.add(IDS[:60], replace(GREEDY, max_tokens=60))
        elsewhere.step()
        request = here.add(IDS[:100], replace(GREEDY, max_tokens=5))
        ((owner, chunk),) = here.step()
        assert owner is request
        assert isinstance(chunk.error, ResourceError)
        assert "kv_tokens" in str(chunk.error)
        # One that fits at first may fail later; the others go on.
        grows = here.add(IDS[:60], replace(GREEDY, max_tokens=60))
        drain(here)
        drain(elsewhere)
        assert grows.finish_reason == "error"
        assert paused.finish_reason == "length"
