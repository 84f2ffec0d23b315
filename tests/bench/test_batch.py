"""Several streams together: the rounds and rows on workers that run no model, our worker, and the real peer."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from thinfer import LLM, SamplingParams
from thinfer.bench import llama_cpp_worker, report
from thinfer.bench.batch import engine_needs, measure_streams, prompts_of
from thinfer.bench.throughput import START_TOKENS, Contender
from thinfer.bench.worker import StreamsSample, Worker
from thinfer.errors import ThinferError, UsageError


@dataclass
class FakeWorker:
    """Its steps take 10 ms, the last one 100; its answers are numbered by round."""

    log: list
    name: str
    calls: list = field(default_factory=list)

    def streams(self, prompts, steps, *, answers=None, check=False):
        self.log.append(self.name)
        self.calls.append((prompts, answers, check))
        own = [[len(self.calls)] * (steps + 1) for _ in prompts]
        seconds = [0.01] * (steps - 1) + [0.1]
        return StreamsSample(seconds, answers or own, 0.5, 1e6, 0.75 if check else None)

    def rss_bytes(self):
        return 5


def contender(log, name, *, path="a.gguf", is_peer=False):
    facts = {
        "model": name,
        "path": path,
        "size_bytes": 2**20,
        "n_params": 10**6,
        "backend": "llama.cpp" if is_peer else "cpu",
        "threads": 2,
        "sparsity": 0.0,
        "commit": "abc",
    }
    return Contender(FakeWorker(log, name), facts, list(range(200)), is_peer=is_peer)


def test_rounds_alternate_and_the_peer_runs_our_tokens():
    log = []
    ours, peer = contender(log, "A"), contender(log, "a.gguf", is_peer=True)
    rows = measure_streams([ours, peer], [1, 3], 10, 2)
    assert log == ["A", "a.gguf"] * 6
    assert [(row["streams"], row["backend"]) for row in rows] == [(n, b) for n in (1, 3) for b in ("cpu", "llama.cpp")]
    for turn, ((prompts, answers, check), (own_prompts, none, _)) in enumerate(
        zip(peer.worker.calls, ours.worker.calls, strict=True), 1
    ):
        assert prompts == own_prompts
        assert none is None
        assert answers == [[turn] * 11 for _ in prompts]
        assert check == (turn in (1, 4)), "the check belongs to the untimed round"
    assert [row["agreement"] for row in rows] == [None, 0.75, None, 0.75]
    assert rows[0]["ratio_median"] == 1.0
    assert rows[2]["t_s_median"] == pytest.approx(3 * 10 / 0.19)
    assert rows[2]["median_itl_ms"] == pytest.approx(10)
    assert rows[2]["p99_itl_ms"] == pytest.approx(100)


def test_the_table_and_the_json_hold_the_rows():
    rows = measure_streams([contender([], "A"), contender([], "a.gguf", is_peer=True)], [4], 5, 1)
    assert json.loads(report.as_json(rows)) == rows
    lines = report.as_streams_md(rows).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "1.00x" in lines[2]
    assert "0.750" in lines[3]
    assert "ratio" not in report.as_streams_md(measure_streams([contender([], "A")], [1], 5, 1))


def test_every_stream_has_a_prompt_of_its_own():
    for streams in (1, 7, 16):
        prompts = prompts_of(list(range(144)), streams)
        assert len({tuple(prompt) for prompt in prompts}) == streams
        assert {len(prompt) for prompt in prompts} == {START_TOKENS}


def test_no_rounds_are_refused():
    with pytest.raises(UsageError):
        measure_streams([], [1], 4, 0)


@pytest.fixture(scope="module")
def worker(tiny_folder):
    with Worker.ours() as worker:
        options = {"executor": "reference", "threads": 1, "max_model_len": 100}
        worker.load({"model": str(tiny_folder), "text_tokens": 20, **options, **engine_needs([3], 20)})
        yield worker


def test_our_streams_are_what_each_prompt_gives_alone(worker, tiny_folder):
    prompts = [[5, 6, 7], [8, 9, 10, 11], [12]]
    sample = worker.streams(prompts, 20)
    assert len(sample.step_seconds) == 20
    assert sample.density == 1.0
    assert sample.agreement is None
    with LLM(tiny_folder, executor="reference", threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
        assert [list(llm.generate(prompt, params).token_ids) for prompt in prompts] == sample.answers
    again = worker.streams(prompts[:1], 4)
    assert again.answers == [sample.answers[0][:5]]


def test_streams_that_do_not_fit_are_refused(worker):
    with pytest.raises(ThinferError, match="--streams or -n"):
        worker.streams([[5] * 16], 90)


@pytest.mark.peer
@pytest.mark.model
@pytest.mark.slow
def test_the_real_peer_computes_the_same():
    python = os.environ.get("THINFER_PEER_PYTHON")
    if not python:
        pytest.skip("THINFER_PEER_PYTHON names no Python with llama-cpp-python")
    model = Path.home() / ".cache/thinfer/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not model.exists():
        pytest.skip(f"{model} is not there; `thinfer demo` fetches it")
    with Worker.ours() as ours, Worker([python, llama_cpp_worker.__file__], "llama.cpp") as peer:
        loaded = ours.load({"model": str(model), "threads": 1, "text_tokens": 200, **engine_needs([3], 16)})
        peer.load({"model": str(model), "threads": 1, "kv_type": "f16", "max_model_len": 64})
        prompts = prompts_of(loaded["tokens"], 3)
        answers = ours.streams(prompts, 16).answers
        sample = peer.streams(prompts, 16, answers=answers, check=True)
        assert sample.agreement > 0.7, "int8 activations change few of the likeliest tokens"
        assert len(sample.step_seconds) == 16
