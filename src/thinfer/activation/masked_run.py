"""Windows of text through the NumPy executor with any part of the activations left out, and what that costs.

Only this executor takes a set of its own for every token. It works in float32, so the differences are those of the sets
alone.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from thinfer.core.distribution import divergence, log_softmax
from thinfer.core.selector import ChannelMask
from thinfer.engine.batch import Batch
from thinfer.engine.executor import Observe
from thinfer.engine.finite import require_numbers
from thinfer.engine.kv_cache import BLOCK_SIZE, KvLayout
from thinfer.engine.reference import ReferenceExecutor
from thinfer.models.loader import Model

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

# Tables of float64 log-probabilities of this many tokens exist at a time.
_PIECE = 64


class WindowRunner:
    """Runs one window at a time, all tokens in one call; weights are decoded to float32 once.

    Example: `WindowRunner(model, length=256).run(window)` gives logits [256, vocab].
    """

    def __init__(self, model: Model, length: int, sink_tokens: int = 4) -> None:
        self._blocks = -(-length // BLOCK_SIZE)
        self._sinks = sink_tokens
        self._executor = ReferenceExecutor(model, KvLayout(self._blocks, type="f32"))

    def run(self, window: Sequence[int], mask: ChannelMask | None = None, observe: Observe | None = None) -> Float32:
        """Logits float32 [T, vocab] of a window of T tokens; the mask leaves the first ``sink_tokens`` alone."""
        rows = np.arange(len(window), dtype=np.int32)
        batch = Batch(
            tokens=np.array(window, np.int32),
            positions=rows,
            sequence=np.zeros(len(window), np.int32),
            sparse=(rows >= self._sinks).astype(np.uint8),
            out_rows=rows,
            block_table=np.arange(self._blocks, dtype=np.int32)[None],
        )
        self._executor.set_selector(mask)
        return self._executor.run(batch, observe=observe)


class RecordedSets:
    """A ChannelMask of sets written down before: ``masks`` maps a site to bool [T, channels], row by row.

    Sites that are not named keep everything.
    """

    def __init__(self, masks: dict[str, Bool]) -> None:
        self._masks = masks

    def keep(self, site: str, x: Float32, columns: Sequence[int] | None = None) -> Bool | None:
        """The recorded rows of this site."""
        mask = self._masks.get(site)
        return None if mask is None else (mask.copy() if columns is None else mask[:, list(columns)])


class Comparison:
    """Gathers dense and masked predictions of the same tokens: loss, KL divergence, agreement.

    Example: `Comparison().add(window, dense, masked)`, then `result()`.
    """

    def __init__(self) -> None:
        self._nll: list[tuple[Float64, Float64]] = []
        self._kl: list[Float64] = []
        self._same: list[Bool] = []

    def add(self, window: Sequence[int], dense: Float32, masked: Float32, first: int = 0) -> None:
        """Count one window's predictions of token ``first + 1`` on; logits are float32 [T, vocab].

        CheckFailed when a logit is NaN.
        """
        for logits in (dense, masked):
            require_numbers(logits, "what the model predicts")
        for start in range(first, len(window) - 1, _PIECE):
            stop = min(start + _PIECE, len(window) - 1)
            targets = np.asarray(window[start + 1 : stop + 1])
            rows = np.arange(len(targets))
            log_q, log_p = log_softmax(dense[start:stop]), log_softmax(masked[start:stop])
            self._nll.append((-log_q[rows, targets], -log_p[rows, targets]))
            self._kl.append(divergence(log_q, log_p))
            self._same.append(log_q.argmax(axis=1) == log_p.argmax(axis=1))

    def result(self) -> dict[str, float]:
        """Perplexity "ppl_dense" and "ppl"; "rise" in nats a token with "rise_stderr" (paired); "kl_mean" and "kl_p99"
        in nats; "top1_agreement"; "tokens".
        """  # noqa: D205
        dense, masked = (np.concatenate(parts) for parts in zip(*self._nll, strict=True))
        rise, kl = masked - dense, np.concatenate(self._kl)
        return {
            "ppl_dense": float(np.exp(dense.mean())),
            "ppl": float(np.exp(masked.mean())),
            "rise": float(rise.mean()),
            "rise_stderr": float(rise.std() / np.sqrt(len(rise))),
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "top1_agreement": float(np.concatenate(self._same).mean()),
            "tokens": len(kl),
        }
