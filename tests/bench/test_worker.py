"""The protocol between a benchmark and its worker processes."""

import os
import sys
from pathlib import Path

import pytest

from thinfer.bench import llama_cpp_worker
from thinfer.bench.peers import open_peers
from thinfer.bench.throughput import Contender, Test
from thinfer.bench.worker import Worker, peak_rss_bytes
from thinfer.errors import PeerError, ThinferError, UsageError


def scripted(tmp_path, body):
    script = tmp_path / "worker.py"
    script.write_text(body, encoding="utf-8")
    return Worker([sys.executable, str(script)], "scripted")


def test_a_worker_answers_line_by_line(tmp_path):
    reply = '{"seconds": 2, "density": 1, "bytes_per_token": null}'
    body = f"import sys\nfor line in sys.stdin:\n    print({reply!r}, flush=True)\n"
    with scripted(tmp_path, body) as worker:
        assert worker.prefill([1]).seconds == 2.0
        assert worker.decode([1], [2]).bytes_per_token is None


def test_a_worker_that_dies_says_its_last_words(tmp_path):
    worker = scripted(tmp_path, "import sys\nprint('no luck today', file=sys.stderr)\nsys.exit(3)\n")
    with worker, pytest.raises(PeerError, match=r"ended with 3[^$]*no luck today"):
        worker.load({"model": "x"})


def test_an_error_of_ours_keeps_its_exit_code(tmp_path):
    with scripted(tmp_path, 'input()\nprint(\'{"error": "bad file", "exit_code": 4}\')\n') as worker:
        with pytest.raises(ThinferError, match="bad file") as caught:
            worker.load({"model": "x"})
        assert caught.value.exit_code == 4


@pytest.mark.parametrize("line", ["no json", "5", '["error"]'])
def test_an_answer_that_is_none(tmp_path, line):
    with (
        scripted(tmp_path, f"input()\nprint({line!r})\n") as worker,
        pytest.raises(PeerError, match="unexpected answer"),
    ):
        worker.load({"model": "x"})


def test_a_test_longer_than_the_context_is_refused_at_once(tiny_folder):
    with Worker.ours() as worker, pytest.raises(ThinferError, match="lower -p or -n") as caught:
        worker.load({"model": str(tiny_folder), "executor": "reference", "text_tokens": 513})
    assert caught.value.exit_code == 7


def test_a_command_that_is_not_there(tmp_path):
    with pytest.raises(PeerError, match="cannot start"):
        Worker([str(tmp_path / "absent")], "peer")


def test_our_worker_reports_a_missing_model():
    with Worker.ours() as worker, pytest.raises(ThinferError) as caught:
        worker.load({"model": "/no/such/model.gguf", "text_tokens": 4})
    assert caught.value.exit_code == 4


def test_peak_rss_is_that_of_this_process():
    assert 1 << 20 < peak_rss_bytes() < 1 << 40


def twin(path):
    return Contender(worker=None, facts={"path": path, "threads": 1, "size_bytes": 1, "model": path}, tokens=[1] * 64)


def test_an_unknown_peer_and_a_wrong_format_are_refused():
    with pytest.raises(UsageError, match=r"llama\.cpp"):
        open_peers("other", None, [], {}, [Test("pp", 4)])
    with pytest.raises(UsageError, match="GGUF"):
        open_peers("llama.cpp", None, [twin("/some/folder")], {}, [Test("pp", 4)])


def test_a_python_without_the_peer_names_the_remedy(tmp_path):
    # An empty package folder in front of the path hides one that is installed.
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('hidden')\n", encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(tmp_path)
    try:
        with pytest.raises(PeerError, match="--peer-python"):
            open_peers("llama.cpp", sys.executable, [twin("m.gguf")], {}, [Test("pp", 4)])
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@pytest.mark.peer
@pytest.mark.model
def test_the_real_peer():
    python = os.environ.get("THINFER_PEER_PYTHON")
    if not python:
        pytest.skip("THINFER_PEER_PYTHON names no Python with llama-cpp-python")
    model = Path.home() / ".cache/thinfer/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not model.exists():
        pytest.skip(f"{model} is not there; `thinfer demo` fetches it")
    with Worker([python, llama_cpp_worker.__file__], "llama.cpp") as worker:
        facts = worker.load({"model": str(model), "threads": 2, "kv_type": "f16", "max_model_len": 256})
        assert facts["n_params"] > 10**8
        assert worker.prefill(list(range(100, 132))).seconds > 0
        assert worker.decode([1, 2, 3], [4, 5, 6, 7]).seconds > 0
        assert worker.rss_bytes() > 50 << 20
