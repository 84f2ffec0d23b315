"""The recall of predictors as a server reports it: none without them, and what the engine counted with them."""

import asyncio
from contextlib import closing

import httpx
import pytest

from activation.relu_llama import write_predictable
from engine.predicted import make_predictor, write_predictors
from server.serving import metric, running_server, until
from thinfer import LLM, SamplingParams
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from thinfer.server.live import LiveFeed
from thinfer.server.loop import EngineLoop, Prompt, RecentRecall

NAMES = ("predictor_recall", "predictor_needed_neurons_total", "predictor_found_neurons_total")
PROMPT = list(b"It was a dark and stormy night")


@pytest.fixture(scope="module", params=["cpu", "reference"])
def executor(request):
    if request.param == "cpu":
        pytest.importorskip("thinfer._core")
    return request.param


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_predictable(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """With predictors that miss a part."""
    with closing(open_checkpoint(base)) as checkpoint:
        predictors = [make_predictor(load_model(checkpoint), "neurons", layer, threshold=1.0) for layer in (0, 1)]
    return write_predictors(tmp_path_factory.mktemp("predicted") / "out", base, predictors)


def complete(url, tokens):
    """The metrics' text after a request, when the engine has told of all its tokens."""
    rows = metric(url, "thinfer_model_rows_total") + len(["<s>", *"abc"]) + tokens - 1
    body = {"model": "tiny", "prompt": "abc", "max_tokens": tokens, "ignore_eos": True}
    assert httpx.post(url + "/v1/completions", json=body, timeout=60).status_code == 200
    until(lambda: metric(url, "thinfer_model_rows_total") == rows)
    return httpx.get(url + "/metrics").text


def values(text):
    found = dict(line.split() for line in text.splitlines() if "thinfer_predictor" in line and line[0] != "#")
    return [float(found.pop(f"thinfer_{name}")) for name in NAMES]


def test_it_comes_with_the_first_sample(folder, executor):
    with running_server(folder, engine={"executor": executor}) as url:
        assert "predictor" not in httpx.get(url + "/metrics").text
        # A prompt alone runs no predictor.
        assert "predictor" not in complete(url, 1)
        # Fewer than two turns of samples: nothing is forgotten yet.
        text = complete(url, 100)
        recall, needed, found = values(text)
        assert recall == found / needed
        assert 0.3 < recall < 0.9
        for name in NAMES:
            kind = "counter" if name.endswith("_total") else "gauge"
            assert f"# TYPE thinfer_{name} {kind}" in text
        assert values(complete(url, 100))[1] > needed


def test_there_is_none_without_predictors(base, folder, executor):
    for model, engine in ((base, {}), (folder, {"neurons": "off"}), (folder, {"sparsity": False})):
        with running_server(model, engine={"executor": executor} | engine) as url:
            text = complete(url, 200)
            assert "thinfer_active_neuron_ratio" in text
            assert "predictor" not in text


def test_the_live_view_has_it(base, folder):
    async def last(model):
        with LLM(model, executor="reference") as llm:
            loop = EngineLoop(llm)
            loop.start()
            feed = LiveFeed(llm, loop)
            events = feed.events()
            first = await anext(events)
            (ticket,) = loop.submit([Prompt(PROMPT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))])
            while await ticket.take():
                pass
            await loop.stop()
            async for event in events:
                if event["now"]["running"] == 0:
                    feed.close()
            return first["now"]["recall"], event["now"]["recall"], llm.engine.usage().recall

    before, after, counted = asyncio.run(last(folder))
    assert before is None
    assert after == round(counted, 4)
    assert asyncio.run(last(base)) == (None, None, None)


def test_it_is_that_of_the_last_turns_of_samples():
    recent = RecentRecall(64)
    assert recent.add(0, 0, 0) is None
    assert recent.add(10, 100, 50) == 0.5
    assert recent.add(63, 200, 150) == 0.75
    assert recent.add(64, 200, 150) == 0.75
    assert recent.add(100, 300, 250) == pytest.approx(250 / 300)
    # The first turn is forgotten when the second ends.
    assert recent.add(130, 400, 350) == 1.0
    assert recent.add(131, 600, 350) == 0.5
    assert recent.add(200, 600, 350) == 0.0
    assert recent.add(264, 600, 350) is None
