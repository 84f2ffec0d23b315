"""Distributions over the vocabulary: log-probabilities, and how far one lies from another."""

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def log_softmax(logits: Float32) -> Float64:
    """Log-probabilities float64 [rows, vocab] of logits [rows, vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    result: Float64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def divergence(log_q: Float64, log_p: Float64) -> Float64:
    """KL(q || p) of each row of two tables of log-probabilities [rows, vocab], in nats."""
    # A token that q excludes (log q = -inf) adds nothing, whatever p says.
    gap = np.subtract(log_q, log_p, where=np.isfinite(log_q), out=np.zeros_like(log_q))
    result: Float64 = (np.exp(log_q) * gap).sum(axis=1)
    return result
