"""What structured methods share: what they return, and how calibration windows reach a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from thinfer.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int, str], None]
"""Told how many of how many steps of what are done."""

Windows = Sequence[Sequence[int]] | Tensor
"""Token ids, [windows, length]."""

Notes = dict[str, float | int | str]
"""Figures and sentences for the report, by name."""

BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class StructuredResult:
    """What was cut from a model.

    Attributes:
        sparsity: fraction of the parameters of the blocks that is gone, counted.
        before: shape of every parameter of the model as it was.
        after: shape of every parameter of the model as it is.
        kept: what stays, numbered as it was: by family ("self_attn.o_proj", "mlp.down_proj") the units of each layer;
            under "layers" and "channels" one list.
        notes: figures and sentences for the report.
    """

    sparsity: float
    before: Mapping[str, tuple[int, ...]]
    after: Mapping[str, tuple[int, ...]]
    kept: Mapping[str, list[list[int]]]
    notes: Notes = field(default_factory=dict)


def require_uniform(uniform: bool) -> None:
    """UsageError where widths may differ between layers."""
    if not uniform:
        raise UsageError(
            "uniform=False: a configuration of transformers has one width for all layers, so a model whose layers "
            "differ would not load; leave uniform at True"
        )


def token_ids(windows: Windows) -> Tensor:
    """Windows as a tensor [windows, length].

    Raises:
        UsageError: there are no windows, or they are not all of one length of 2 tokens or more.
    """
    try:
        ids = torch.as_tensor(windows, dtype=torch.long)
    except (ValueError, TypeError) as error:
        raise UsageError("calibration windows must all have one length") from error
    if ids.ndim != 2 or len(ids) == 0 or ids.shape[1] < 2:
        raise UsageError("calibration needs one window or more, each of 2 tokens or more")
    return ids


def run_windows(model: PreTrainedModel, windows: Windows, progress: Progress | None, phase: str) -> int:
    """Run all windows through a model for what its hooks see, some thousand tokens at a time; the number of tokens."""
    ids = token_ids(windows)
    parts = torch.split(ids, max(1, BATCH_TOKENS // ids.shape[1]))
    with evaluating(model), torch.no_grad():
        for done, part in enumerate(parts):
            if progress is not None:
                progress(done, len(parts), phase)
            model.base_model(input_ids=part.to(model.device), use_cache=False)
    return ids.numel()


def random_tokens(model: PreTrainedModel, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Token ids [rows, columns] out of a model's vocabulary, on its device."""
    vocabulary = len(cast(Tensor, model.get_input_embeddings().weight))
    return torch.randint(vocabulary, (rows, columns), generator=generator).to(model.device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model without dropout; afterwards as it was."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)
