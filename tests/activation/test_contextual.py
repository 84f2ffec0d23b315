"""The two-pass test on the tiny model: everything kept is dense, and less is what NumPy says."""

import numpy as np
import pytest

from activation.relu_llama import write_broken
from thinfer.activation.contextual import ContextualOptions, contextual, measure, top_share
from thinfer.activation.masked_run import RecordedSets, WindowRunner
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import CheckFailed, UsageError

WINDOW = list(range(40, 100))


def test_keeping_everything_changes_nothing(tiny_model):
    rows = measure(tiny_model, [WINDOW], ContextualOptions(keep=(1.0,)))
    assert [row["what"] for row in rows] == ["heads", "neurons", "both"]
    for row in rows:
        assert row["kl_mean"] == pytest.approx(0, abs=1e-9)
        assert row["top1_agreement"] == 1.0
        assert row["ppl"] == row["ppl_dense"]
        assert row["tokens"] == len(WINDOW) - 1 - 4


def test_less_costs_more_and_both_cost_most(tiny_model):
    rows = measure(tiny_model, [WINDOW], ContextualOptions(keep=(0.75, 0.25)))
    kl = {(row["what"], row["kept"]): row["kl_mean"] for row in rows}
    for what in ("heads", "neurons", "both"):
        assert 0 < kl[what, 0.75] < kl[what, 0.25]
    assert kl["both", 0.75] > kl["neurons", 0.75]


def test_a_window_at_once_is_what_the_engine_gives(tiny_model):
    logits = WindowRunner(tiny_model, len(WINDOW)).run(WINDOW)
    with Engine(tiny_model, EngineOptions(executor="reference")) as engine:
        (expected,) = engine.step([Work(engine.new_sequence(), WINDOW, "all")])
    assert logits == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_recorded_sets_leave_out_a_head_but_not_its_keys(tiny_model):
    runner = WindowRunner(tiny_model, len(WINDOW))
    seen: dict[str, np.ndarray] = {}

    def watch(site, x):
        seen[site] = x.copy()

    runner.run(WINDOW, observe=watch)
    dense = dict(seen)
    mask = np.ones((len(WINDOW), 64), bool)
    mask[:, 16:32] = False
    runner.run(WINDOW, RecordedSets({"layers.0.o": mask}), watch)
    # What layer 0's attention read and made is the same: only what the head adds is gone, from the sinks on.
    assert (seen["layers.0.o"] == dense["layers.0.o"]).all()
    assert (seen["layers.0.gate_up"][:4] == dense["layers.0.gate_up"][:4]).all()
    assert not np.allclose(seen["layers.0.gate_up"][4:], dense["layers.0.gate_up"][4:])


def test_shares_round_up_and_keep_the_largest():
    values = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    for share, count in ((0.01, 1), (0.5, 5), (0.51, 6), (0.3, 3), (1.0, 10)):
        mask = top_share(values, share)
        assert (mask.sum(axis=1) == count).all()
        for row, kept in zip(values, mask, strict=True):
            assert set(row[kept]) == set(np.sort(row)[10 - count :])


def test_the_report_names_its_conditions(tiny_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The prince came into the room, and all the ladies looked at him. " * 10)
    options = ContextualOptions(what=("neurons",), keep=(0.5,), ctx=64, windows=2)
    report = contextual(tiny_folder, text=text, options=options)
    assert (report["text"], report["ctx"], report["windows"], report["bos"]) == ("text.txt", 64, 2, True)
    assert report["rows"][0]["tokens"] == 2 * (64 - 1 - 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": ("tails",)}, "choose from heads, neurons, both"),
        ({"what": ()}, "empty"),
        ({"keep": (0.0,)}, "above 0"),
        ({"keep": (1.5,)}, "above 0"),
        ({"ctx": 5}, "past 4 sinks"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        ContextualOptions(**options)


def test_broken_weights_are_one_message(tmp_path):
    with pytest.raises(CheckFailed, match=r"what the model predicts is NaN: the model's weights are broken"):
        contextual(write_broken(tmp_path / "model"), options=ContextualOptions(ctx=32, windows=1))
