"""Masks of any module: the budget exactly, by the right order, and never less than before."""

import numpy as np
import pytest
import torch
from torch import nn

from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.recovery.masked import sparsity
from thinfer.pruning.training.magnitude import magnitude_masks, prunable


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 7))
    with torch.no_grad():
        model[4].weight *= 10
    return model


def sizes(model):
    return {name: p.detach().numpy() for name, p in model.named_parameters() if name in ("1.weight", "4.weight")}


def test_weights_of_layers_are_prunable_but_not_embeddings_and_vectors():
    model = network()
    assert prunable(model) == ["1.weight", "4.weight"]
    assert prunable(model, exclude=["4.*"]) == ["1.weight"]
    assert prunable(model, include=["4.weight"]) == ["4.weight"]
    with pytest.raises(UsageError, match=r"'5\.\*' matches no weight; there are 1.weight, 4.weight"):
        prunable(model, exclude=["5.*"])


@pytest.mark.parametrize("scope", ["global", "layer", "sigma"])
@pytest.mark.parametrize("rate", [0.0, 0.37, 0.9, 1.0])
def test_against_a_sort(scope, rate):
    model = network()
    masks = magnitude_masks(model, rate, scope)
    weights = sizes(model)
    scale = {name: values.std() if scope == "sigma" else 1.0 for name, values in weights.items()}
    groups = [[name] for name in weights] if scope == "layer" else [list(weights)]
    for group in groups:
        scores = np.concatenate([np.abs(weights[name]).ravel() / scale[name] for name in group])
        expected = np.ones(len(scores), bool)
        expected[np.argsort(scores)[: round(rate * len(scores))]] = False
        assert np.array_equal(torch.cat([masks[name].flatten() for name in group]).numpy(), expected)


def test_scopes_differ_where_layers_have_different_sizes():
    model = network()
    kept = {
        scope: magnitude_masks(model, 0.5, scope)["1.weight"].float().mean().item() for scope in ("global", "sigma")
    }
    assert kept["global"] < 0.1
    assert kept["sigma"] == pytest.approx(0.5, abs=0.1)


def test_ties_are_pruned_in_order_and_the_budget_is_exact():
    model = nn.Linear(10, 10, bias=False)
    nn.init.ones_(model.weight)
    mask = magnitude_masks(model, 0.335)["weight"].flatten()
    assert (~mask).nonzero().flatten().tolist() == list(range(34))


def test_what_is_pruned_stays_pruned():
    model = network()
    first = magnitude_masks(model, 0.4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    second = magnitude_masks(model, 0.7, before=first)
    assert sparsity(second) == pytest.approx(0.7, abs=0.005)
    assert all(not (second[name] & ~first[name]).any() for name in first)
    with pytest.raises(UsageError, match="can only rise"):
        magnitude_masks(model, 0.3, before=second)


def test_impossible_rates_and_weights_are_refused():
    model = network()
    with pytest.raises(UsageError, match="between 0 and 1"):
        magnitude_masks(model, 1.5)
    with torch.no_grad():
        model[4].weight[0, 0] = float("nan")
    with pytest.raises(CheckFailed, match="NaN or infinite"):
        magnitude_masks(model, 0.5)
