"""ActiveSet: what it refuses, and that its views agree with each other."""

import numpy as np
import pytest

from thinfer.core.active_set import ActiveSet
from thinfer.errors import UsageError

GROUPS = [[0, 3, 7], [], [3], [0, 1, 2, 3, 4, 5, 6, 7]]


def int32(*values):
    return np.array(values, np.int32)


def test_views_agree():
    active = ActiveSet.of(GROUPS, 8)
    assert [active.group(i).tolist() for i in range(active.groups)] == GROUPS
    assert [np.flatnonzero(row).tolist() for row in active.mask()] == GROUPS
    assert active.union().tolist() == list(range(8))
    assert active.density == 12 / 32
    again = ActiveSet.where(active.mask())
    assert np.array_equal(again.ids, active.ids)
    assert np.array_equal(again.offsets, active.offsets)


def test_all_is_dense():
    active = ActiveSet.all(5, 3)
    assert active.density == 1.0
    assert active.mask().all()


def test_an_intersection_is_taken_group_by_group():
    both = ActiveSet.of([[1, 2], [0]], 4).intersection(ActiveSet.of([[2, 3], [1]], 4))
    assert [both.group(0).tolist(), both.group(1).tolist()] == [[2], []]
    with pytest.raises(UsageError, match="same axis"):
        both.intersection(ActiveSet.all(4))


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (int32(1, 1), int32(0, 2), "ascend"),
        (int32(2, 1), int32(0, 2), "ascend"),
        (int32(4), int32(0, 1), r"0\.\.3"),
        (int32(-1), int32(0, 1), r"0\.\.3"),
        (int32(1), int32(0, 2), "offsets"),
        (int32(1, 2), int32(0, 2, 1, 2), "offsets"),
        (int32(), int32(), "offsets"),
        (np.array([1.0]), int32(0, 1), "int32"),
    ],
)
def test_what_is_no_set_is_refused(ids, offsets, message):
    with pytest.raises(UsageError, match=message):
        ActiveSet(4, ids, offsets)


def test_groups_may_begin_below_the_end_of_the_one_before():
    assert ActiveSet(4, int32(3, 0, 3), int32(0, 0, 1, 3, 3)).groups == 4


def test_an_empty_set_has_no_ids():
    active = ActiveSet.of([[], []], 4)
    assert active.union().size == 0
    assert active.density == 0.0


def test_weights_belong_to_ids():
    with pytest.raises(UsageError, match="one value an id"):
        ActiveSet(4, int32(1), int32(0, 1), np.ones(2, np.float32))
