"""Text as training batches, and the loss of a language model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinfer.calibration.text import cut_windows, read_documents
from thinfer.errors import UsageError


@dataclass(frozen=True, slots=True)
class TextBatches:
    """Windows of a packed text in an order drawn anew for every pass over it; batch i is the same at every call.

    Attributes:
        windows: token ids int64 [windows, length].
        batch: windows of one batch.
        seed: of the order.
        source: name of the text.
        sha256: hash of the text's bytes.

    Example: ``batches(0)`` is int64 [batch, length].
    """

    windows: Tensor
    batch: int
    seed: int
    source: str
    sha256: str

    def __call__(self, number: int) -> Tensor:
        """Batch of that number, int64 [batch, length]."""
        first = number * self.batch
        return torch.stack([self.windows[self._window(index)] for index in range(first, first + self.batch)])

    def _window(self, index: int) -> int:
        count = len(self.windows)
        return int(np.random.Generator(np.random.Philox([self.seed, index // count])).permutation(count)[index % count])


def text_batches(
    encode: Callable[[str], list[int]],
    text: str | Path | None = None,
    *,
    length: int = 512,
    batch: int = 1,
    seed: int = 0,
    bos_id: int | None = None,
    device: torch.device | str = "cpu",
) -> TextBatches:
    """Pack a text's documents one after another and cut them into windows in a row.

    Args:
        encode: text to token ids, without special tokens.
        text: as for `thinfer.calibration.text.read_documents`; None: the text that ships with thinfer.
        length: tokens of a window, the begin token included.
        batch: windows of a batch.
        seed: of the order of the windows.
        bos_id: put first in every window; None: none.
        device: where the windows lie.

    Raises:
        UsageError: the text has not even one window.
    """
    if batch < 1:
        raise UsageError(f"batches of {batch} windows; use at least 1")
    documents, source, digest = read_documents(text)
    stream = [token for document in documents for token in encode(document)]
    prefix = [] if bos_id is None else [bos_id]
    body = length - len(prefix)
    if body < 2 or len(stream) < body:
        raise UsageError(f"{source} has {len(stream)} tokens, less than one window of {length}; give a longer text")
    windows = torch.tensor([prefix + window for window in cut_windows(stream, body, None)], device=device)
    return TextBatches(windows, batch, seed, source, digest)


def lm_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean negative log-likelihood (nats) of every token of ids [batch, length] but the first of each window."""
    return next_token_loss(model(input_ids=ids, use_cache=False).logits, ids)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The same from logits [batch, length, vocabulary], which are taken in float32."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
