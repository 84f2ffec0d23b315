"""Measures what thresholds cost: loss on held-out windows, and bytes a decode step reads."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinfer.core.selector import ThresholdSelector
from thinfer.engine.kv_cache import Sequence
from thinfer.engine.runtime import Engine, Usage, Work

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Loss:
    """Negative log-likelihoods in nats, float64, one a predicted token, in the order of the windows.

    Attributes:
        tokens: the single values.
        density: fraction of the block weights that were multiplied.
    """

    tokens: Float64
    density: float

    @property
    def mean(self) -> float:
        """Mean in nats a token."""
        return float(self.tokens.mean())

    @property
    def ppl(self) -> float:
        """Perplexity."""
        return float(np.exp(self.mean))

    def rise_over(self, dense: "Loss") -> tuple[float, float]:
        """Mean rise in nats a token over the same tokens run dense, and its standard error (paired)."""
        difference = self.tokens - dense.tokens
        return float(difference.mean()), float(difference.std() / np.sqrt(len(difference)))


def measure_loss(engine: Engine, windows: Items[Items[int]], selector: ThresholdSelector | None) -> Loss:
    """Run the windows with these thresholds on every row past the sinks, as decode would, but many rows a call."""
    before = engine.selector
    engine.selector = selector
    engine.reset_usage()
    losses = []
    try:
        for window in windows:
            losses.append(_window_loss(engine, window))
        density = engine.usage().density
    finally:
        engine.selector = before
    return Loss(np.concatenate(losses), density)


def measure_decode(engine: Engine, window: Items[int], selector: ThresholdSelector | None, steps: int = 32) -> Usage:
    """Counts of ``steps`` decode steps of one sequence, after the rest of the window as a dense prompt."""
    before = engine.selector
    engine.selector = selector
    sequence = engine.new_sequence()
    try:
        start = max(len(window) - steps, 1)
        engine.step([Work(sequence, window[:start], "none")])
        engine.reset_usage()
        for token in window[start:]:
            engine.step([Work(sequence, [token], "last", sparse=True)])
        return engine.usage()
    finally:
        engine.free(sequence)
        engine.selector = before


def _window_loss(engine: Engine, window: Items[int]) -> Float64:
    targets = np.array(window[1:], np.int64)
    losses = np.zeros(len(targets), np.float64)

    def score(_: Sequence, first: int, logits: Float32) -> None:
        wanted = targets[first : first + len(logits)]
        rows = logits[: len(wanted)]
        top = rows.max(axis=1)
        total = np.exp(rows - top[:, None]).sum(axis=1, dtype=np.float64)
        chosen = rows[np.arange(len(wanted)), wanted]
        losses[first : first + len(wanted)] = np.log(total) + top - chosen

    sequence = engine.new_sequence()
    try:
        engine.step([Work(sequence, window, "all", sparse=True)], on_logits=score)
    finally:
        engine.free(sequence)
    return losses
