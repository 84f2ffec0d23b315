"""Histograms give the quantiles of what was seen, in whatever order it came."""

import numpy as np
import pytest

from thinfer.calibration.observer import ScoreHistogram, ScoreObserver
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine, Work


@pytest.mark.parametrize("rate", [0.01, 0.25, 0.5, 0.9, 0.999])
def test_quantiles_are_within_the_bins_resolution(rate):
    scores = np.abs(np.random.default_rng(0).standard_normal(200_000)).astype(np.float32)
    histogram = ScoreHistogram()
    for part in np.array_split(scores, 7):
        histogram.add(part)
    assert histogram.quantile(rate) == pytest.approx(np.quantile(scores, rate), rel=0.004)
    assert (scores <= histogram.quantile(rate)).mean() == pytest.approx(rate, abs=0.003)
    assert histogram.total == 200_000


def test_order_does_not_matter():
    scores = np.random.default_rng(1).random(1000).astype(np.float32)
    first, second = ScoreHistogram(), ScoreHistogram()
    first.add(scores)
    for part in np.array_split(scores[::-1], 9):
        second.add(part)
    assert [first.quantile(r) for r in (0.1, 0.5, 0.9)] == [second.quantile(r) for r in (0.1, 0.5, 0.9)]


def test_extreme_scores():
    histogram = ScoreHistogram()
    histogram.add(np.array([0, 0, 1e-40, 1e38, np.inf, np.nan], np.float32))
    assert histogram.total == 5
    assert histogram.quantile(0.3) < 1e-40
    assert histogram.quantile(1.0) == np.finfo(np.float32).max
    equal = ScoreHistogram()
    equal.add(np.full(10, 2.5, np.float32))
    assert 2.49 < equal.quantile(0.5) <= 2.5


@pytest.mark.parametrize("chunk", [7, 64])
def test_sinks_are_left_out_and_scales_apply(tiny_model, chunk):
    scale = np.linspace(0.5, 2, 64).astype(np.float32)
    observer = ScoreObserver({"layers.0.o": scale}, 4, frozenset({"layers.0.qkv", "layers.0.o"}))
    inputs = {}

    def watch(batch, site, x):
        inputs.setdefault(site, []).append(x.copy())
        observer.observe(batch, site, x)

    with Engine(tiny_model, EngineOptions(executor="reference", chunk=chunk)) as engine:
        engine.step([Work(engine.new_sequence(), list(range(40)), "none")], observe=watch)
    assert set(observer.histograms) == {"layers.0.qkv", "layers.0.o"}
    for site, factor in (("layers.0.qkv", 1), ("layers.0.o", scale)):
        scores = np.abs(np.concatenate(inputs[site])[4:]) * factor
        histogram = observer.histograms[site]
        assert histogram.total == scores.size
        assert histogram.quantile(0.5) == pytest.approx(np.median(scores), rel=0.02)
