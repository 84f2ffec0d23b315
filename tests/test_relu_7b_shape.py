"""The script that times a ReLU model of random weights: its files are what they say, and skipping changes no token."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from thinfer import LLM, SamplingParams
from thinfer.bench.throughput import Contender
from thinfer.errors import ThinferError

SCRIPTS = Path(__file__).parents[1] / "scripts"
SIZES = {"layers": 2, "hidden": 256, "intermediate": 768, "heads": 4, "vocab": 512}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
TINY += ["--steps", "8", "--rounds", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("relu_7b_shape", SCRIPTS / "relu_7b_shape.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(SCRIPTS))
    return module


@pytest.fixture(scope="module")
def files(script, tmp_path_factory):
    return script.write_files(script.Shape(**SIZES, zeros=0.9, seed=0), tmp_path_factory.mktemp("shape"))


def test_end_to_end(script, files, tmp_path, capsys):
    assert script.main(["-o", str(files[0].parent), *TINY, "--json", str(tmp_path / "rows.json")]) == 0
    rows = {row["model"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == ["thinfer dense", "thinfer exact", "thinfer given"]
    assert all(abs(row["zeros"] - 0.9) < 0.02 for row in rows.values())
    dense, exact, given = (row["bytes_per_token"] for row in rows.values())
    # Of 18 bytes a block of down, 2 are its scale, which is read where any of 32 neurons fires: nearly always.
    up = 768 * 256 // 32 * 18
    assert dense - exact == pytest.approx(2 * up * (0.9 + 0.9 * 16 / 18), rel=0.05)
    assert exact - given == pytest.approx(2 * up * 0.9, rel=0.05)
    assert rows["thinfer dense"]["ratio_dense"] == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 5
    assert "logits are equal to the bit" in shown.err


def test_skipping_gives_the_tokens_of_dense_and_of_the_reference(files):
    tokens = []
    for options in ({"neurons": "off"}, {"neurons": "skip"}, {"neurons": "skip", "threads": 2}):
        with LLM(files[0], **{"threads": 1, **options}) as llm:
            tokens.append(llm.generate([300, 400, 7], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)))
    assert len({output.token_ids for output in tokens}) == 1
    assert len(set(tokens[0].token_ids)) > 3
    with LLM(files[1], threads=1) as llm:
        other = llm.generate([300, 400, 7], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert other.token_ids != tokens[0].token_ids


def test_both_files_hold_the_same_tensors(files):
    sparse, dense = ({tensor.name: tensor for tensor in GGUFReader(path).tensors} for path in files)
    assert sparse.keys() == dense.keys()
    assert all(np.array_equal(tensor.data, dense[name].data) for name, tensor in sparse.items())
    kinds = {tensor.tensor_type.name for name, tensor in sparse.items() if "norm" not in name}
    assert kinds == {"Q4_0"}
    gate = dequantize(sparse["blk.1.ffn_gate.weight"].data, GGMLQuantizationType.Q4_0)
    assert gate.shape == (768, 256)
    assert abs(gate.mean()) < 0.01 * gate.std()
    assert (gate**2).mean() * 256 == pytest.approx(1, rel=0.02)
    names = [GGUFReader(path).fields["general.architecture"].contents() for path in files]
    assert names == ["thinfer-llama", "llama"]


def test_a_share_that_is_not_there_is_an_error(script, tmp_path, capsys):
    shape = script.Shape(**SIZES, zeros=0.5, seed=0)
    for path in script.write_files(shape, tmp_path):
        shutil.move(path, tmp_path / path.name.replace("-50-", "-90-"))
    assert script.main(["-o", str(tmp_path), *TINY]) == ThinferError.exit_code
    assert "% of the neurons are zero, not 90.0%" in capsys.readouterr().err


def test_other_logits_are_an_error(script):
    class Told(script.ShapeWorker):
        def __init__(self, digest):
            self.digest = digest

        def check(self, start, tokens):
            return {"zeros": 0.9, "digest": self.digest}

    contenders = [Contender(Told(digest), {"model": digest}, range(24)) for digest in ("one", "one", "two")]
    assert script.require_same(contenders[:2], 0.9) == 0.9
    with pytest.raises(ThinferError, match="two does not give the logits"):
        script.require_same(contenders, 0.9)


def test_too_little_memory_loads_fewer_at_a_time_with_dense_in_each(script):
    assert script.groups(1, with_peer=True) == [["dense", "exact", "given", "peer"]]
    assert script.groups(1 << 50, with_peer=False) == [["dense", "exact"], ["dense", "given"]]
    available = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) << 10
    assert script.groups(int(available / 1.2 / 3.5), with_peer=True) == [["dense", "exact", "given"], ["dense", "peer"]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--hidden", "100"], "multiples of 32"),
        (["--zeros", "0.2"], "from 0.5"),
        (["--vocab", "100"], "at least 259"),
        (["--heads", "0"], "must be at least 1"),
        (["--steps", "0"], "must be at least 1"),
    ],
)
def test_what_cannot_be_written_is_one_line(script, tmp_path, capsys, changed, message):
    assert script.main(["-o", str(tmp_path / "out"), *TINY, *changed]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert script.main(["-o", str(tmp_path), *TINY]) != 0
    assert "free some space" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
