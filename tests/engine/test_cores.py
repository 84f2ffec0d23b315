"""The number of threads follows cores, affinity and quota."""

import pytest

from thinfer.engine import cores
from thinfer.engine.options import EngineOptions


def topology(folder, siblings):
    for index, text in enumerate(siblings):
        path = folder / f"cpu{index}" / "topology"
        path.mkdir(parents=True)
        (path / "thread_siblings_list").write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("siblings", "allowed", "quota", "expected"),
    [
        (["0,2", "1,3", "0,2", "1,3"], {0, 1, 2, 3}, "max 100000", 2),
        (["0", "1", "2", "3"], {0, 1, 2, 3}, "250000 100000", 3),
        (["0,2", "1,3", "0,2", "1,3"], {1, 3}, "max 100000", 1),
        (["0", "1"], {0, 1}, "20000 100000", 1),
        ([], {0, 1, 2}, "", 3),
    ],
)
def test_usable_cores(tmp_path, monkeypatch, siblings, allowed, quota, expected):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: allowed)
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(quota)
    assert cores.usable_cores(topology(tmp_path, siblings), file) == expected


def test_the_choice_of_threads_wins():
    assert EngineOptions(threads=3).thread_count() == 3
    assert EngineOptions().thread_count() >= 1
