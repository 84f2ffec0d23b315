"""The frame of a training on text that ends in a model folder: what it reads, measures, keeps and reports."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from thinfer.calibration.text import cut_windows, read_text, require_context
from thinfer.data import evaluation_text
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.checkpoint import LoadedModel, load_torch, require_device
from thinfer.pruning.quality import Quality, torch_perplexity
from thinfer.pruning.recovery.distill import DistillLoss, distill_loss
from thinfer.pruning.recovery.language import lm_loss, text_batches
from thinfer.pruning.recovery.options import TextTraining
from thinfer.pruning.recovery.state import STATE_NAME
from thinfer.pruning.recovery.trainer import Batches, Loss, TrainResult, train
from thinfer.pruning.saving import require_new_folder
from thinfer.pruning.writing import exclusive

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What perplexity is measured on, before and after.

    Attributes:
        text: a file; None: the chapters that ship with thinfer and are not trained on.
        ctx: tokens of a window.
        windows: how many, from the start of the text; None: all.
        stride: every stride-th window.
    """

    text: Path | None = None
    ctx: int = 512
    windows: int | None = 16
    stride: int = 1

    def cut(self, loaded: LoadedModel) -> list[list[int]]:
        """The windows of this model's tokens; UsageError when the text is too short."""
        text = evaluation_text() if self.text is None else read_text(str(self.text))
        return cut_windows(loaded.encode(text), self.ctx, self.windows, self.stride)


@dataclass(frozen=True, slots=True)
class Job:
    """What a user asks for: the arguments of `recover` and `relufy`.

    Attributes:
        ref: the model.
        out: folder to write.
        teacher: the dense model, where one is named.
        text: what to train on, as for `text_batches`; None: the text that ships with thinfer.
        evaluation: what perplexity is measured on; None: `Evaluation()`.
        resume: continue an unfinished run; begins when there is none.
        device: where to train.
        progress: told what is done, and the time left.
    """

    ref: str | Path
    out: str | Path
    teacher: str | Path | None
    text: str | Path | None
    evaluation: Evaluation | None
    resume: bool
    device: str
    progress: Progress

    @contextmanager
    def places(self) -> Iterator[tuple[Path, Path]]:
        """The folder to write, and the hidden one beside it of an unfinished run's state, held against other runs.

        What was kept goes where the run fails before its first state: the same options would fail again.

        Raises:
            UsageError: no such device, a folder that exists, an unfinished run where `resume` is off, or another run
                that writes the same folder.
        """
        require_device(self.device)
        folder = require_new_folder(self.out)
        states = folder.parent / f".{folder.name}.training"
        if not self.resume and (states / STATE_NAME).exists():
            raise UsageError(f"{states}: has an unfinished run; --resume continues it, or delete that folder")
        with exclusive(states):
            try:
                yield folder, states
            except (CheckFailed, UsageError):
                if not (states / STATE_NAME).exists():
                    shutil.rmtree(states, ignore_errors=True)
                raise

    def load(self, ref: str | Path, what: str = "", *, dtype: str = "auto") -> LoadedModel:
        """A model on the device; `what` it is stands before its name in what the user is told."""
        self.progress(f"loading {what}{ref}")
        loaded = load_torch(ref, dtype=dtype, device=self.device)
        loaded.model.to(self.device)  # type: ignore[arg-type]
        return loaded


