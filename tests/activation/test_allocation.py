"""Allocation spends where it costs least and meets its target."""

import numpy as np
import pytest

from thinfer.activation.allocation import HIGHEST_RATE, Curve, allocate

# SmolLM2-135M's sizes, and rises like those measured at 50 % of one kind of input alone.
CURVES = {
    "qkv": Curve(576 * 960, {0.3: 0.03, 0.5: 0.14, 0.7: 0.6}),
    "o": Curve(576 * 576, {0.3: 0.001, 0.5: 0.009, 0.7: 0.05}),
    "gate_up": Curve(576 * 3072, {0.3: 0.06, 0.5: 0.31, 0.7: 1.5}),
    "down": Curve(1536 * 576, {0.3: 0.004, 0.5: 0.026, 0.7: 0.15}),
}


def saved(rates):
    return sum(rates[k] * c.nbytes for k, c in CURVES.items()) / sum(c.nbytes for c in CURVES.values())


def rise(rates):
    return sum(float(c.rises()[round(rates[k] * 100)]) for k, c in CURVES.items())


@pytest.mark.parametrize("goal", [0.0, 0.1, 0.25, 0.4, 0.6, HIGHEST_RATE])
def test_the_bytes_asked_for_are_saved(goal):
    rates = allocate(CURVES, save=goal)
    assert goal <= saved(rates) + 1e-9 < goal + 0.02
    if 0 < goal < 0.6:
        assert rise(rates) < rise(dict.fromkeys(CURVES, round(saved(rates), 2)))
        assert rates["o"] > rates["gate_up"]


@pytest.mark.parametrize("limit", [1e-6, 0.01, 0.05, 0.2])
def test_the_rise_allowed_is_used_and_kept(limit):
    rates = allocate(CURVES, allow=limit)
    assert 0.7 * limit < rise(rates) <= limit or limit < 1e-4
    smaller = allocate(CURVES, allow=limit / 2)
    assert saved(smaller) <= saved(rates)


def test_nothing_allowed_means_dense():
    assert set(allocate(CURVES, allow=0.0).values()) == {0.0}


def test_curves_pass_through_their_points_and_never_fall():
    curve = Curve(1, {0.3: 0.01, 0.5: 0.005, 0.7: -0.1})
    rises = curve.rises()
    assert rises[0] == 0
    assert rises[[30, 50, 70]] == pytest.approx([0.01] * 3)
    assert (np.diff(rises) >= -1e-15).all()
    assert rises[15] == pytest.approx(0.01 / 8)
    assert rises[90] > 0.05
