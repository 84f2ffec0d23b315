"""Allocation: which rate each kind of input gets, from measured rises in loss.

Every kind's loss is measured alone at a few rates; the rises are taken to add up. The best allocation at a price λ
(bytes per nat) is then found kind by kind: the rate that maximises bytes saved − λ · rise. One bisection on λ meets the
target, be it the bytes to save or the rise allowed. The sum is only a model: `search.py` measures the result and
corrects it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HIGHEST_RATE = 0.9
_RATES = np.round(np.arange(0.0, HIGHEST_RATE + 0.005, 0.01), 2)
# The smallest r of values with a density around zero hold r³ of their energy, and loss grows with the energy dropped.
_EXPONENT_BELOW = 3.0
# Past the measured rates loss explodes rather than grows; a steep guess keeps the search from going there blindly.
_EXPONENT_ABOVE = 8.0
# Below this a measured rise is noise of the sampled text.
FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured rises in loss of one kind alone.

    Attributes:
        nbytes: stored bytes of the kind's matrices; a rate r saves r of them.
        points: rate -> rise of the mean negative log-likelihood in nats a token; at least one.
    """

    nbytes: int
    points: Mapping[float, float]

    def rises(self) -> NDArray[np.float64]:
        """Rise at every rate 0, 0.01 … 0.9: power laws through the points, never falling."""
        rates = np.array(sorted(self.points))
        values = np.maximum.accumulate([max(self.points[rate], FLOOR) for rate in rates])
        logs = np.log(np.maximum(_RATES, 1e-3))
        result = np.interp(logs, np.log(rates), np.log(values))
        below, above = rates[0] > _RATES, rates[-1] < _RATES
        result[below] = np.log(values[0]) + _EXPONENT_BELOW * (logs[below] - np.log(rates[0]))
        result[above] = np.log(values[-1]) + _EXPONENT_ABOVE * (logs[above] - np.log(rates[-1]))
        result = np.exp(result)
        result[0] = 0.0
        return result


def allocate(curves: Mapping[str, Curve], *, save: float | None = None, allow: float | None = None) -> dict[str, float]:
    """Rates by kind: the least rise that saves a fraction ``save`` of all bytes, or the most bytes within ``allow``.

    Args:
        curves: measured curve of every kind.
        save: fraction of the bytes to save; the result saves at least that, as far as rates up to 0.9 can.
        allow: rise allowed, in nats a token; the result stays within. Exactly one of the two is given.

    Example:
        >>> rates = allocate({"o": Curve(1, {0.5: 0.01}), "down": Curve(1, {0.5: 0.1})}, save=0.5)
        >>> rates["o"] > 0.5 > rates["down"]
        True
    """
    total = sum(curve.nbytes for curve in curves.values())
    rises = {kind: curve.rises() for kind, curve in curves.items()}

    def at(price: float) -> dict[str, int]:
        return {
            kind: int(np.argmax(_RATES * curve.nbytes / total - price * rises[kind])) for kind, curve in curves.items()
        }

    def saved(chosen: Mapping[str, int]) -> float:
        return float(sum(_RATES[index] * curves[kind].nbytes for kind, index in chosen.items()) / total)

    def rise(chosen: Mapping[str, int]) -> float:
        return float(sum(rises[kind][index] for kind, index in chosen.items()))

    # A higher price saves less and costs less: `low` always saves enough, `high` is always within what is allowed.
    low, high = 1e-6, 1e12
    too_dear: Callable[[Mapping[str, int]], bool]
    if save is not None:
        goal = save
        too_dear = lambda chosen: saved(chosen) < goal  # noqa: E731
    else:
        limit = allow or 0.0
        too_dear = lambda chosen: rise(chosen) <= limit  # noqa: E731
    for _ in range(100):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if too_dear(at(middle)) else (middle, high)
    return {kind: float(_RATES[index]) for kind, index in at(low if save is not None else high).items()}
