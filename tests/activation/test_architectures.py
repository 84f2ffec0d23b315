"""Profile, two-pass test and recording on decoders other than llama: no gate, parallel blocks, layer norms, ALiBi."""

import numpy as np
import pytest

from thinfer.activation.contextual import ContextualOptions, measure
from thinfer.activation.profile import ProfileOptions, observe
from thinfer.activation.recording import Recording, make_tasks
from thinfer.calibration.text import TokenWindows
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

pytest.importorskip("transformers")
WINDOWS = tuple(tuple(map(int, row)) for row in np.random.default_rng(2).integers(0, 90, (2, 24)))
CASES = [("opt", None, True), ("falcon", "relu", True), ("nemotron", "half", True), ("bloom", None, False)]


@pytest.mark.parametrize(("model_type", "variant", "has_zeros"), CASES, ids=[case[0] for case in CASES])
def test_they_are_seen_alike(model_type, variant, has_zeros, tmp_path):
    from models.tiny import TINY
    from models.tiny_hf import make_model

    make_model(model_type, variant or next(iter(TINY[model_type]))).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    model = load_model(checkpoint)
    with Engine(model, EngineOptions(executor="reference", max_model_len=32)) as engine:
        cut = TokenWindows(WINDOWS, (), "random", "", 24, 0)
        found = observe(engine, {"random": cut}, ProfileOptions(sink_tokens=2))
        zeros = found.sparsity().mean()
        assert (0.2 < zeros < 0.8) if has_zeros else zeros < 0.01
        assert (found.head_norms > 0).all()

        tasks = make_tasks(engine.graph, engine.config.num_attention_heads, ("neurons", "heads"), 1, None)
        assert [task.layer for task in tasks[:4]] == [0, 0, 1, 1]
        assert tasks[2].source == tasks[0].own
        assert tasks[3].source == tasks[1].own
        with Recording(engine, tasks, label_share=0.3, head_share=0.5, sink_tokens=2) as recording:
            recording.run(WINDOWS, lambda _: None)
            assert recording.tokens == 2 * 22
            for task in tasks:
                assert recording.inputs(task.source).shape == (44, task.inputs)
                assert recording.labels(task).shape == (44, task.outputs)
                assert recording.labels(task).mean() == pytest.approx(0.5 if task.target == "heads" else 0.3, abs=0.02)
    rows = measure(model, WINDOWS, ContextualOptions(keep=(0.5,), sink_tokens=2))
    assert all(row["kl_mean"] > 0 for row in rows)
    checkpoint.close()
