"""What a structured method is, and the frame of its run: move the model, find its parts, cut them, check the cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from thinfer.errors import UsageError
from thinfer.pruning.structured.base import Notes, Progress, StructuredResult, Windows
from thinfer.pruning.structured.configuration import Configuration
from thinfer.pruning.structured.groups import Layout, find_groups
from thinfer.pruning.structured.surgery import Cut, apply

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Work:
    """What one run works on.

    Attributes:
        model: on the device.
        layout: its parts.
        configuration: what its configuration can hold.
        windows: token ids, [windows, length].
        sparsity: fraction of the parameters of the blocks to cut, above 0 and below 1.
        progress: told what runs.
    """

    model: PreTrainedModel
    layout: Layout
    configuration: Configuration
    windows: Windows
    sparsity: float
    progress: Progress | None


class StructuredMethod(ABC):
    """Cuts heads, neurons, channels or layers out of a model, which stays an ordinary model of its class."""

    __slots__ = ()

    @abstractmethod
    def cut(self, work: Work) -> tuple[Cut, Notes]:
        """What stays, and figures for the report; the model is left as it is.

        Raises:
            UsageError: a sparsity that cannot be met; windows of several lengths.
            UnsupportedError: the parts are not found, or the configuration holds no smaller width of them.
            CheckFailed: something is NaN or infinite.
        """

    def prune(
        self,
        model: PreTrainedModel,
        windows: Windows,
        sparsity: float,
        *,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> StructuredResult:
        """Cut `sparsity` of the parameters of the blocks, in place.

        Args:
            model: put back where it was afterwards.
            windows: token ids, [windows, length].
            sparsity: above 0 and below 1: a structured method always cuts something and leaves something.
            device: where to work.
            progress: told what runs.

        Raises:
            UsageError: a sparsity that cannot be met; windows of several lengths.
            UnsupportedError: the parts are not found, or the configuration holds no smaller width of them.
            CheckFailed: something is NaN or infinite.
        """
        if not 0 < sparsity < 1:
            raise UsageError(f"sparsity must lie between 0 and 1, not {sparsity}, for a structured method")
        with on_device(model, device):
            layout = find_groups(model)
            work = Work(model, layout, Configuration(model, layout), windows, sparsity, progress)
            cut, notes = self.cut(work)
            result = apply(model, layout, work.configuration, cut)
        result.notes.update(notes)
        return result


@contextmanager
def on_device(model: PreTrainedModel, device: str) -> Iterator[None]:
    """A model on a device; afterwards on the one it came from."""
    home = model.device
    nn.Module.to(model, device)
    try:
        yield
    finally:
        nn.Module.to(model, home)
