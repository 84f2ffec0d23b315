"""The load test: its plan, its figures, and a real server under it."""

import asyncio
import csv
import itertools
import math

import httpx
import pytest

from server.serving import running_server
from thinfer.bench.load import LoadClient, ServerFailure, Timed
from thinfer.bench.serving import LoadOptions, as_md, measure_serving, parse_goodput, summary
from thinfer.bench.workload import Length, PlannedRequest, fit, plan, read_trace
from thinfer.errors import CheckpointError, UsageError
from tiny_llama import write_tiny_llama

TEXT = list(range(100, 200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("load") / "llama")


def test_a_plan_can_be_repeated_and_its_prompts_differ():
    lengths = [Length(30, 5)] * 20
    first, again = (plan(lengths, TEXT, rate=10, seed=3) for _ in range(2))
    assert first == again
    assert first != plan(lengths, TEXT, rate=10, seed=4)
    assert all(len(request.prompt) == 30 and request.answer == 5 for request in first)
    assert len({tuple(request.prompt) for request in first}) > 10


def test_arrivals_are_a_poisson_process_of_the_rate():
    starts = [request.start for request in plan([Length(1, 1)] * 4000, TEXT, rate=20)]
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.08), "exponential times have a deviation as large as their mean"
    assert {request.start for request in plan([Length(1, 1)] * 9, TEXT)} == {0.0}


def test_prompts_longer_than_the_text_repeat_it():
    (request,) = plan([Length(250, 1)], TEXT)
    assert len(request.prompt) == 250
    assert request.prompt[:100] == request.prompt[100:200]


@pytest.mark.parametrize(
    ("length", "cut"),
    [
        (Length(5, 5), Length(5, 5)),
        (Length(100, 5), Length(95, 5)),
        (Length(5, 100), Length(5, 95)),
        (Length(90, 80), Length(50, 50)),
    ],
)
def test_what_is_longer_than_the_context_is_cut(length, cut):
    assert fit(length, 100) == cut


def test_no_rate_is_refused():
    with pytest.raises(UsageError, match="request-rate"):
        plan([Length(1, 1)], TEXT, rate=0)


def trace(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_gives_lengths_in_its_order(tmp_path):
    lines = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\nx,0,8\nx,3180,8\n"
    assert read_trace(trace(tmp_path, lines)) == [Length(4808, 10), Length(3180, 8)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "ContextTokens"),
        ("", "ContextTokens"),
        ("ContextTokens,GeneratedTokens\n5,many\n", "line 2"),
        ("ContextTokens,GeneratedTokens\n5\n", "line 2"),
        ("ContextTokens,GeneratedTokens\n0,1\n", "no request"),
    ],
)
def test_a_trace_that_is_none(tmp_path, text, said):
    with pytest.raises(UsageError, match=said):
        read_trace(trace(tmp_path, text))


def test_a_trace_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.csv"):
        read_trace(tmp_path / "absent.csv")


@pytest.mark.parametrize("given", [["ttft"], ["speed:5"], ["ttft:fast"], ["tpot:0"], ["itl:5"], [""]])
def test_goodput_limits_that_are_none(given):
    with pytest.raises(UsageError, match="--goodput"):
        parse_goodput(given)


def test_goodput_limits_may_be_repeated_or_listed():
    expected = {"ttft": 500.0, "tpot": 50.0, "e2el": 9000.0}
    assert parse_goodput(["ttft:500", "tpot:50,e2el:9000"]) == expected
    assert parse_goodput(["ttft:500 tpot:50 e2el:9000"]) == expected


def timed(started, first, between, error=None):
    whole = first + sum(between)
    return Timed(10, 1 + len(between), 2, started, first, list(between), whole, error)


def test_figures_of_known_times():
    runs = [timed(0.0, 0.1, [0.02] * 5), timed(0.1, 0.3, [0.02] * 4 + [0.12]), timed(0.2, 0.0, [], "HTTP 429: full")]
    result = summary(runs, LoadOptions(goodput={"ttft": 200}, percentiles=(50, 99)))
    assert (result["completed"], result["failed"], result["errors"]) == (2, 1, {"HTTP 429: full": 1})
    assert result["duration"] == pytest.approx(0.6)
    assert result["output_throughput"] == pytest.approx(12 / 0.6)
    assert result["total_input_tokens"] == 20
    assert result["request_throughput"] == pytest.approx(2 / 0.6)
    assert result["request_goodput"] == pytest.approx(1 / 0.6)
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["median_tpot_ms"] == pytest.approx(30)
    assert result["median_itl_ms"] == pytest.approx(20)
    assert 110 < result["p99_itl_ms"] < 120
    assert result["p50_e2el_ms"] == pytest.approx(350)
    assert result["peak_concurrent_requests"] == 2
    shown = as_md({"model": "m", "cut_requests": 1} | result)
    for words in ("Request goodput", "P99", "TTFT", "HTTP 429", "Output token throughput", "cut to the context"):
        assert words in shown


