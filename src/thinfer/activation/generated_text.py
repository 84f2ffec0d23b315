"""Text that a model writes itself, as training windows; LLM-QAT (Liu et al. 2023, arxiv.org/abs/2305.17888)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor
from typing import Any

import torch
from torch import Tensor

from thinfer.errors import UsageError
from thinfer.pruning.recovery.language import TextBatches

_BEGINNING = 8
"""Tokens of a window that are taken from the text, the begin token included; the model goes on from there."""
_TOGETHER = 8


@torch.no_grad()
def write_windows(
    model: Any,
    text: TextBatches,
    count: int,
    *,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Tensor:
    """Windows int64 [count, length] of the length of the text's: they begin as those do, and the model goes on.

    Tokens are sampled from the whole distribution at temperature 1, but for ends: with less, the text is too easy.

    Args:
        model: of transformers, in evaluation mode.
        text: where the beginnings are taken from, in its order.
        count: windows to write.
        seed: of the sampling.
        progress: told how many are written.

    Raises:
        UsageError: the text's windows are hardly longer than a beginning.

    Example: ``write_windows(teacher, batches, 16)``.
    """
    length = text.windows.shape[1]
    if length <= 2 * _BEGINNING:
        raise UsageError(f"windows of {length} tokens are too short for text that the model writes; use --seqlen 64")
    device = next(model.parameters()).device
    one_by_one = TextBatches(text.windows, 1, text.seed, text.source, text.sha256)
    written: list[Tensor] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for first in range(0, count, _TOGETHER):
            ids = torch.cat([one_by_one(number) for number in range(first, min(first + _TOGETHER, count))])
            ids = ids[:, :_BEGINNING].to(device)
            with _whole_distribution(model, length - _BEGINNING):
                written.append(model.generate(ids, attention_mask=torch.ones_like(ids)))
            progress(f"the dense model writes text: {min(first + _TOGETHER, count)} of {count} windows")
    return torch.cat(written).to(text.windows.device)


@contextmanager
def _whole_distribution(model: Any, tokens: int) -> Iterator[None]:
    """Within, the model writes so many tokens, none of them an end, drawn as it predicts them.

    Its own settings, such as a penalty on repetition, would be mixed into arguments of `generate`.
    """
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    own = model.generation_config
    model.generation_config = make(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        eos_token_id=own.eos_token_id,
        pad_token_id=0,
    )
    try:
        yield
    finally:
        model.generation_config = own


@dataclass(frozen=True, slots=True)
class MixedBatches:
    """Batches of a text in which a fixed share of the windows is of another source, spread evenly.

    Attributes:
        text: the other windows; its batch size is that of the mixture.
        written: int64 [windows, length]; used from the first on, and again from the first when all are used.
        share: of the windows that are of `written`, from 0 to 1.

    Example: ``MixedBatches(batches, written, 0.25)(0)`` is int64 [batch, length].
    """

    text: TextBatches
    written: Tensor
    share: float

    def __call__(self, number: int) -> Tensor:
        """Batch of that number; the same at every call."""
        one_by_one = TextBatches(self.text.windows, 1, self.text.seed, self.text.source, self.text.sha256)
        rows = []
        for index in range(number * self.text.batch, (number + 1) * self.text.batch):
            before, now = floor(index * self.share), floor((index + 1) * self.share)
            own = now > before
            rows.append(self.written[before % len(self.written)] if own else one_by_one(index - before)[0])
        return torch.stack(rows)
