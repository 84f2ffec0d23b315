"""Observer: the distribution of every linear's input magnitudes, collected while the engine runs."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from thinfer.engine.batch import Batch

Float32 = NDArray[np.float32]

# The upper 16 bits of a positive float32 are its exponent and the first 8 bits of its fraction: bins 0.4 % wide over
# the whole range, without knowing it beforehand.
_SHIFT = 15
_BINS = 1 << (31 - _SHIFT)
_INFINITY = 0xFF << (23 - _SHIFT)


class ScoreHistogram:
    """Counts of non-negative scores in bins 0.4 % wide; quantiles are interpolated inside a bin.

    Integer counts: the result depends on neither order nor chunking.

    Example:
        >>> histogram = ScoreHistogram()
        >>> histogram.add(np.arange(1, 101, dtype=np.float32))
        >>> 49 < histogram.quantile(0.5) < 51.5
        True
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, np.int64)
        self._largest = np.float32(0)

    def add(self, scores: Float32) -> None:
        """Count scores, any shape; NaN is left out, since the selector never drops it."""
        flat = np.ascontiguousarray(scores).ravel()
        if not len(flat):
            return
        self._counts += np.bincount(flat.view(np.uint32) >> np.uint32(_SHIFT), minlength=_BINS)
        # NaN lies above infinity.
        self._counts[_INFINITY + 1 :] = 0
        self._largest = np.fmax(self._largest, np.fmax.reduce(flat))

    @property
    def total(self) -> int:
        """How many scores were counted."""
        return int(self._counts.sum())

    def quantile(self, rate: float) -> float:
        """The score that a fraction ``rate`` of all scores does not exceed; 1 gives the largest float32."""
        if rate >= 1:
            # Not the largest score seen: a rate of 1 drops everything on any text.
            return float(np.finfo(np.float32).max)
        ends = np.cumsum(self._counts)
        point = rate * ends[-1]
        index = int(np.searchsorted(ends, point, side="left"))
        edges = (np.array([index, index + 1], np.uint32) << np.uint32(_SHIFT)).view(np.float32)
        low, high = float(edges[0]), float(edges[1])
        before = int(ends[index - 1]) if index else 0
        share = float(point - before) / max(int(self._counts[index]), 1)
        return min(low + share * (high - low), float(self._largest))


class ScoreObserver:
    """Histograms of |x| (TEAL) or |x|·scale (WINA) for every site, without the first ``sink_tokens`` positions.

    Pass `observe` to `Engine.step`.
    """

    def __init__(self, scales: Mapping[str, Float32], sink_tokens: int, sites: frozenset[str]) -> None:
        self._scales = scales
        self._sink_tokens = sink_tokens
        self._sites = sites
        self.histograms: dict[str, ScoreHistogram] = {}

    def observe(self, batch: Batch, site: str, x: Float32) -> None:
        """Count one linear's input [M, channels]."""
        if site not in self._sites:
            return
        scores = np.abs(x[batch.positions >= self._sink_tokens])
        scale = self._scales.get(site)
        if scale is not None:
            scores *= scale
        self.histograms.setdefault(site, ScoreHistogram()).add(scores)
