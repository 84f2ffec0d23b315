"""`thinfer serve` as a process: its first lines, its signals, its failures."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.serving import until
from thinfer.cli.serve import default_name, host_names
from thinfer.server.run import bind


@contextmanager
def process(*arguments, **environment):
    """A running `thinfer serve` on a free port, and its address."""
    command = [
        sys.executable,
        "-m",
        "thinfer",
        "serve",
        *arguments,
        "--port",
        "0",
        "--executor",
        "reference",
        "-t",
        "1",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment) as child:
        try:
            assert child.stderr is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", child.stderr.readline())
            assert found, child.stderr.read()
            yield child, found[0]
        finally:
            child.kill()


def status(url, path="/health", **headers):
    try:
        return httpx.get(url + path, headers=headers).status_code
    except httpx.TransportError:
        return None


@pytest.mark.slow
def test_sigterm_ends_after_what_runs(served_folder):
    with process(str(served_folder), "--served-model-name", "one", "--served-model-name", "two") as (child, url):
        until(lambda: status(url) == 200)
        assert [model["id"] for model in httpx.get(url + "/v1/models").json()["data"]] == ["one", "two"]
        body = {"model": "two", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            child.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert child.wait(30) == 0
        talk = child.stderr.read()
        assert "ready     one, two" in talk
        assert "Traceback" not in talk


@pytest.mark.slow
def test_after_kill_it_starts_again_on_its_port(served_folder):
    with process(str(served_folder), THINFER_API_KEY="k") as (child, url):
        until(lambda: status(url) == 200)
        assert status(url, "/v1/models") == 401
        assert status(url, "/v1/models", Authorization="Bearer k") == 200
        child.kill()
        child.wait(30)
    port = int(url.rsplit(":", 1)[1])
    bind("127.0.0.1", port).close()


@pytest.mark.slow
def test_ctrl_c_and_a_model_that_is_not_there(served_folder, tmp_path):
    with process(str(served_folder), "-q") as (child, url):
        until(lambda: status(url) == 200)
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        assert child.stderr.read() == ""
    with process(str(tmp_path / "none.gguf")) as (child, _):
        assert child.wait(30) == 4
        assert child.stderr.read().startswith("thinfer: error: ")


def test_a_port_that_is_taken_is_said():
    from thinfer.errors import UsageError

    with bind("127.0.0.1", 0) as taken, pytest.raises(UsageError, match="choose another"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UsageError, match="choose another"):
        bind("no.such.host.invalid", 1)


def test_hosts_are_checked_where_their_names_are_known():
    assert host_names("127.0.0.1", []) == host_names("::1", []) == host_names("localhost", []) == ()
    assert host_names("127.0.0.1", ["LLM.home"]) == ("llm.home",)
    assert host_names("127.0.0.1", ["*"]) is None
    assert host_names("192.0.2.1", ["llm.home"]) is None


def test_names_are_no_paths(served_folder, tmp_path):
    file = tmp_path / "Some-Model.Q4_1.gguf"
    file.touch()
    assert default_name(str(file)) == "Some-Model.Q4_1"
    assert default_name(str(served_folder) + "/.") == Path(served_folder).name
    assert default_name("owner/model") == "owner/model"
