"""The server under a crowd of all sorts of clients: no leak, no stuck request, no wrong answer, proper statuses.

20 seconds on the tiny model, always. THINFER_SOAK_SECONDS=600 makes it ten minutes, and THINFER_SOAK_MODEL names
another model.
"""

import os
import time
from dataclasses import replace

import pytest

from server.soak import Crowd, Question, server_process
from server.soak import growth as grown
from thinfer import LLM

SECONDS = float(os.environ.get("THINFER_SOAK_SECONDS", "20"))
CONTEXT, PLACES, WAITING = 256, 4, 6
# So tight that requests are preempted: two of the long ones do not fit.
KV_TOKENS = CONTEXT + 64
SHARED = {"max_model_len": CONTEXT, "kv_tokens": KV_TOKENS, "threads": 1}


@pytest.fixture(scope="module")
def model(served_folder):
    return os.environ.get("THINFER_SOAK_MODEL", str(served_folder))


@pytest.fixture(scope="module")
def questions(model):
    """Requests of all kinds with the answers of runs of their own."""
    bodies = [
        {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0},
        {"prompt": "Once upon a time, there", "max_tokens": 40, "temperature": 1.0, "seed": 7},
        {"prompt": "x" * 100, "max_tokens": 10, "temperature": 0.7, "top_p": 0.9, "seed": 3},
        {"prompt": "x" * 100 + "y", "max_tokens": 60, "temperature": 0.7, "top_k": 20, "seed": 4, "ignore_eos": True},
        {"prompt": "A", "max_tokens": 90, "temperature": 0, "repetition_penalty": 1.2, "ignore_eos": True},
        {"prompt": "Long ago", "max_tokens": 200, "temperature": 0, "ignore_eos": True},
        {"prompt": "Long, long ago", "max_tokens": 200, "temperature": 1.0, "seed": 1, "ignore_eos": True},
        {"prompt": "The sun", "max_tokens": 30, "temperature": 0, "stop": ["e"]},
    ]
    with LLM(model, **SHARED) as llm:

        def alone(body):
            settings = {name: value for name, value in body.items() if name not in ("prompt", "stop")}
            # What a request leaves out is the model's own, as the server has it.
            params = replace(llm.default_params, **settings, stop=tuple(body.get("stop", ())))
            return llm.generate(body["prompt"], params).text

        return [Question(body, alone(body)) for body in bodies]


OPTIONS = [
    *("--max-model-len", str(CONTEXT), "--kv-tokens", str(KV_TOKENS), "--threads", "1"),
    *("--max-num-seqs", str(PLACES), "--max-waiting", str(WAITING), "--max-body-mib", "1"),
]


@pytest.mark.slow
def test_soak(model, questions):
    with server_process(model, OPTIONS) as server:
        server.until_ready()
        crowd = Crowd(server, questions, CONTEXT, clients=PLACES + WAITING + 4)
        sizes = crowd.run(SECONDS)
        print(f"{crowd.done.total()} requests: {dict(sorted(crowd.done.items()))}; {sizes[-1] >> 20} MiB")
        assert not crowd.wrong, f"{len(crowd.wrong)} of {crowd.done.total()}, first: {crowd.wrong[:3]}"
        for thing in ("asks 200", "streams 200", "leaves 200", "gives up", "nonsense 400", "wrong key 401"):
            assert crowd.done[thing], f"nobody did: {thing}; {crowd.done}"
        assert any(thing.endswith(" 429") for thing in crowd.done), "the queue was never full"
        assert server.metric("thinfer_num_preemptions_total") > 0
        end = time.monotonic() + 30
        while server.metric("thinfer_num_requests_running") or server.metric("thinfer_num_requests_waiting"):
            assert time.monotonic() < end, "a request is stuck"
            time.sleep(0.1)
        assert server.metric("thinfer_kv_cache_usage_perc") == 0
        assert grown(sizes) < 0.05, [size >> 20 for size in sizes[:: len(sizes) // 20]]
        assert server.end() == 0


def test_a_killed_server_starts_again(served_folder):
    for _ in range(2):
        with server_process(str(served_folder), OPTIONS) as server:
            server.until_ready()
            server.process.kill()
            assert server.process.wait(30) == -9


def test_growth_is_that_of_the_later_half():
    assert grown([1, 50, 100, 100, 100, 100, 110, 110]) == pytest.approx(0.1)
