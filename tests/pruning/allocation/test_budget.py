"""Rates meet the budget exactly and stay between 0 and 1."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinfer.pruning.allocation.budget import scaled, shifted

RATES = st.lists(st.floats(0.01, 3.0), min_size=1, max_size=8)


@given(RATES, st.floats(0, 1), st.sampled_from([shifted, scaled]), st.randoms(use_true_random=False))
def test_the_mean_is_met_inside_0_to_1_and_the_order_is_kept(rates, sparsity, meet, random):
    given_rates = {str(index): rate for index, rate in enumerate(rates)}
    weights = {name: random.randint(1, 10**7) for name in given_rates}
    found = meet(given_rates, weights, sparsity)
    total = sum(weights.values())
    assert sum(found[name] * size for name, size in weights.items()) / total == pytest.approx(sparsity, abs=1e-9)
    assert all(0 <= rate <= 1 for rate in found.values())
    ordered = sorted(given_rates, key=given_rates.get)
    assert all(found[low] <= found[high] for low, high in pairwise(ordered))


def test_where_nothing_is_cut_off_shifts_and_factors_are_common():
    weights = {"a": 1, "b": 3}
    assert shifted({"a": 0.2, "b": 0.4}, weights, 0.5) == pytest.approx({"a": 0.35, "b": 0.55})
    assert scaled({"a": 0.2, "b": 0.4}, weights, 0.7) == pytest.approx({"a": 0.4, "b": 0.8})
