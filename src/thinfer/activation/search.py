"""Search: rates by kind of input, and by depth, that save the most bytes for a measured rise in perplexity."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinfer.activation.allocation import FLOOR, Curve, allocate
from thinfer.activation.measure import Loss

Rates = Mapping[str, float]
PROBE_RATES = (0.3, 0.5, 0.7)
# At this rate the groups of a kind are measured alone, to share out what the kind costs.
_SHARE_RATE = 0.5
_TRIES = 6
# Within this share of the allowed rise a further try cannot gain much.
_CLOSE = 0.9


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured point of the curve.

    Attributes:
        rates: fraction of channels to drop, by group.
        saved: fraction of the block weights' bytes that belong to them.
        ppl: perplexity on the held-out windows.
        rise: rise of the mean loss over dense, nats a token.
        rise_stderr: its standard error.
        density: measured fraction of block weights multiplied.
    """

    rates: Rates
    saved: float
    ppl: float
    rise: float
    rise_stderr: float
    density: float

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {
            "rates": dict(self.rates),
            "saved": self.saved,
            "ppl": self.ppl,
            "rise": self.rise,
            "rise_stderr": self.rise_stderr,
            "density": self.density,
        }


@dataclass(slots=True)
class RateSearch:
    """Tries rates, keeps what was measured, and never measures the same rates twice.

    Attributes:
        nbytes: stored bytes of the matrices of every group of inputs, which all get one rate.
        dense: loss without thresholds on the windows that `measure` uses.
        measure: loss at these rates by group.
        kinds: the groups of every kind of input; empty: every group is a kind.
        on_trial: told after every trial how many there were.
        trials: all measured points in their order.
    """

    nbytes: Mapping[str, int]
    dense: Loss
    measure: Callable[[Rates], Loss]
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    on_trial: Callable[[int], None] = lambda count: None
    trials: list[Trial] = field(default_factory=list)

    def uniform(self, rate: float) -> Trial:
        """One rate for every group."""
        return self._try(dict.fromkeys(self.nbytes, rate))

    def greedy(self, sparsity: float) -> Trial:
        """The rates that save this fraction of the bytes at the least modelled rise."""
        return self._try(allocate(self._curves(), save=sparsity))

    def within(self, max_ppl_increase: float) -> Trial:
        """The rates that save the most bytes while the measured perplexity rises by at most this fraction.

        Where even the smallest rates cost more, the result is dense: all rates 0.
        """
        limit = math.log1p(max_ppl_increase)
        curves = self._curves()
        best = self._try(dict.fromkeys(self.nbytes, 0.0))
        low, high, allow = 0.0, math.inf, limit
        for _ in range(_TRIES):
            trial = self._try(allocate(curves, allow=allow))
            if trial.rise <= limit:
                low = allow
                best = max(best, trial, key=lambda t: t.saved)
                if trial.rise >= _CLOSE * limit:
                    break
            else:
                high = allow
            # Rises are nearly proportional to what the model allows: scale, but stay inside what is known.
            allow *= min(max(0.97 * limit / max(trial.rise, 0.25 * limit), 0.25), 4.0)
            if not low < allow < high:
                allow = math.sqrt(max(low, high / 16) * high) if high < math.inf else 2 * low
        # A probe may happen to save more than any joint allocation within the limit.
        return max([best, *(t for t in self.trials if t.rise <= limit)], key=lambda t: t.saved)

    def _curves(self) -> dict[str, Curve]:
        """Three measurements a kind, and one more a group of those that have several.

        What a kind costs at a rate is shared out to its groups as they cost alone at one rate: measuring every group at
        every rate would take many times as long.
        """
        curves = {}
        for groups in self.kinds.values() or [[group] for group in self.nbytes]:
            rises = {rate: self._alone(groups, rate).rise for rate in PROBE_RATES}
            costs = dict.fromkeys(groups, 1.0)
            if len(groups) > 1:
                costs = {group: max(self._alone([group], _SHARE_RATE).rise, FLOOR) for group in groups}
            for group, cost in costs.items():
                share = cost / sum(costs.values())
                curves[group] = Curve(self.nbytes[group], {rate: share * rise for rate, rise in rises.items()})
        return curves

    def _alone(self, groups: Sequence[str], rate: float) -> Trial:
        """These groups at a rate, the others dense."""
        return self._try(dict.fromkeys(self.nbytes, 0.0) | dict.fromkeys(groups, rate))

    def _try(self, rates: Rates) -> Trial:
        for trial in self.trials:
            if trial.rates == rates:
                return trial
        loss = self.measure(rates) if any(rates.values()) else self.dense
        rise, stderr = loss.rise_over(self.dense)
        saved = sum(rate * self.nbytes[group] for group, rate in rates.items()) / sum(self.nbytes.values())
        trial = Trial(dict(rates), saved, loss.ppl, rise, stderr, loss.density)
        self.trials.append(trial)
        self.on_trial(len(self.trials))
        return trial
