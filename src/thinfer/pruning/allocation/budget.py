"""Bringing rates to the sparsity asked for: the mean over all weights is met, and no rate leaves 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from thinfer.pruning.base import ModelView


def sizes(view: ModelView) -> dict[str, int]:
    """Weights of every matrix of the view."""
    return {name: view.weight(name).numel() for block in view.blocks for name in block}


def shifted(rates: Mapping[str, float], weights: Mapping[str, int], sparsity: float) -> dict[str, float]:
    """Rates with one number added to all, cut off at 0 and 1, whose mean weighted by the sizes is the sparsity.

    Example:
        >>> shifted({"a": 0.2, "b": 0.4}, {"a": 1, "b": 3}, 0.5)
        {'a': 0.35, 'b': 0.55}
    """
    reach = 1 + max(map(abs, rates.values()), default=0.0)
    return _met(lambda by: {name: rate + by for name, rate in rates.items()}, -reach, reach, weights, sparsity)


def scaled(rates: Mapping[str, float], weights: Mapping[str, int], sparsity: float) -> dict[str, float]:
    """Positive rates with one factor for all, cut off at 1, whose mean weighted by the sizes is the sparsity.

    Example:
        >>> scaled({"a": 0.5, "b": 1.0}, {"a": 2, "b": 2}, 0.75)
        {'a': 0.5, 'b': 1.0}
    """
    reach = 1 / min(rates.values(), default=1.0)
    return _met(lambda by: {name: rate * by for name, rate in rates.items()}, 0.0, reach, weights, sparsity)


def _met(
    at: Callable[[float], dict[str, float]], low: float, high: float, weights: Mapping[str, int], sparsity: float
) -> dict[str, float]:
    """The rates of a rising family, from all 0 at `low` to all 1 at `high`, whose weighted mean is the sparsity."""
    total = sum(weights.values())

    def cut(by: float) -> dict[str, float]:
        return {name: min(max(rate, 0.0), 1.0) for name, rate in at(by).items()}

    def lacks(rates: Mapping[str, float]) -> float:
        return sparsity * total - sum(rate * weights[name] for name, rate in rates.items())

    # 100 halvings reach the resolution of a float, far below one weight.
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if lacks(cut(middle)) > 0 else (low, middle)
    rates = cut(high)
    return {name: round(rate, 12) for name, rate in rates.items()}
