"""Case: one named set of arguments on which a kernel is compared with its reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Case:
    """Keyword arguments of an op's `reference`, and how far a kernel may be from it.

    `tolerance` is relative to the largest finite magnitude of the reference result, 0 meaning equal bits; NaN and
    infinities must be in the same places.
    """

    name: str
    args: Mapping[str, Any]
    tolerance: float


def normal(rng: np.random.Generator, *shape: int) -> Float32:
    """Standard normal float32 values."""
    return rng.standard_normal(shape, dtype=np.float32)
