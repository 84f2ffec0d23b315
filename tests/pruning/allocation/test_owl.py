"""OWL against its formula on all scores of a block at once."""

import numpy as np
import pytest
import torch

from pruning.allocation.views import View, random_view
from thinfer.errors import UsageError
from thinfer.pruning.allocation.owl import Owl
from thinfer.pruning.allocation.uniform import Uniform


def formula(view, sparsity, strength, outlier):
    """Rates by block, up to the shift that meets the mean over weights."""
    shares = []
    for block in view.blocks:
        scores = np.concatenate(
            [(view.weight(name).abs() * view.inputs(name).norm).double().numpy().ravel() for name in block]
        )
        shares.append(float((scores > outlier * scores.mean()).mean()))
    shares = np.array(shares)
    ranks = (shares - shares.min()) / (shares.max() - shares.min()) * 2 * strength
    return 1 - ((1 - sparsity) + ranks - ranks.mean())


@pytest.mark.parametrize(("strength", "outlier"), [(0.08, 5.0), (0.2, 3.0)])
def test_rates_are_those_of_the_formula(strength, outlier):
    view = random_view(spread=2.0)
    rates = Owl(strength, outlier).rates(view, 0.6)
    expected = formula(view, 0.6, strength, outlier)
    by_block = np.array([rates[block[0]] for block in view.blocks])
    assert len(set(by_block)) > 2
    np.testing.assert_allclose(np.diff(by_block), np.diff(expected), atol=1e-9)
    assert by_block.max() - by_block.min() == pytest.approx(2 * strength)
    assert view.mean(rates) == pytest.approx(0.6, abs=1e-9)
    assert all(rates[name] == rates[block[0]] for block in view.blocks for name in block)


def test_blocks_with_more_outliers_are_pruned_less():
    view = random_view(spread=3.0)
    rates = Owl().rates(view, 0.5)
    assert rates["layers.3.q"] < rates["layers.0.q"]


@pytest.mark.parametrize("sparsity", [0.0, 0.03, 0.5, 0.99, 1.0])
def test_equal_blocks_share_equally_and_no_rate_leaves_0_to_1(sparsity):
    same = {f"layers.{block}.q": torch.ones(4, 8) for block in range(3)}
    view = View([{name: weight} for name, weight in same.items()])
    assert Owl().rates(view, sparsity) == pytest.approx(Uniform().rates(view, sparsity), abs=1e-9)
    view = random_view(spread=3.0)
    rates = Owl(strength=0.3).rates(view, sparsity)
    assert all(0 <= rate <= 1 for rate in rates.values())
    assert view.mean(rates) == pytest.approx(sparsity, abs=1e-9)


def test_matrices_without_inputs_do_no_harm():
    view = View([{"layers.0.q": torch.ones(4, 8)}], {"layers.0.q": torch.zeros(1, 8)})
    assert Owl().rates(view, 0.5) == {"layers.0.q": 0.5}


@pytest.mark.parametrize("options", [{"strength": -0.1}, {"strength": 2.0}, {"outlier": 0.0}])
def test_options_out_of_range(options):
    with pytest.raises(UsageError):
        Owl(**options)
