"""Whole numbers among options."""

from dataclasses import dataclass

import numpy as np
import pytest

from thinfer.core.whole import is_whole, require_whole
from thinfer.errors import UsageError


@dataclass
class Options:
    tokens: object = 1
    seed: object = 0


@pytest.mark.parametrize("value", [0, -3, 2**70, np.int64(3)])
def test_whole(value):
    assert is_whole(value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, np.float32(1)])
def test_not_whole(value):
    assert not is_whole(value)
    with pytest.raises(UsageError, match=r"^tokens must be a whole number of at least 1, not "):
        require_whole(Options(tokens=value), tokens=1, seed=0)


def test_the_least_itself_is_allowed():
    require_whole(Options(), tokens=1, seed=0)
    with pytest.raises(UsageError, match="seed must be a whole number of at least 0, not -1"):
        require_whole(Options(seed=-1), tokens=1, seed=0)
