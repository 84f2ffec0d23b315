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


PARTS = {"first": 0.2, "middle": 1.0, "last": 0.5}


def make_deep_search():
    """Every kind in three parts, which cost differently; rises add up."""
    tokens = np.random.default_rng(0).random(100) + 3
    calls = []
    kinds = {kind: [f"{kind}/{part}" for part in PARTS] for kind in NBYTES}
    nbytes = {group: NBYTES[kind] for kind, groups in kinds.items() for group in groups}

    def measure(rates):
        calls.append(rates)
        rise = sum(COST[g.split("/")[0]] * PARTS[g.split("/")[1]] * rate**3 for g, rate in rates.items())
        return Loss(tokens + rise, 0.5)

    return RateSearch(nbytes, Loss(tokens, 1.0), measure, kinds), calls


def test_parts_of_the_depth_have_rates_of_their_own_at_bounded_cost():
    search, calls = make_deep_search()
    greedy = search.greedy(0.4)
    assert greedy.saved == pytest.approx(0.4, abs=0.02)
    assert len(calls) <= 4 * 3 + 4 * 3 + 1
    for kind in ("qkv", "gate_up"):
        assert greedy.rates[f"{kind}/first"] > greedy.rates[f"{kind}/last"] > greedy.rates[f"{kind}/middle"]
    by_kind = {
        group: {"qkv": 0.35, "o": 0.9, "gate_up": 0.25, "down": 0.6}[group.split("/")[0]] for group in search.nbytes
    }
    same = search._try(by_kind)
    assert same.saved == pytest.approx(greedy.saved, abs=0.03)
    assert greedy.rise < same.rise


def test_parts_keep_the_budget():
    search, calls = make_deep_search()
    best = search.within(0.02)
    assert 0.5 * math.log1p(0.02) <= best.rise <= math.log1p(0.02)
    assert len(calls) <= 24 + 6
