"""How sparsity grows: along a cubic while training, or from round to round."""

from __future__ import annotations

from dataclasses import dataclass

from thinfer.errors import UsageError


@dataclass(frozen=True, slots=True)
class CubicSchedule:
    """Gradual pruning of Zhu and Gupta 2017 (arxiv.org/abs/1710.01878): fast at first, slow near the end.

    s(t) = final + (initial − final) · (1 − (t − begin) / (end − begin))³ between the steps `begin` and `end`.

    Attributes:
        final: sparsity from `end` on.
        begin: first step that prunes.
        end: last step that prunes.
        initial: sparsity at `begin`.
        every: steps between two prunings.

    Example:
        >>> CubicSchedule(0.8, begin=0, end=10).sparsity(5)
        0.7
    """

    final: float
    begin: int
    end: int
    initial: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.initial <= self.final <= 1:
            raise UsageError(f"sparsity from {self.initial:g} to {self.final:g}: must rise, between 0 and 1")
        if not 0 <= self.begin < self.end or self.every < 1:
            raise UsageError(f"pruning from step {self.begin} to {self.end}, every {self.every}: must go forward")

    def sparsity(self, step: int) -> float:
        """The sparsity wanted at a step."""
        done = min(max((step - self.begin) / (self.end - self.begin), 0.0), 1.0)
        return self.final + (self.initial - self.final) * (1 - done) ** 3

    def due(self, step: int) -> bool:
        """Whether a step prunes; `end` does, whatever `every` is."""
        return self.begin <= step <= self.end and ((step - self.begin) % self.every == 0 or step == self.end)


def rounds(final: float, count: int) -> list[float]:
    """Sparsities of `count` rounds that each prune the same fraction of what is left, the last being `final`.

    Example:
        >>> [round(value, 2) for value in rounds(0.488, 3)]
        [0.2, 0.36, 0.49]
    """
    if count < 1 or not 0 <= final < 1:
        raise UsageError(f"{count} rounds to a sparsity of {final:g}: at least 1 round, from 0 to below 1")
    return [1 - (1 - final) ** (number / count) for number in range(1, count)] + [final]
