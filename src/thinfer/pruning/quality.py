"""Perplexity of a transformers model, by the definition of `thinfer eval perplexity`.

Each window is run in an empty context, behind the begin token where the model wants one (it is not counted in the
window's length), and every token but the first of its window is scored::

    ppl = exp(mean(nll))          ppl_stderr = ppl * std(nll) / sqrt(tokens)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from thinfer.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from torch import Tensor

# Log-probabilities of this many tokens exist at a time in float64: 128 rows of a vocabulary of 150,000 are 154 MB.
_PIECE = 128


@dataclass(frozen=True, slots=True)
class Quality:
    """What a text costs a model: perplexity, its standard error, and how it was measured."""

    ppl: float
    ppl_stderr: float
    tokens: int
    ctx: int
    windows: int
    bos: bool

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)


def torch_perplexity(
    model: Any,
    windows: Sequence[Sequence[int]],
    *,
    bos_id: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Quality:
    """Perplexity of any causal language model of transformers on windows of token ids.

    Args:
        model: the model; it runs where its weights are, in evaluation mode, and is left in the mode it had.
        windows: token ids, all of one length of at least 2; see `thinfer.calibration.text.cut_windows`.
        bos_id: put before every window when given, and not scored.
        progress: told the perplexity so far.

    Raises:
        UsageError: no windows, or windows of less than two tokens.
        CheckFailed: the model's predictions are NaN.

    Example:
        >>> torch_perplexity(model, cut_windows(ids, 1024, 10)).ppl  # doctest: +SKIP
        24.1
    """
    if not windows or min(map(len, windows)) < 2:
        raise UsageError("perplexity needs at least one window of two tokens")
    scores: list[Tensor] = []
    for number, window in enumerate(windows, 1):
        scores.append(token_losses(model, window, bos_id))
        mean = float(torch.cat(scores).mean())
        if math.isnan(mean):
            raise CheckFailed(
                "the model predicts NaN; if it did so before it was changed, fetch it again; else load it with dtype "
                "float32, or change it less"
            )
        progress(f"window {number} of {len(windows)}: ppl {_exp(mean):.3f}")
    nll = torch.cat(scores)
    ppl = _exp(float(nll.mean()))
    return Quality(
        ppl=ppl,
        ppl_stderr=ppl * float(nll.std()) / math.sqrt(len(nll)) if len(nll) > 1 else 0.0,
        tokens=len(nll),
        ctx=len(windows[0]),
        windows=len(windows),
        bos=bos_id is not None,
    )


def token_losses(model: Any, window: Sequence[int], bos_id: int | None = None) -> Tensor:
    """Negative log-likelihood float64 [tokens - 1] (nats) of each token of a window but its first."""
    prefix = [] if bos_id is None else [bos_id]
    device = model.get_input_embeddings().weight.device
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            # The last token predicts nothing that is scored.
            ids = torch.tensor([[*prefix, *window[:-1]]], device=device)
            logits: Any = model(input_ids=ids, use_cache=False).logits[0, len(prefix) :]
            targets: Any = torch.tensor(list(window[1:]), device=device)
            pieces = [
                torch.nn.functional.cross_entropy(rows.double(), wanted, reduction="none").cpu()
                for rows, wanted in zip(logits.split(_PIECE), targets.split(_PIECE), strict=True)
            ]
    finally:
        model.train(training)
    return torch.cat(pieces)


def _exp(mean: float) -> float:
    """The exponential; infinity where a model is so broken that a float cannot hold it."""
    return math.exp(mean) if mean < 700 else math.inf