def test_answers_of_one_token_have_no_time_per_token():
    result = summary([timed(0.0, 0.1, [])], LoadOptions())
    assert result["mean_tpot_ms"] is None
    assert "TPOT" in as_md({"model": "m", "cut_requests": 0} | result)


def test_nothing_but_failures_is_a_failure():
    with pytest.raises(ServerFailure, match="none of 2 requests succeeded; most often: no"):
        summary([timed(0, 0, [], "no"), timed(0, 0, [], "no")], LoadOptions())


def test_a_real_server_under_load(folder):
    with running_server(folder, api_key="k") as url:
        lengths = [Length(20, 8)] * 9 + [Length(900, 40)]
        options = LoadOptions(request_rate=200, max_concurrency=3, goodput={"ttft": 60_000})
        result = measure_serving(lambda: LoadClient(url, api_key="k"), lengths, options)
    assert (result["model"], result["completed"], result["failed"]) == ("tiny", 10, 0)
    assert result["total_output_tokens"] == 9 * 8 + 40
    assert result["total_input_tokens"] == 9 * 20 + 472
    assert result["cut_requests"] == 1
    assert result["peak_concurrent_requests"] == 3
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]


def test_refused_requests_are_counted(folder):
    async def run():
        async with LoadClient(url) as client:
            await client.open()
            return await client.run([PlannedRequest(0.0, [5], 300)] * 8)

    with running_server(folder, engine={"max_sequences": 1}, max_waiting=1) as url:
        runs = asyncio.run(run())
    errors = [each.error for each in runs if each.error]
    assert len(errors) == 6
    assert all(error.startswith("HTTP 429: ") for error in errors)
    assert [each.output_tokens for each in runs if not each.error] == [300, 300]


@pytest.mark.parametrize(
    "sent", ["data: {\n\n", "data: []\n\n", 'data: {"choices": [5]}\n\n', 'data: {"usage": {"a": 1}}\n\n']
)
def test_a_stream_of_another_form_is_a_failed_request_and_no_more(sent):
    def answer(request):
        return httpx.Response(200, text=sent, headers={"content-type": "text/event-stream"})

    async def send():
        async with LoadClient("http://x.invalid") as client:
            client._http = httpx.AsyncClient(base_url="http://x.invalid", transport=httpx.MockTransport(answer))
            return await client.send(PlannedRequest(0.0, [1, 2], 3))

    assert "no stream" in asyncio.run(send()).error


def test_failures_name_the_server(folder):
    with pytest.raises(ServerFailure, match="thinfer serve"):
        measure_serving(lambda: LoadClient("http://127.0.0.1:1"), [Length(1, 1)], LoadOptions())
    with running_server(folder, api_key="k") as url:
        with pytest.raises(ServerFailure, match="HTTP 401: missing or wrong API key"):
            measure_serving(lambda: LoadClient(url), [Length(1, 1)], LoadOptions())
        with pytest.raises(ServerFailure, match="no model 'gpt'; it has tiny"):
            measure_serving(lambda: LoadClient(url, model="gpt", api_key="k"), [Length(1, 1)], LoadOptions())


def test_the_verb(folder, tmp_path):
    import json

    from typer.testing import CliRunner

    from thinfer.cli.main import app

    path = tmp_path / "lengths.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["ContextTokens", "GeneratedTokens"], [12, 3], [8, 4]])
    with running_server(folder) as url:
        options = ["--url", url + "/v1", "--num-prompts", "2", "--trace", str(path), "--request-rate", "50"]
        shown = CliRunner().invoke(app, ["bench", "serve", *options, "-o", "json", "--metric-percentiles", "90,99"])
        assert shown.exit_code == 0, shown.output
        result = json.loads(shown.stdout)
        assert (result["total_input_tokens"], result["total_output_tokens"], result["request_rate"]) == (20, 7, 50)
        assert "p90_itl_ms" in result
        refused = CliRunner().invoke(app, ["bench", "serve", *options, "--num-prompts", "3"])
        assert refused.exit_code == 2
    for wrong in (["--request-rate", "0"], ["--request-rate", "x"], ["--metric-percentiles", "101"]):
        assert CliRunner().invoke(app, ["bench", "serve", *wrong]).exit_code == 2
