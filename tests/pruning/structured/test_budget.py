"""The widths are those nearest to the parameters asked for, and shared as the scope says."""

import itertools

import pytest
import torch

from thinfer.errors import UsageError
from thinfer.pruning.structured.budget import Choice, kept_units

HEADS = Choice(8, 4096, range(1, 9))
NEURONS = Choice(256, 192, range(1, 257))


def gone(choices, kept):
    return sum((choice.units - kept[name]) * choice.cost for name, choice in choices.items())


@pytest.mark.parametrize("sparsity", [0.01, 0.1, 0.25, 0.5, 0.7, 0.85])
@pytest.mark.parametrize("step", [1, 8, 32])
def test_no_other_widths_come_nearer_than_half_a_step(sparsity, step):
    choices = {"heads": HEADS, "neurons": Choice(256, 192, range(step, 257, step))}
    wanted = round(sparsity * (8 * 4096 + 256 * 192))
    try:
        kept = kept_units(choices, {}, "layer", wanted)
    except UsageError:
        assert wanted < 192 * step / 2
        return
    pairs = itertools.product(HEADS.allowed, choices["neurons"].allowed)
    best = min(abs(gone(choices, dict(zip(choices, pair, strict=True))) - wanted) for pair in pairs)
    assert abs(gone(choices, kept) - wanted) <= max(best, 192 * step / 2)
    # Heads lose less than one fewer than their share, never more.
    assert 0 <= sparsity * 8 - (8 - kept["heads"]) + 1e-9 < 1 + 1e-6 or step > 1


def test_widths_that_a_configuration_does_not_hold_are_made_up_for():
    choices = {"heads": Choice(8, 4096, [4, 8]), "neurons": NEURONS}
    kept = kept_units(choices, {}, "layer", 16384)
    assert kept == {"heads": 8, "neurons": 256 - round(16384 / 192)}
    kept = kept_units(choices, {}, "layer", 60000)
    assert kept == {"heads": 4, "neurons": 256 - round((60000 - 4 * 4096) / 192)}


def test_global_takes_what_comes_last_wherever_it_is():
    choices = {"heads": Choice(4, 100, range(1, 5)), "neurons": Choice(40, 10, range(1, 41))}
    low, high = torch.zeros(3, 4), torch.ones(3, 40)
    assert kept_units(choices, {"heads": low, "neurons": high}, "global", 200) == {"heads": 2, "neurons": 40}
    assert kept_units(choices, {"heads": low + 2, "neurons": high}, "global", 200) == {"heads": 4, "neurons": 20}
    assert kept_units(choices, {"heads": low, "neurons": high}, "layer", 200) == {"heads": 3, "neurons": 30}


def test_a_budget_that_cannot_be_met_says_what_can():
    with pytest.raises(UsageError, match="at most 28,672 can"):
        kept_units({"heads": HEADS}, {}, "layer", 30000)
    with pytest.raises(UsageError, match="nothing would be cut"):
        kept_units({"heads": HEADS}, {}, "layer", 2000)
