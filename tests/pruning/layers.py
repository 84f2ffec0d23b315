"""Layers as they are met in models: correlated inputs with outlying channels and means that are not zero."""

import torch

from thinfer.pruning.statistics import InputStatistics


def layer(inputs, outputs, tokens=1024, seed=0):
    """A weight matrix [outputs, inputs] and inputs x [tokens, inputs]."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=random) * torch.arange(1, inputs + 1) ** -0.5
    x = torch.randn(tokens, inputs, generator=random) @ mix.T / 3 + 0.5 * torch.randn(tokens, inputs, generator=random)
    x = (x + 0.3 * torch.randn(inputs, generator=random)) * torch.exp(0.7 * torch.randn(inputs, generator=random))
    return torch.randn(outputs, inputs, generator=random) * 0.05, x


def observed(x, needs=frozenset({"gram"})):
    """Statistics of inputs [tokens, inputs]."""
    statistics = InputStatistics(x.shape[-1], needs)
    statistics.add(x)
    return statistics


def row_errors(weight, values, x):
    """‖(w − v) X‖² of every row from the inputs themselves, float64."""
    return ((weight - values).double() @ x.double().T).square().sum(1)


def layer_error(weight, values, x):
    """‖(W − V) X‖² / ‖W X‖²."""
    return float(row_errors(weight, values, x).sum() / row_errors(weight, torch.zeros_like(weight), x).sum())
