"""The live feed: frames that add up to what the engine did, and nothing while nobody looks."""

import asyncio
import json
from functools import partial

import httpx
import pytest

from server.serving import serving, until
from thinfer import LLM, SamplingParams
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.executor import LinearCount
from thinfer.engine.runtime import Usage
from thinfer.server.live import LiveFeed, densities
from thinfer.server.loop import EngineLoop, Prompt
from thinfer.server.state import ServerSettings, ServerState

SITES = [f"layers.{layer}.{kind}" for layer in range(2) for kind in ("qkv", "o", "gate_up", "down")]
PROMPT = list(b"It was a dark and stormy night")


@pytest.fixture
def llm(tiny_folder):
    with LLM(tiny_folder, executor="reference") as llm:
        yield llm


def watched(llm, *requests, feed_of=LiveFeed):
    """The events of a feed while a loop runs requests, one after the other."""

    async def run():
        loop = EngineLoop(llm)
        loop.start()
        feed = feed_of(llm, loop)
        events = feed.events()
        got = [await anext(events)]

        async def read():
            async for event in events:
                got.append(event)

        reading = asyncio.create_task(read())
        for prompt, params in requests:
            (ticket,) = loop.submit([Prompt(prompt, params)])
            while await ticket.take():
                pass
        await asyncio.sleep(0.5)
        feed.close()
        await reading
        await loop.stop()
        return got

    return asyncio.run(run())


def test_frames_add_up_to_what_the_engine_did(llm):
    llm.engine.selector = ThresholdSelector("teal", dict.fromkeys(SITES, 0.5))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    every_step = partial(LiveFeed, frame_seconds=0.0)
    first, *events = watched(llm, (PROMPT, params), (PROMPT[::-1], params), feed_of=every_step)
    assert first["model"] | {"kv_tokens": 0} == {
        "type": "llama",
        "layers": 2,
        "context": 512,
        "kv_tokens": 0,
        "max_sequences": 16,
        "sparse": {"method": "teal", "thresholds": 8, "sink_tokens": 4, "prefill": False},
    }
    frames = [frame for event in events for frame in event["frames"]]
    assert sum(frame["tokens"] for frame in frames) == 80
    usage = llm.engine.usage()
    assert sum(frame["rows"] for frame in frames) == usage.rows == 2 * (len(PROMPT) + 39)
    assert sum(frame["bytes"] for frame in frames) == sum(count.bytes for count in usage.sites.values())
    assert [frame["at"] for frame in frames] == sorted(frame["at"] for frame in frames)
    decode = [frame for frame in frames if frame["rows"] == frame["tokens"]]
    for frame in decode:
        assert len(frame["layers"]) == 2
        assert set(frame["kinds"]) == {"qkv", "o", "gate_up", "down"}
        assert min(frame["layers"]) - 1e-3 <= frame["density"] <= max(frame["layers"]) + 1e-3
        assert 0.1 < frame["density"] < 0.95
    # The first frame of each request holds its prompt, which runs dense.
    assert frames[0]["rows"] > frames[0]["tokens"]
    assert frames[0]["density"] > decode[-1]["density"]
    assert events[-1]["now"]["running"] == 0
    json.dumps(events, allow_nan=False)


def test_without_thresholds_every_weight_is_read(llm):
    _, *events = watched(llm, (PROMPT, SamplingParams(max_tokens=8, ignore_eos=True)))
    for frame in (frame for event in events for frame in event["frames"]):
        assert frame["density"] == 1.0
        assert frame["bytes"] == frame["dense_bytes"] > 0


def test_the_native_executor_reads_no_more_than_the_dense_pass(tiny_folder):
    with LLM(tiny_folder, threads=1) as llm:
        _, *events = watched(llm, (PROMPT, SamplingParams(max_tokens=16, ignore_eos=True)))
        frames = [frame for event in events for frame in event["frames"]]
        assert sum(frame["tokens"] for frame in frames) == 16
        assert all(frame["bytes"] == frame["dense_bytes"] > 0 for frame in frames)


def test_counters_are_read_only_while_somebody_looks(llm):
    async def run():
        loop = EngineLoop(llm)
        loop.start()
        feed = LiveFeed(llm, loop)
        watchers = loop._watchers
        readers = [feed.events() for _ in range(2)]
        for reader in readers:
            await anext(reader)
        assert len(watchers) == 1
        await readers[0].aclose()
        assert len(watchers) == 1
        await readers[1].aclose()
        assert not watchers
        # And again, from the counters as they are then.
        again = feed.events()
        await anext(again)
        assert len(watchers) == 1
        await again.aclose()
        await loop.stop()

    asyncio.run(run())


def test_densities_weigh_linears_by_their_size():
    counts = {
        "layers.0.qkv": LinearCount(active=4, total=8),
        "layers.0.down": LinearCount(active=0, total=8),
        "layers.1.qkv": LinearCount(active=8, total=8),
        "lm_head": LinearCount(active=8, total=8),
    }
    usage = Usage(1, counts, {"layers.0.qkv": 30, "layers.0.down": 10, "layers.1.qkv": 30, "lm_head": 500})
    assert densities(usage, 3) == ([0.375, 1.0, 1.0], {"qkv": 0.75, "down": 0.0})


def test_the_stream_over_http(tiny_folder):
    state = ServerState(ServerSettings(("tiny",), api_key="k"), lambda: LLM(tiny_folder, executor="reference"))
    with serving(state) as url:
        assert httpx.get(url + "/v1/live").status_code == 401
        client = httpx.Client(base_url=url, headers={"Authorization": "Bearer k"}, timeout=30)
        with client, client.stream("GET", "/v1/live") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
            assert next(lines)["model"]["layers"] == 2
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
            frames = next(event["frames"] for event in lines if event["frames"])
            assert frames[0]["rows"] > 0
        loop = state.model.loop
        until(lambda: not loop._watchers)


def test_an_open_stream_does_not_hold_the_server(tiny_folder):
    state = ServerState(ServerSettings(("tiny",)), lambda: LLM(tiny_folder, executor="reference"))
    with httpx.Client(timeout=30) as client, serving(state) as url:
        stream = client.send(client.build_request("GET", url + "/v1/live"), stream=True)
        next(stream.iter_lines())
        # Leaving the block ends the server and fails when that takes long.
