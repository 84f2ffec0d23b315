"""Log-probabilities of tokens under the model's own distribution: before temperature, penalties, bias, constraints."""

import numpy as np
from numpy.typing import NDArray

from thinfer.core.request import TokenLogprob
from thinfer.engine.sampler import largest


def token_logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """The natural log-probability of a token and of the most likely ones.

    Args:
        logits: float32 [vocab].
        token: the id whose log-probability is wanted.
        top: how many of the most likely ids come with it; equal ones by id.

    Example:
        >>> token_logprob(np.zeros(2, np.float32), 1, 1)
        TokenLogprob(token=1, logprob=-0.6931471805599453, top=((0, -0.6931471805599453),))
    """
    most = logits.max()
    with np.errstate(over="ignore"):
        total = float(most) + float(np.log(np.exp(logits - most).sum(dtype=np.float64)))
    ids = largest(logits, top)[:top].tolist() if top else []
    return TokenLogprob(token, float(logits[token]) - total, tuple((i, float(logits[i]) - total) for i in ids))
