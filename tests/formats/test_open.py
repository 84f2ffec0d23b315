import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from formats.gguf_files import write_all_types
from formats.hf_files import write_folder
from thinfer.errors import ArtifactError, CheckpointError, UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.formats.hub import is_hub_id


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A hub that records what it is asked and has nothing."""
    calls: list[tuple[Any, ...]] = []

    def refuse(*args: Any, **_: Any) -> str:
        calls.append(args)
        raise RuntimeError("offline and not in the cache\nmore lines")

    module = SimpleNamespace(snapshot_download=refuse, hf_hub_download=refuse)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return calls


def test_local_paths_never_reach_the_hub(
    tmp_path: Path, hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    write_folder(tmp_path / "owner" / "name")
    assert open_checkpoint("owner/name").kind == "hf"
    for missing in ("./owner/other", "/no/such/model", "model.gguf", "models/model.gguf", "~/nothing", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such file"):
            open_checkpoint(missing)
    assert hub == []


def test_hub_ids(hub: list[tuple[Any, ...]]) -> None:
    with pytest.raises(CheckpointError, match=r"hub gave: offline and not in the cache; check the id.*HF_HUB_OFFLINE"):
        open_checkpoint("owner/name-1.5B")
    with pytest.raises(CheckpointError, match="owner/name/sub/file"):
        open_checkpoint("owner/name/sub/file.gguf")
    assert hub == [("owner/name-1.5B",), ("owner/name", "sub/file.gguf")]
    assert not is_hub_id("../owner/name")
    assert not is_hub_id("owner/name/../../x.gguf")


def test_hub_folder_without_config_asks_for_a_file(
    tmp_path: Path, hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["huggingface_hub"], "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"owner/name/FILE\.gguf"):
        open_checkpoint("owner/name")
    write_folder(tmp_path)
    assert open_checkpoint("owner/name").path == tmp_path


def test_the_real_client_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="the hub gave"):
        open_checkpoint("owner/certainly-not-in-the-cache")
    commit = "0" * 40
    repo = tmp_path / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots").mkdir()
    write_folder(repo / "snapshots" / commit)
    write_all_types(repo / "snapshots" / commit / "model.gguf")
    assert open_checkpoint("owner/name").kind == "hf"
    assert open_checkpoint("owner/name/model.gguf").kind == "gguf"


def test_thinfer_folders(tmp_path: Path, hub: list[tuple[Any, ...]]) -> None:
    write_all_types(tmp_path / "model.gguf")
    folder = tmp_path / "sparse"
    folder.mkdir()
    document = folder / "thinfer.json"
    for base in ("../model.gguf", str(tmp_path / "model.gguf")):
        document.write_text(json.dumps({"base": base}))
        checkpoint = open_checkpoint(folder)
        assert checkpoint.artifact_dir == folder
        assert checkpoint.path.resolve() == (tmp_path / "model.gguf").resolve()
    document.write_text(json.dumps({"base": "../gone.gguf"}))
    with pytest.raises(CheckpointError, match=r"base model of .*no such file"):
        open_checkpoint(folder)
    document.write_text(json.dumps({"base": "owner/name"}))
    with pytest.raises(CheckpointError, match=r"base model of .*hub gave"):
        open_checkpoint(folder)
    assert hub == [("owner/name",)]
    for text in ("{", '{"base": 3}', '{"base": ""}'):
        document.write_text(text)
        with pytest.raises(ArtifactError, match=r"thinfer\.json"):
            open_checkpoint(folder)
    write_folder(folder)
    document.write_text("{}")
    assert open_checkpoint(folder).artifact_dir == folder


def test_folders_and_other_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither config\.json nor"):
        open_checkpoint(tmp_path)
    write_all_types(tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    write_all_types(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"name one: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UnsupportedError, match="name the model's folder"):
            open_checkpoint(tmp_path / name)


def test_a_name_that_the_system_refuses_is_one_error() -> None:
    with pytest.raises(CheckpointError, match="File name too long"):
        open_checkpoint("x" * 5000)
