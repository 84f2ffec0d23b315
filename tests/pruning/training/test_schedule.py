"""Sparsity over time."""

import itertools

import pytest

from thinfer.errors import UsageError
from thinfer.pruning.training.schedule import CubicSchedule, rounds


def test_cubic():
    schedule = CubicSchedule(0.9, begin=10, end=110, initial=0.1, every=30)
    assert [schedule.sparsity(step) for step in (0, 10, 110, 500)] == [pytest.approx(v) for v in (0.1, 0.1, 0.9, 0.9)]
    assert schedule.sparsity(60) == pytest.approx(0.9 - 0.8 / 8)
    assert [step for step in range(200) if schedule.due(step)] == [10, 40, 70, 100, 110]
    values = [schedule.sparsity(step) for step in range(120)]
    assert values == sorted(values)


def test_rounds_prune_the_same_fraction_of_what_is_left():
    values = rounds(0.9, 5)
    left = [1.0] + [1 - value for value in values]
    ratios = [after / before for before, after in itertools.pairwise(left)]
    assert ratios == [pytest.approx(0.1 ** (1 / 5))] * 5
    assert values[-1] == 0.9
    assert rounds(0.3, 1) == [0.3]


@pytest.mark.parametrize("wrong", [{"final": 1.2}, {"initial": 0.9}, {"end": 0}, {"every": 0}])
def test_schedules_that_go_backwards_are_refused(wrong):
    with pytest.raises(UsageError):
        CubicSchedule(**{"final": 0.5, "begin": 0, "end": 5} | wrong)
    with pytest.raises(UsageError):
        rounds(1.0, 3)
    with pytest.raises(UsageError):
        rounds(0.5, 0)
