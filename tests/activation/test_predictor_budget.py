"""The budget of predictors: what it holds, and that it is never exceeded."""

import pytest

from thinfer.activation.predictor_budget import Budget, least
from thinfer.activation.predictor_training import rank_for
from thinfer.activation.recording import Task

NEURONS, HEADS = (
    [Task(target, layer, "aim", "own", "source", 64, outputs) for layer in range(4)]
    for target, outputs in (("neurons", 96), ("heads", 4))
)
BOTH = [task for layer in zip(NEURONS, HEADS, strict=True) for task in layer]


def largest(budget):
    """Parameters of the predictors when each is as large as it may become."""
    taken = []
    for task in budget.held:
        rank = rank_for(budget.room(task), task.inputs, task.outputs)
        assert rank >= 32
        taken.append(rank * (task.inputs + task.outputs) + task.outputs)
        budget.spend(taken[-1])
    return taken


@pytest.mark.parametrize("tasks", [NEURONS, BOTH], ids=["neurons", "both"])
def test_it_is_never_exceeded(tasks):
    needed = sum(map(least, tasks))
    for parameters in range(0, 3 * needed, 97):
        budget = Budget(tasks, parameters, parameters / len(tasks))
        assert budget.needed == needed
        assert len(budget.held) + len(budget.left_out) == len(tasks)
        assert bool(budget.left_out) == (parameters < needed)
        used = sum(largest(budget))
        assert used <= parameters
        assert all(used + least(task) > parameters for task in budget.left_out)


def test_the_smallest_of_all_are_promised_first():
    """Neurons take more than an equal part, heads less: both get theirs."""
    needed = sum(map(least, BOTH))
    assert least(NEURONS[0]) > needed / len(BOTH)
    assert largest(Budget(BOTH, needed, needed / len(BOTH))) == [least(task) for task in BOTH]
    held = Budget(BOTH, needed - 1, needed / len(BOTH))
    assert held.left_out == [BOTH[-1]]


def test_what_one_leaves_the_next_may_use():
    part = 2 * least(NEURONS[0])
    budget = Budget(NEURONS, 4 * part, part)
    assert budget.room(NEURONS[0]) == part
    budget.spend(least(NEURONS[0]))
    assert budget.room(NEURONS[1]) == 1.5 * part
    budget.spend(round(1.5 * part))
    assert budget.room(NEURONS[2]) == part


def test_a_rank_is_a_multiple_of_32_or_nothing():
    assert rank_for(32 * 160 + 96, 64, 96) == 32
    assert rank_for(64 * 160 + 95, 64, 96) == 32
    assert rank_for(32 * 160 + 95, 64, 96) == 0
    assert rank_for(0, 64, 96) == 0
