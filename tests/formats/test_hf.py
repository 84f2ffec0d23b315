import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from formats.hf_files import TENSORS, write_folder
from formats.mutations import Mutation, mutations
from thinfer.errors import CheckpointError, ThinferError, UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint


@pytest.mark.parametrize("shards", [1, 3])
def test_lists_and_decodes(tmp_path: Path, shards: int) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path / "model", shards=shards))
    assert checkpoint.kind == "hf"
    assert checkpoint.metadata["model_type"] == "llama"
    assert checkpoint.generation_config == {"temperature": 0.5}
    assert set(checkpoint.tensors) == set(TENSORS)
    assert checkpoint.size_bytes == sum(f.stat().st_size for f in checkpoint.path.glob("*.safetensors"))
    types = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}
    for name, values in TENSORS.items():
        info = checkpoint.tensors[name]
        assert (info.shape, info.type) == (tuple(values.shape), types[values.dtype])
        if info.type == "I64":
            with pytest.raises(UnsupportedError, match=r"ids has type I64.*1 of 8 tensors"):
                checkpoint.decode(name)
            continue
        np.testing.assert_array_equal(checkpoint.decode(name), values.float().numpy())
        raw = checkpoint.raw(name)
        assert raw.shape == (info.rows, info.row_bytes)
        assert not raw.flags.writeable
        checkpoint.release(name)
        np.testing.assert_array_equal(checkpoint.decode(name), values.float().numpy())
    assert checkpoint.raw("norm").shape == (1, 10)
    assert checkpoint.raw("cube").shape == (6, 16)
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.raw("nothing")
    assert len(checkpoint.fingerprint()) == 64
    checkpoint.close()


def test_fingerprint_follows_weights_and_config(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    first = open_checkpoint(folder).fingerprint()
    assert open_checkpoint(folder).fingerprint() == first
    write_folder(folder, rope_theta=7)
    assert open_checkpoint(folder).fingerprint() != first
    write_folder(folder)
    assert open_checkpoint(folder).fingerprint() == first
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert open_checkpoint(folder).fingerprint() != first


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: Any, data: bytes = bytes(8), length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


BROKEN = {
    "empty": (b"", "empty"),
    "short": (b"abc", "not a safetensors file"),
    "header longer than file": (file_of({}, length=1 << 62), "header claims 4611686018427387904 bytes"),
    "not JSON": (file_of(b"{{{{"), "not valid JSON"),
    "not UTF-8": (file_of(b"\xff\xfe{}"), "not valid JSON"),
    "deep JSON": (file_of(b"[" * 200_000), "not valid JSON"),
    "not an object": (file_of([1]), "not a JSON object"),
    "name twice": (file_of(b'{"w": 1, "w": 2}'), "'w' is given twice"),
    "entry": (file_of({"w": 3}), "w: its entry is not an object"),
    "fields": (file_of({"w": {"dtype": "F32"}}), "w: dtype, shape or data_offsets"),
    "negative shape": (file_of({"w": entry(shape=[-2])}), "w: dtype, shape or data_offsets"),
    "boolean shape": (file_of({"w": entry(shape=[True])}), "w: dtype, shape or data_offsets"),
    "huge number": (file_of(b'{"w": ' + b"9" * 10_000 + b"}"), "not valid JSON"),
    "many axes": (file_of({"w": entry(shape=[1] * 100)}), "100 axes"),
    "reversed offsets": (file_of({"w": entry(offsets=[8, 0])}), "F32 data at 8 to 0"),
    "past the end": (file_of({"w": entry(offsets=[0, 1 << 60])}), "the file holds 8 bytes"),
    "shape against size": (file_of({"w": entry(shape=[3])}), "needs 12 bytes, 8 are stored"),
    "overlap": (file_of({"a": entry(), "b": entry()}), "the one before ends at"),
    "hole": (file_of({"w": entry(shape=[1], offsets=[4, 8])}), "starts at byte"),
    "trailing bytes": (file_of({"w": entry()}, bytes(99)), "the tensors end at byte"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_weights_give_one_clear_error(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    data, message = BROKEN[name]
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "model.safetensors" in str(caught.value)


def test_broken_folders(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", shards=2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for weight_map, message in (
        ({}, "no weight_map"),
        ({**good["weight_map"], "norm": "../../secret.safetensors"}, "not a safetensors file of the folder"),
        ({**good["weight_map"], "norm": 3}, "not a safetensors file of the folder"),
        ({**good["weight_map"], "extra": "model-00001-of-00002.safetensors"}, "extra is not in"),
        ({**good["weight_map"], "extra": "model-00009-of-00009.safetensors"}, "no such file"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    index.write_text(json.dumps(good))
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="is also in"):
        open_checkpoint(folder)
    index.unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files without"):
        open_checkpoint(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="save_pretrained"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: not a JSON object"):
        open_checkpoint(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = write_folder(tmp_path_factory.mktemp("fuzz") / "model")
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutation=mutations(hot=600))
def test_only_our_errors_escape(whole: tuple[Path, bytes], mutation: Mutation) -> None:
    folder, data = whole
    (folder / "model.safetensors").write_bytes(mutation(data))
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(folder)
        checkpoint.fingerprint()
        for name, info in checkpoint.tensors.items():
            if info.type in ("F32", "F16", "BF16"):
                assert checkpoint.decode(name).shape == info.shape
    except ThinferError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20
