"""Failures while writing are messages with a remedy, and a folder of unfinished work has one run at a time."""

import pytest
from safetensors import SafetensorError

from thinfer.errors import ResourceError, UsageError
from thinfer.pruning.writing import exclusive, writing


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), r"out: cannot be written \(No space left on device\); free some"),
        (SafetensorError("I/O error:\nNo space left"), r"out: cannot be written \(I/O error: No space left\)"),
    ],
)
def test_a_full_disk_is_said(tmp_path, error, message):
    with pytest.raises(ResourceError, match=message), writing(tmp_path / "out"):
        raise error


def test_a_second_run_is_refused_until_the_first_ends(tmp_path):
    folder = tmp_path / "deep" / "out.partial"
    with exclusive(folder):
        with pytest.raises(UsageError, match="another run works there"), exclusive(folder):
            pass
        assert folder.is_dir()
    assert not folder.exists()
    with exclusive(folder):
        (folder / "kept").touch()
    assert [file.name for file in folder.iterdir()] == ["kept"]


def test_what_is_no_folder_is_said(tmp_path):
    (tmp_path / "out.partial").touch()
    with (
        pytest.raises(UsageError, match=r"out\.partial: cannot be made .*choose another -o"),
        exclusive(tmp_path / "out.partial"),
    ):
        pass