class Session:
    """One training of one model: its batches, its loss, its states, and what is measured.

    Args:
        job: what the user asks for.
        options: how.
        loaded: the model that changes, on the device.
        dense: the model that it learns from, if any.
        states: folder of an unfinished run.

    Attributes:
        batches: windows of the text.
        windows: those that perplexity is measured on.
        loss: the one that the options say.
        key: names the run: whatever changes its result is in it.

    Raises:
        UsageError: a text that is too short, windows too long for the model, or models that cannot be compared.

    Example:
        >>> Session(job, options, loaded, None, states).measure("before").ppl  # doctest: +SKIP
        31.2
    """

    def __init__(
        self, job: Job, options: TextTraining, loaded: LoadedModel, dense: LoadedModel | None, states: Path
    ) -> None:
        self.job, self.options, self.loaded, self.dense, self.states = job, options, loaded, dense, states
        self.model: Any = loaded.model
        self.evaluation = job.evaluation or Evaluation()
        self.batches = text_batches(
            loaded.encode,
            job.text,
            length=options.seqlen,
            batch=options.micro_batch,
            seed=options.seed,
            bos_id=loaded.bos_id,
            device=job.device,
        )
        # OPT and others fail beyond, and what the rest give there says nothing of the model.
        most = getattr(self.model.config, "max_position_embeddings", None)
        if most is not None:
            require_context(options.seqlen, most)
            # The last token of a window is not run, but a begin token is.
            require_context(self.evaluation.ctx - (loaded.bos_id is None), most, "--eval-ctx")
        self.windows = self.evaluation.cut(loaded)
        self.loss = self._loss()
        self.key = self._key()

    def measure(self, when: str, model: Any = None) -> Quality:
        """Perplexity of the model, or of another, on the windows that were cut once."""
        return torch_perplexity(
            self.model if model is None else model,
            self.windows,
            bos_id=self.loaded.bos_id,
            progress=lambda line: self.job.progress(f"perplexity {when}: {line}"),
        )

    def train(
        self,
        loss: Loss,
        batches: Batches | None = None,
        after_step: Callable[[int], None] = lambda _: None,
        measure: Callable[[int], None] = lambda _: None,
    ) -> TrainResult:
        """Train the model's trainable parameters; CheckFailed also names a state that lies in the way of another try.

        Args:
            loss: of the model and a batch.
            batches: None: those of the text.
            after_step: as for `train`.
            measure: as for `train`.
        """
        try:
            return train(
                self.model,
                loss,
                batches or self.batches,
                self.options.training,
                after_step=after_step,
                measure=measure,
                folder=self.states,
                key=self.key,
                resume=self.job.resume,
                progress=self.job.progress,
            )
        except CheckFailed as error:
            if not (self.states / STATE_NAME).exists():
                raise
            raise CheckFailed(
                f"{error}; delete {self.states}, the state before that, to start with other options"
            ) from error

    def report(self, result: TrainResult, trainable: int, *, text_share: float = 1.0) -> dict[str, Any]:
        """What every report says.

        Args:
            result: of the training.
            trainable: numbers that were trained.
            text_share: of the windows, those that came from the text.
        """
        options, batches = self.options, self.batches
        tokens = options.steps * options.batch * options.seqlen
        passes = options.steps * options.batch * text_share / len(batches.windows)
        notes = list(self.loaded.notes)
        if passes > 4:
            notes.append(f"the text was read {passes:.1f} times; a longer one generalises better")
        return {
            "model": str(self.job.ref),
            "teacher": None if self.job.teacher is None else str(self.job.teacher),
            "options": asdict(options) | {"lr": options.training.lr, **self._settled()},
            "text": {"source": batches.source, "sha256": batches.sha256, "windows": len(batches.windows)},
            "passes": passes,
            "evaluation": {
                "source": "built-in" if self.evaluation.text is None else self.evaluation.text.name,
                "ctx": self.evaluation.ctx,
                "windows": len(self.windows),
                "stride": self.evaluation.stride,
            },
            "tokens": tokens,
            "tokens_per_second": tokens / max(result.seconds, 1e-9),
            "trainable_parameters": trainable,
            "device": self.job.device,
            "threads": torch.get_num_threads(),
            "notes": notes,
            "training": result.to_dict(),
        }

    def close(self) -> None:
        """Forget the state: the result is written."""
        shutil.rmtree(self.states, ignore_errors=True)

    def _loss(self) -> Loss:
        options = self.options
        if options.loss == "lm" or self.dense is None:
            return lm_loss
        weights = {"kl": options.kl, "lm": options.lm, "temperature": options.temperature}
        return distill_loss(self.model, self.dense.model, hidden=options.hidden, **weights)

    def _settled(self) -> dict[str, Any]:
        """What the options left open and the models decide."""
        return {"hidden": self.loss.hidden} if isinstance(self.loss, DistillLoss) else {}

    def _key(self) -> str:
        models = [self.loaded] if self.dense is None else [self.loaded, self.dense]
        facts = self.options.facts() | self._settled()
        facts |= {"models": [model.checkpoint.fingerprint() for model in models], "text": self.batches.sha256}
        facts |= {"device": torch.device(self.job.device).type}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
