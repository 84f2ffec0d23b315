"""A recording gives what the linears read, and says when the disk is too small."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from thinfer.activation.recording import Recording, make_tasks
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import ResourceError

WINDOWS = [list(range(1, 25)), list(range(30, 54))]
SHARES = {"label_share": 0.25, "head_share": 0.5, "sink_tokens": 2}


@pytest.fixture
def engine(tiny_model):
    # The third batch of a window is a short one.
    with Engine(tiny_model, EngineOptions(executor="reference", max_model_len=32, chunk=10)) as engine:
        yield engine


@pytest.fixture
def tasks(engine):
    return make_tasks(engine.graph, engine.config.num_attention_heads, ("neurons", "heads"), 0, None)


def test_it_gives_what_went_by(engine, tasks):
    with Recording(engine, tasks, **SHARES) as recording:
        recording.run(WINDOWS, lambda _: None)
        inputs = [recording.inputs(task.source) for task in tasks]
        labels = [recording.labels(task) for task in tasks]
        assert all(np.array_equal(recording.labels(task), y) for task, y in zip(tasks, labels, strict=True))
        assert recording.tokens == 2 * 22
    # What was mapped outlives the files.
    seen = {}

    def watch(batch, site, x):
        if site != "lm_head":
            seen.setdefault(site, []).append(x[batch.positions >= 2].astype(np.float16))

    for window in WINDOWS:
        engine.step([Work(engine.new_sequence(), window, "none")], observe=watch)
    for task, x, y in zip(tasks, inputs, labels, strict=True):
        assert np.array_equal(x, np.concatenate(seen[task.source]))
        assert y.shape == (44, task.outputs)
        assert y.mean() == pytest.approx(0.25 if task.target == "neurons" else 0.5)


def test_a_small_disk_is_named_before_anything_runs(engine, tasks, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    told = []
    with Recording(engine, tasks, **SHARES) as recording, pytest.raises(ResourceError, match="set TMPDIR to a larger"):
        recording.run(WINDOWS, told.append)
    assert not told
