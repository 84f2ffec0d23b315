"""Whole numbers among options."""

from numbers import Integral
from typing import Any

from thinfer.errors import UsageError


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def require_whole(options: object, **least: int) -> None:
    """UsageError unless each of these fields is a whole number of at least so much.

    Example:
        >>> require_whole(ProfileOptions(), tokens=1, seed=0)
    """
    for name, smallest in least.items():
        value: Any = getattr(options, name)
        if not is_whole(value) or value < smallest:
            raise UsageError(f"{name} must be a whole number of at least {smallest}, not {value!r:.60}")
