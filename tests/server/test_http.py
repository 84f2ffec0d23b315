"""What HTTP clients meet that no library shields them from: wrong requests, limits, keys, pings, disconnects."""

import json
import re
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest

from server.serving import metric, running_server, serving, until
from thinfer import LLM
from thinfer.errors import CheckpointError
from thinfer.server.state import ServerSettings, ServerState

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
SELF_REFERENCE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server, timeout=60) as client:
        yield client


def failure(response, status):
    """The error object of a failed answer, which has OpenAI's form and names no place of the host."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/tmp" not in response.text
    assert "Traceback" not in response.text
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, {}, "prompt", "missing"),
        (COMPLETIONS, {"prompt": 5}, "prompt", ""),
        (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt.1", ""),
        (COMPLETIONS, {"prompt": [99999]}, "prompt", "outside the vocabulary"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "outside the vocabulary"),
        (COMPLETIONS, {"prompt": [[1], [2**70]]}, "prompt", "outside the vocabulary"),
        (COMPLETIONS, {"prompt": "\ud800"}, None, "Unicode"),
        (COMPLETIONS, {"prompt": "x", "temperature": "1"}, "temperature", "number"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "greater than or equal to 0"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 2, "min_tokens": 3}, None, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "stop": [""]}, None, "stop"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, None, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5000": 1}}, None, "outside the vocabulary"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of", "not supported"),
        (COMPLETIONS, {"prompt": "x", "tempreature": 1}, "tempreature", "not a known field"),
        (COMPLETIONS, {"prompt": ["x"] * 100, "n": 100}, None, "may run and wait"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role", ""),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", ""),
        (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "functions", "not supported"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "needs tools"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        (CHAT, {"messages": USER, "continue_final_message": True}, "messages", "assistant"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "of its own"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        (CHAT, {"messages": USER, "response_format": SELF_REFERENCE}, "response_format", "cannot be followed"),
        ("/tokenize", {}, "prompt", "one of"),
        ("/detokenize", {"tokens": [100000]}, "tokens", "outside the vocabulary"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(http, path, body, param, said):
    error = failure(http.post(path, content=json.dumps(body), headers={"content-type": "application/json"}), 400)
    assert error["param"] == param
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_fields_that_change_nothing_are_taken(http):
    neutral = {"best_of": 1, "store": False, "user": "me", "metadata": {"a": "b"}, "suffix": None, "priority": 0}
    assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, **neutral}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"prompt": 1e999}', b"{}x"])
def test_broken_bodies(http, body):
    failure(http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_does_not_say_it_is_json(http, kind):
    headers = {} if kind is None else {"content-type": kind}
    said = failure(http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers), 400)["message"]
    assert "Content-Type: application/json" in said


@pytest.mark.parametrize("field", ["chat_template_kwargs", "tools", "arguments"])
def test_a_body_that_is_nested_too_deeply(http, field):
    calls = [{"function": {"name": "f", "arguments": {"a": "DEEP"}}}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"const": "DEEP"}}}]
    further = {
        "chat_template_kwargs": {"chat_template_kwargs": {"a": "DEEP"}},
        "tools": {"tool_choice": "required", "tools": tools},
        "arguments": {"messages": [*USER, {"role": "assistant", "tool_calls": calls}]},
    }[field]
    body = json.dumps({"messages": USER} | further).replace('"DEEP"', '{"a":' * 900 + "1" + "}" * 900)
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert "nested too deeply" in failure(answer, 400)["message"]


def test_a_prompt_that_is_too_long_in_any_case_is_not_cut_into_tokens(http, monkeypatch):
    text = "x" * 20_000

    def encode(*_, **__):
        raise AssertionError("not before its length was looked at")

    monkeypatch.setattr("thinfer.text.tokenizer.Tokenizer.encode", encode)
    for path, body in ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        error = failure(http.post(path, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        # The longest token of the tiny model is <|assistant|>: 13 bytes.
        assert re.search(r"has 200\d\d bytes, which are at least 15\d\d tokens, and the context 1024", error["message"])


def test_a_schema_that_is_none(http):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    error = failure(http.post(CHAT, json={"messages": USER, "response_format": form}), 400)
    assert error["code"] == "invalid_schema"


def test_wrong_paths_and_methods(http):
    assert failure(http.get("/v2/models"), 404)["type"] == "not_found_error"
    assert failure(http.get(COMPLETIONS), 405)["code"] == "method_not_allowed"
    assert http.get(COMPLETIONS).headers["allow"] == "POST"
    failure(http.post("/v1/embeddings", json={"input": "x"}), 501)


def test_control_tokens_in_plain_text_are_control_tokens(http):
    """As with vLLM, with and without add_special_tokens; in a chat's messages they stay text."""
    eos, user = 257, 258

    def ids(**body):
        return http.post("/tokenize", json=body).json()["tokens"]

    text = "<|user|>a</s>"
    assert ids(prompt=text, add_special_tokens=False) == [user, *ids(prompt="a", add_special_tokens=False), eos]
    assert ids(prompt=text)[:2] == [256, user]
    assert http.post("/detokenize", json={"tokens": ids(prompt=text)}).json() == {"prompt": "<s>" + text}
    body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 0}
    answer = http.post(COMPLETIONS, json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(ids(prompt=text)) == 4
    logprobs, shown = answer["choices"][0]["logprobs"], answer["choices"][0]["text"]
    assert logprobs["tokens"][:4] == ["<s>", "<|user|>", "a", "</s>"]
    assert logprobs["text_offset"][1:5] == [0, 8, 9, len(text)]
    assert shown.startswith(text)
    assert user not in ids(messages=[{"role": "user", "content": text}])[2:]


def test_tokens_there_and_back(http):
    answer = http.post("/tokenize", json={"prompt": "Grüße", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 8
    bare = http.post("/tokenize", json={"prompt": "Grüße", "add_special_tokens": False}).json()["tokens"]
    assert answer["tokens"] == [256, *bare]
    assert http.post("/detokenize", json={"tokens": bare}).json() == {"prompt": "Grüße"}
    chat = http.post("/tokenize", json={"messages": USER}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": chat}).json() == {"prompt": "<s><|user|>Hi</s><|assistant|>"}
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")


def test_a_document_describes_every_endpoint(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/v1/models", "/health", "/metrics"} <= set(paths)


def test_metrics_count(http, server):
    before = metric(server, "thinfer_generation_tokens_total"), metric(server, "thinfer_prompt_tokens_total")
    http.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
    assert metric(server, "thinfer_generation_tokens_total") == before[0] + 5
    assert metric(server, "thinfer_prompt_tokens_total") == before[1] + 4
    text = http.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "active_neuron_ratio"):
        assert f"\nthinfer_{name} " in text
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert f"thinfer_{name}_bucket" in text


def test_a_client_that_goes_away_ends_its_request(http, server):
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        until(lambda: metric(server, "thinfer_num_requests_running") == 1)
    until(lambda: metric(server, "thinfer_num_requests_running") == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server + COMPLETIONS, json=body | {"stream": False}, timeout=0.5)
    until(lambda: metric(server, "thinfer_num_requests_running") == 0)


def test_a_prompt_that_takes_long_is_pinged(served_folder):
    with running_server(served_folder, engine={"max_sequences": 1}, ping_seconds=0.05) as url:
        first = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with (
            httpx.stream("POST", url + COMPLETIONS, json=first) as busy,
            httpx.stream("POST", url + COMPLETIONS, json=first | {"max_tokens": 1}) as waiting,
        ):
            lines = busy.iter_lines()
            next(lines)
            assert next(waiting.iter_lines()) == ": ping"


def test_the_key(served_folder):
    with running_server(served_folder, api_key="secret") as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = httpx.get(url + "/v1/models", headers=headers)
            assert failure(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        failure(httpx.post(url + COMPLETIONS, json={"prompt": "x"}), 401)
        failure(httpx.get(url + "/metrics"), 401)
        assert httpx.get(url + "/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.get(url + "/").status_code == 200


def test_other_origins_are_let_in_when_asked_alone(http, served_folder):
    assert "access-control-allow-origin" not in http.get("/v1/models", headers={"Origin": "http://a.example"}).headers
    with running_server(served_folder, cors_origins=("http://a.example",), api_key="secret") as url:
        preflight = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        assert httpx.options(url + CHAT, headers=preflight).status_code == 200
        answer = httpx.get(url + "/health", headers={"Origin": "http://a.example"})
        assert answer.headers["access-control-allow-origin"] == "http://a.example"


def test_large_and_slow_bodies(served_folder):
    with running_server(served_folder, max_body_bytes=1000, body_seconds=0.3) as url:
        assert failure(httpx.post(url + COMPLETIONS, json={"prompt": "x" * 2000}), 413)["code"] == "request_too_large"
        failure(httpx.post(url + COMPLETIONS, content=iter([b"x" * 600] * 3)), 413)
        with _connection(url) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert b" 408 " in raw.recv(4096)


def test_what_is_no_http_gets_the_form_of_all_failures(server):
    for sent in (b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"):
        with _connection(server) as raw:
            raw.sendall(sent)
            head, _, body = _all_of(raw).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"


def test_nothing_but_the_head_when_asked_for_it(http):
    answer = http.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    assert http.head("/").status_code == 200


def test_names_that_are_not_the_servers(served_folder):
    with running_server(served_folder, host_names=("llm.home",)) as url:
        for name in ("127.0.0.1:8737", "localhost", "[::1]:80", "192.168.1.5", "LLM.home:80", "a.localhost"):
            assert httpx.get(url + "/health", headers={"Host": name}).status_code == 200, name
        for name in ("evil.example", "evil.example:8737", "localhost.evil.example", "127.0.0.1.evil.example"):
            error = failure(httpx.get(url + "/v1/models", headers={"Host": name}), 403)
            assert "--allowed-host" in error["message"]


def test_large_headers_are_refused(http, server):
    with _connection(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 50_000 + b"\r\n\r\n")
        assert raw.recv(4096)[9:12] in (b"431", b"400"), "by the server, or by the parser when they come in pieces"


def test_headers_that_do_not_come(server, monkeypatch):
    monkeypatch.setattr("thinfer.server.limits.HEADER_SECONDS", 0.2)
    with _connection(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost")
        assert raw.recv(4096) == b"", "the connection is closed"


def test_a_full_queue_says_when_to_come_back(served_folder):
    with running_server(served_folder, engine={"max_sequences": 1}, max_waiting=1) as url:
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body), httpx.stream("POST", url + COMPLETIONS, json=body):
            response = httpx.post(url + COMPLETIONS, json={"prompt": "x"})
            assert failure(response, 429)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        until(lambda: httpx.post(url + COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200)


def test_a_request_that_takes_too_long(served_folder):
    with running_server(served_folder, request_seconds=0.3) as url:
        body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
        assert failure(httpx.post(url + COMPLETIONS, json=body), 504)["code"] == "timeout"
        lines = httpx.post(url + COMPLETIONS, json=body | {"stream": True}).text.splitlines()
        assert json.loads(lines[-4].removeprefix("data: "))["error"]["code"] == "timeout"
        assert lines[-2] == "data: [DONE]"
        until(lambda: metric(url, "thinfer_num_requests_running") == 0)


def test_a_stream_whose_prompt_takes_too_long_is_told_so(served_folder):
    def load():
        llm = LLM(served_folder, executor="reference", chunk=16)
        step = llm.engine.step
        llm.engine.step = lambda *given, **named: (time.sleep(0.1), step(*given, **named))[1]
        return llm

    state = ServerState(ServerSettings(("tiny",), request_seconds=0.5), load)
    with serving(state) as url:
        begin = time.monotonic()
        answer = httpx.post(url + COMPLETIONS, json=LONG | {"prompt": "x" * 900, "stream": True}, timeout=60)
        assert time.monotonic() - begin < 4, "when its time is over, not when its first token comes after 6 seconds"
    lines = [line for line in answer.text.splitlines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
    assert lines[-1] == "data: [DONE]"


def test_a_slow_reader_holds_nobody_up(server):
    body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
    with _connection(server) as raw:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        raw.sendall(head.encode() + b"\r\n\r\n" + body)
        start = time.monotonic()
        answer = httpx.post(server + COMPLETIONS, json={"prompt": "y", "max_tokens": 20}, timeout=60)
        assert answer.status_code == 200
        until(lambda: metric(server, "thinfer_num_requests_running") == 0)
        received = b""
        while b"[DONE]" not in received:
            part = raw.recv(1 << 16)
            assert part, "the stream broke off"
            received += part
        assert time.monotonic() - start < 60
        assert received.count(b'"tokens"') <= 400


def test_while_the_model_loads(served_folder):
    go_on = threading.Event()

    def load():
        go_on.wait(30)
        return LLM(served_folder, executor="reference")

    with serving(ServerState(ServerSettings(("tiny",)), load), wait=False) as url:
        until(lambda: _status(url) is not None)
        assert failure(httpx.get(url + "/health"), 503)["code"] == "loading"
        response = httpx.post(url + COMPLETIONS, json={"prompt": "x"})
        failure(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        go_on.set()
        until(lambda: _status(url) == 200)


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path):
    def load():
        raise CheckpointError("no such model")

    state = ServerState(ServerSettings(("tiny",)), load)
    with serving(state, wait=False):
        until(lambda: state.failed is not None)
    assert isinstance(state.failed, CheckpointError)


def test_the_end_leaves_time_to_what_runs(served_folder):
    state = ServerState(ServerSettings(("tiny",)), _loader(served_folder))
    with serving(state) as url:
        body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            state.stop()
            assert _status(url) in (503, None), "no more requests are taken"
            assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_end_cuts_off_is_told_so(served_folder, stream):
    state = ServerState(ServerSettings(("tiny",)), _loader(served_folder))
    with serving(state, drain_seconds=0) as url:
        done = []
        body = LONG | {"n": 16, "stream": stream}
        client = threading.Thread(target=lambda: done.append(httpx.post(url + COMPLETIONS, json=body, timeout=60)))
        client.start()
        until(lambda: metric(url, "thinfer_num_requests_running") == 16)
        state.stop()
        client.join()
    if stream:
        lines = [line for line in done[0].text.splitlines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "draining"
        assert lines[-1] == "data: [DONE]"
    else:
        assert "ended before" in failure(done[0], 503)["message"]
    assert not state.jobs


def _all_of(raw):
    received = b""
    while part := raw.recv(1 << 16):
        received += part
    return received


def _loader(folder):
    return lambda: LLM(folder, executor="reference")


def _status(url):
    try:
        return httpx.get(url + "/health").status_code
    except httpx.TransportError:
        return None


def _connection(url):
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)
