"""The pattern that the zeros of a weight matrix follow: unstructured, or n kept of every m along the input."""

from __future__ import annotations

import re
from dataclasses import dataclass

from thinfer.errors import UsageError


@dataclass(frozen=True, slots=True)
class SparsityPattern:
    """n weights **kept** of each m in a row along the input, or, where both are 0, any weights.

    Raises:
        UsageError: not 0 < n < m.

    Example:
        >>> SparsityPattern.parse("1:4").sparsity
        0.75
    """

    n: int = 0
    m: int = 0

    def __post_init__(self) -> None:
        if (self.n, self.m) != (0, 0) and not 0 < self.n < self.m:
            raise UsageError(f"pattern {self.n}:{self.m}: n weights are kept of each m, so 0 < n < m")

    @classmethod
    def parse(cls, text: str) -> SparsityPattern:
        """``"2:4"`` or ``"unstructured"``; UsageError for anything else."""
        if text == "unstructured":
            return cls()
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if match is None:
            raise UsageError(f"pattern {text!r}: write n:m, as 2:4 (2 kept of each 4), or unstructured")
        return cls(int(match[1]), int(match[2]))

    @property
    def structured(self) -> bool:
        """Whether this is an n:m pattern."""
        return self.m > 0

    @property
    def sparsity(self) -> float:
        """The fraction of zeros that n:m gives; 0 for unstructured, which leaves it open."""
        return 1 - self.n / self.m if self.m else 0.0

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" if self.m else "unstructured"
