"""The search keeps inside its budget by measuring, even where the model of additive rises is wrong."""

import math

import numpy as np
import pytest

from thinfer.activation.measure import Loss
from thinfer.activation.search import RateSearch

NBYTES = {"qkv": 3, "o": 2, "gate_up": 10, "down": 5}
COST = {"qkv": 1.1, "o": 0.07, "gate_up": 2.5, "down": 0.2}


def make_search(interaction):
    tokens = np.random.default_rng(0).random(100) + 3
    calls = []

    def measure(rates):
        calls.append(rates)
        parts = [COST[kind] * rate**3 for kind, rate in rates.items()]
        rise = sum(parts) + interaction * (sum(parts) - max(parts))
        return Loss(tokens + rise, 1 - sum(rates.values()) / 4)

    return RateSearch(NBYTES, Loss(tokens, 1.0), measure), calls


@pytest.mark.parametrize("interaction", [-0.5, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("budget", [0.002, 0.02, 0.1])
def test_the_budget_holds_and_is_used(interaction, budget):
    search, calls = make_search(interaction)
    best = search.within(budget)
    assert best.rise <= math.log1p(budget)
    assert best.rise >= 0.5 * math.log1p(budget)
    assert best.saved == max(t.saved for t in search.trials if t.rise <= math.log1p(budget))
    assert best.rates["o"] > best.rates["gate_up"]
    assert len(calls) <= 18
    assert len({tuple(sorted(t.rates.items())) for t in search.trials}) == len(search.trials)
    assert best.ppl == pytest.approx(search.dense.ppl * math.exp(best.rise))


def test_where_nothing_fits_the_result_is_dense():
    tokens = np.ones(10)
    search = RateSearch(NBYTES, Loss(tokens, 1.0), lambda rates: Loss(tokens + 5, 0.5))
    assert set(search.within(0.02).rates.values()) == {0.0}


def test_uniform_and_greedy():
    search, calls = make_search(0.0)
    assert search.uniform(0.4).saved == pytest.approx(0.4)
    assert len(calls) == 1
    greedy = search.greedy(0.4)
    assert greedy.saved == pytest.approx(0.4, abs=0.02)
    assert greedy.rise < search.trials[0].rise


def test_trials_are_ready_for_json():
    search, _ = make_search(0.0)
    assert set(search.uniform(0.25).to_dict()) == {"rates", "saved", "ppl", "rise", "rise_stderr", "density"}
