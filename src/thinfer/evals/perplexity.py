r"""Perplexity of a text under a model, and the distance of its predictions from those of another model.

The text is tokenised once, as one string, with ``\r\n`` read as ``\n``, and cut into windows in a row of ``ctx``
tokens from its start; an incomplete last window is left out. Each window is run in an empty context. Where the model
adds a BOS token, one is put before every window (not counted in ``ctx``). Every token but the first of its window is
scored with a negative log-likelihood, so a window gives ``ctx - 1`` of them (and its last token is never run)::

    ppl = exp(mean(nll))          ppl_stderr = ppl * std(nll) / sqrt(tokens)

The error takes tokens as independent. With a reference model q, both see the same windows and::

    kl = sum_v q(v) * (log q(v) - log p(v))   for every scored token;  top1_agreement: argmax p == argmax q
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thinfer.core.distribution import divergence, log_softmax

if TYPE_CHECKING:
    from thinfer.engine.runtime import Engine

# Logits of this many tokens exist at a time: 128 rows of a vocabulary of 150,000 are 78 MB.
PIECE = 128

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The result of `perplexity`; see the module for the definitions. The last three need a reference model."""

    ppl: float
    ppl_stderr: float
    tokens: int
    ctx: int
    windows: int
    bos: bool
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields that have a value, ready for JSON."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value is not None}


def perplexity(
    engine: "Engine",
    windows: Sequence[Sequence[int]],
    *,
    bos_id: int | None = None,
    decode: bool = False,
    reference: "Engine | None" = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Perplexity:
    """Score the windows with a model, and compare it with a reference when there is one.

    Args:
        engine: the model.
        windows: token ids, all of one length of at least 2; see `thinfer.calibration.text.cut_windows`.
        bos_id: put before every window when given.
        decode: let the model's thresholds act on every row as they do in decode (the first tokens stay dense). Rows
            do not depend on each other's batch, so this equals running token by token.
        reference: the model to compare with; the same vocabulary, run as it runs by itself.
        progress: told the perplexity so far.
    """
    scores: list[Float64] = []
    kls: list[Float64] = []
    same: list[NDArray[np.bool_]] = []
    for number, window in enumerate(windows, start=1):
        runs = [_WindowRun(engine, window, bos_id, decode)]
        if reference is not None:
            runs.append(_WindowRun(reference, window, bos_id, decode))
        for first in range(0, len(window) - 1, PIECE):
            last = min(first + PIECE, len(window) - 1)
            targets = np.asarray(window[first + 1 : last + 1])
            logits = runs[0].logits(first, last)
            log_p = log_softmax(logits)
            scores.append(-log_p[np.arange(len(targets)), targets])
            if reference is not None:
                log_q = log_softmax(runs[1].logits(first, last))
                kls.append(divergence(log_q, log_p))
                same.append(log_q.argmax(axis=1) == log_p.argmax(axis=1))
        for run in runs:
            run.close()
        progress(f"window {number} of {len(windows)}: ppl {math.exp(float(np.concatenate(scores).mean())):.3f}")
    nll = np.concatenate(scores)
    ppl = math.exp(float(nll.mean()))
    compared: dict[str, float] = {}
    if kls:
        kl = np.concatenate(kls)
        compared = {
            "kl_mean": float(kl.mean()),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "top1_agreement": float(np.concatenate(same).mean()),
        }
    return Perplexity(
        ppl=ppl,
        ppl_stderr=ppl * float(nll.std(ddof=1)) / math.sqrt(len(nll)) if len(nll) > 1 else 0.0,
        tokens=len(nll),
        ctx=len(windows[0]),
        windows=len(windows),
        bos=bos_id is not None,
        **compared,
    )


class _WindowRun:
    """One window going through one engine, piece by piece in one sequence."""

    def __init__(self, engine: "Engine", window: Sequence[int], bos_id: int | None, decode: bool) -> None:
        from thinfer.engine.runtime import Work

        self._work = Work
        self._engine = engine
        self._window = window
        self._sequence = engine.new_sequence()
        self._sparse = decode or (engine.selector is not None and engine.selector.prefill)
        if bos_id is not None:
            engine.step([Work(self._sequence, [bos_id], logits="none", sparse=self._sparse)])

    def logits(self, first: int, last: int) -> Float32:
        """Logits float32 [last - first, vocab] after each of the tokens ``first`` to ``last - 1``."""
        tokens = self._window[first:last]
        work = self._work(self._sequence, tokens, logits="all", sparse=self._sparse)
        (logits,) = self._engine.step([work])
        return logits

    def close(self) -> None:
        self._engine.free(self._sequence)
