import json
import os

import numpy as np
import pytest

from thinfer.core.artifact import JSON_NAME, TENSORS_NAME, Artifact, require_writable
from thinfer.errors import ArtifactError, ResourceError, UsageError


@pytest.fixture
def written(tmp_path):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2], np.int32)}
    artifact = Artifact("../model.gguf", "f" * 64, {"selector": {"x": 0.1}}, tensors)
    artifact.save(tmp_path / "new" / "folder")
    return artifact, tmp_path / "new" / "folder"


def test_round_trip(written):
    artifact, folder = written
    back = Artifact.read(folder)
    assert (back.base, back.fingerprint, back.sections) == (artifact.base, artifact.fingerprint, artifact.sections)
    for name, value in artifact.tensors.items():
        np.testing.assert_array_equal(back.tensors[name], value)
        assert back.tensors[name].dtype == value.dtype
    assert sorted(os.listdir(folder)) == [JSON_NAME, TENSORS_NAME]


def test_other_weights_are_refused(written):
    artifact, _ = written
    artifact.check("f" * 64)
    with pytest.raises(ArtifactError, match="stale"):
        artifact.check("0" * 64)


def test_a_mixture_of_two_writes_is_refused(written):
    artifact, folder = written
    old = (folder / JSON_NAME).read_bytes()
    Artifact(artifact.base, artifact.fingerprint, {}, {"a": np.zeros(1, np.float32)}).save(folder)
    (folder / JSON_NAME).write_bytes(old)
    with pytest.raises(ArtifactError, match=r"thinfer\.safetensors is not the one"):
        Artifact.read(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"format": "other"}, "not an artifact"),
        ({"base": None}, "'base'"),
        ({"sections": []}, "'sections'"),
    ],
)
def test_damaged_documents_are_named(written, change, message):
    _, folder = written
    path = folder / JSON_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match=message):
        Artifact.read(folder)


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_not_json(written, content):
    _, folder = written
    (folder / JSON_NAME).write_text(content)
    with pytest.raises(ArtifactError, match=JSON_NAME):
        Artifact.read(folder)


@pytest.mark.parametrize("name", [JSON_NAME, TENSORS_NAME])
def test_missing_file(written, name):
    _, folder = written
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match="No such file"):
        Artifact.read(folder)


def test_a_failed_write_leaves_the_old_artifact(written, monkeypatch):
    _, folder = written
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(ResourceError, match=r"new/folder: cannot be written \(No space left on device\); free"):
            Artifact("x", "y").save(folder)
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    # The disk takes the tensors and is full at the JSON.
    flush, flushed = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda handle: fail() if flushed else flushed.append(flush(handle)))
    with pytest.raises(ResourceError, match="No space left on device"):
        Artifact("x", "y").save(folder)
    assert flushed
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    assert Artifact.read(folder).base == "../model.gguf"


def test_what_is_no_json_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Artifact("x", "y", {"profile": {"reuse": float("nan")}}).save(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_where_nothing_can_be_written_is_known_before(tmp_path, monkeypatch):
    require_writable(tmp_path / "new" / "folder")
    assert not (tmp_path / "new").exists()
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(UsageError, match="a file, not a folder"):
            require_writable(place)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="no permission"):
        require_writable(tmp_path / "new")
