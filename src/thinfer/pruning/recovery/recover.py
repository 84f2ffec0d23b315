"""Recovery of a pruned model folder: load, train what may change, put the zeros to the proof, measure, save."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from thinfer.calibration.text import cut_windows, read_text
from thinfer.data import evaluation_text
from thinfer.errors import UsageError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.checkpoint import (
    LoadedModel,
    load_torch,
    require_device,
    require_new_folder,
    round_weights,
    save_folder,
)
from thinfer.pruning.quality import Quality, torch_perplexity
from thinfer.pruning.recovery.distill import distill_loss
from thinfer.pruning.recovery.language import TextBatches, lm_loss, text_batches
from thinfer.pruning.recovery.lora import Adapters, LoraOptions
from thinfer.pruning.recovery.masked import Masks, hold, require_zeros, zero_masks
from thinfer.pruning.recovery.state import STATE_NAME
from thinfer.pruning.recovery.trainer import Loss, TrainOptions, TrainResult, train
from thinfer.pruning.writing import exclusive

Progress = Callable[[str], None]

RATES = {"lora": 5e-4, "masklora": 5e-4, "full": 2e-5}
"""Learning rate of each method where none is given."""


@dataclass(frozen=True, slots=True)
class RecoverOptions:
    """How a pruned model is trained again.

    Attributes:
        method: "masklora" and "lora" train adapters on the matrices of the blocks, "full" trains every weight.
        loss: "lm" is the text's own likelihood, "distill" the distance to a teacher.
        tokens: how many are trained on, begin tokens included; rounded up to whole steps.
        lr: highest learning rate; None: `RATES`.
        batch: windows of one step.
        micro_batch: windows that are in memory together; divides `batch`.
        seqlen: tokens of a window.
        warmup: fraction of the steps.
        weight_decay: AdamW's.
        rank: of the adapters.
        alpha: their scale is alpha / rank.
        dropout: of "lora".
        kl: weight of the teacher's predictions.
        hidden: weight of the teacher's hidden states; None: 1 where they have the student's shape, else 0.
        lm: weight of the text's own likelihood beside the teacher.
        temperature: of the predictions.
        precision: of the arithmetic.
        seed: of adapters, dropout and the order of the windows.
        checkpoint_minutes: time between two saved states.

    Raises:
        UsageError: a number that makes no sense.
    """

    method: Literal["lora", "masklora", "full"] = "masklora"
    loss: Literal["lm", "distill"] = "lm"
    tokens: int = 100_000
    lr: float | None = None
    batch: int = 4
    micro_batch: int = 1
    seqlen: int = 512
    warmup: float = 0.05
    weight_decay: float = 0.0
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.05
    kl: float = 1.0
    hidden: float | None = None
    lm: float = 0.0
    temperature: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    checkpoint_minutes: float = 10.0

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.batch < 1 or self.batch % self.micro_batch:
            raise UsageError(f"batch {self.batch} must be a multiple of micro-batch {self.micro_batch}")
        if self.tokens < 1 or self.seqlen < 2:
            raise UsageError(f"{self.tokens} tokens in windows of {self.seqlen}: at least 1, of at least 2")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed {self.seed}: from 0 to {2**63 - 1}")
        if not 0 <= self.warmup <= 1:
            raise UsageError(f"warm-up {self.warmup:g}: a fraction of the steps, from 0 to 1")
        weights = (self.kl, self.hidden or 0.0, self.lm, self.temperature)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or self.temperature == 0:
            raise UsageError("weights of a loss must be numbers from 0, and the temperature one above 0")
        if self.loss == "distill" and not (self.kl or self.lm or self.hidden or self.hidden is None):
            raise UsageError("all weights of the loss are 0, so nothing would be learned; give --kl-weight 1")
        # What trainer and adapters would refuse is refused before a model is loaded.
        _ = self.training, self.adapters

    @property
    def training(self) -> TrainOptions:
        """The trainer's options."""
        steps = math.ceil(self.tokens / (self.batch * self.seqlen))
        return TrainOptions(
            steps=steps,
            lr=RATES[self.method] if self.lr is None else self.lr,
            warmup=round(self.warmup * steps),
            weight_decay=self.weight_decay,
            accumulate=self.batch // self.micro_batch,
            precision=self.precision,
            seed=self.seed,
            checkpoint_minutes=self.checkpoint_minutes,
        )

    @property
    def adapters(self) -> LoraOptions:
        """The adapters' options."""
        return LoraOptions(self.rank, self.alpha, self.dropout, self.method == "masklora", self.seed)


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


def recover(
    ref: str | Path,
    out: str | Path,
    options: RecoverOptions,
    *,
    teacher: str | Path | None = None,
    text: str | Path | None = None,
    evaluation: Evaluation | None = None,
    resume: bool = False,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Train a pruned model, keep every zero of its matrices, and write the folder `out`; returns its report.

    The state of an unfinished run lies beside `out`, in a hidden folder that its messages name.

    Args:
        ref: the pruned model: a Hugging Face folder, a .gguf file or a hub id.
        out: folder to write.
        options: how.
        teacher: the dense model; needed for, and only for, the loss "distill".
        text: what to train on, as for `text_batches`; None: the text that ships with thinfer.
        evaluation: what perplexity is measured on; None: `Evaluation()`.
        resume: continue an unfinished run; begins when there is none.
        device: where to train.
        progress: told what is done, and the time left.

    Raises:
        UsageError: options that exclude each other, a folder that exists, a text that is too short, an unfinished run
            where `resume` is off, or another run that writes the same folder.
        CheckFailed: the loss is not finite, or a zero was refilled; nothing is written.
        ResourceError: the disk is full.

    Example:
        >>> recover("pruned", "recovered", RecoverOptions(tokens=100_000))["after"]["ppl"]  # doctest: +SKIP
        31.2
    """
    if (teacher is not None) != (options.loss == "distill"):
        raise UsageError("the loss distill needs a teacher, and only it does: --loss distill --teacher MODEL")
    require_device(device)
    folder = require_new_folder(out)
    states = folder.parent / f".{folder.name}.training"
    if (states / STATE_NAME).exists() and not resume:
        raise UsageError(f"{states}: has an unfinished run; --resume continues it, or delete that folder")
    with exclusive(states):
        return _recover(
            ref, folder, states, options, teacher, text, evaluation or Evaluation(), resume, device, progress
        )


def _recover(
    ref: str | Path,
    folder: Path,
    states: Path,
    options: RecoverOptions,
    teacher: str | Path | None,
    text: str | Path | None,
    evaluation: Evaluation,
    resume: bool,
    device: str,
    progress: Progress,
) -> dict[str, Any]:
    progress(f"loading {ref}")
    # Adapters can sit on weights of 16 bits; weights that are trained, or adapted themselves, cannot.
    dtype = "auto" if options.method == "lora" else "float32"
    loaded = load_torch(ref, dtype=dtype, device=device)
    model = loaded.model.to(device)  # type: ignore[arg-type]
    batches = text_batches(
        loaded.encode,
        text,
        length=options.seqlen,
        batch=options.micro_batch,
        seed=options.seed,
        bos_id=loaded.bos_id,
        device=device,
    )
    measure = _Measure(loaded, evaluation, progress)
    before, masks = measure("before"), zero_masks(model)
    counted = count_zeros(model)
    loss, settings, dense = _loss(model, options, teacher, device, progress)
    key = _key(options, settings, [loaded, *dense], batches, device)
    run = _Training(loss, batches, options.training, states, key, resume, progress)
    trainable, result = run.full(model, masks) if options.method == "full" else run.adapters(model, options)
    progress("checking the zeros")
    round_weights(model, loaded.save_dtype)
    require_zeros(model, masks)
    after = measure("after")
    pruning = _report_of(loaded.checkpoint.path)
    report = {
        "model": str(ref),
        "options": asdict(options) | {"lr": options.training.lr} | settings,
        "teacher": None if teacher is None else str(teacher),
        "text": {"source": batches.source, "sha256": batches.sha256, "windows": len(batches.windows)},
        "passes": options.training.steps * options.batch / len(batches.windows),
        "trainable_parameters": trainable,
        "sparsity_before": counted,
        "sparsity_after": count_zeros(model),
        "evaluation": {"source": "built-in" if evaluation.text is None else evaluation.text.name} | measure.how(),
        "before": before.to_dict(),
        "after": after.to_dict(),
        "tokens": options.training.steps * options.batch * options.seqlen,
        "tokens_per_second": options.training.steps * options.batch * options.seqlen / max(result.seconds, 1e-9),
        "device": device,
        "threads": torch.get_num_threads(),
        "notes": list(loaded.notes) + _warnings(options, masks, batches),
        "training": result.to_dict(),
        **_pruned_matrices(model, pruning),
        "pruning": pruning,
    }
    progress(f"writing {folder}")
    files = {"report.json": json.dumps(report, indent=2) + "\n", "README.md": _card(report)}
    recipe = loaded.checkpoint.path / "recipe.yaml"
    if recipe.is_file():
        files["recipe.yaml"] = recipe.read_text(encoding="utf-8")
    save_folder(model, folder, source=loaded.checkpoint, files=files, dtype=loaded.save_dtype)
    shutil.rmtree(states, ignore_errors=True)
    return report


def count_zeros(model: torch.nn.Module) -> float:
    """Fraction of the weights of the blocks' matrices that is exactly zero."""
    matrices = find_stack(model).matrices.values()
    return sum(int((matrix.stored == 0).sum()) for matrix in matrices) / sum(matrix.size for matrix in matrices)


class _Measure:
    """Perplexity of a model on windows that are cut once."""

    def __init__(self, loaded: LoadedModel, evaluation: Evaluation, progress: Progress) -> None:
        self._loaded, self._evaluation, self._progress = loaded, evaluation, progress
        self._windows = evaluation.cut(loaded)

    def __call__(self, when: str) -> Quality:
        return torch_perplexity(
            self._loaded.model,
            self._windows,
            bos_id=self._loaded.bos_id,
            progress=lambda line: self._progress(f"perplexity {when}: {line}"),
        )

    def how(self) -> dict[str, Any]:
        return {"ctx": self._evaluation.ctx, "windows": len(self._windows), "stride": self._evaluation.stride}


@dataclass(frozen=True, slots=True)
class _Training:
    """What both ways of training share."""

    loss: Loss
    batches: TextBatches
    options: TrainOptions
    states: Path
    key: str
    resume: bool
    progress: Progress

    def full(self, model: Any, masks: Masks) -> tuple[int, TrainResult]:
        """Train all weights under the masks; returns how many, and the curve."""
        model.requires_grad_(True)
        with hold(model, masks) as after_step:
            result = self._train(model, self.loss, after_step)
        return sum(parameter.numel() for parameter in model.parameters()), result

    def adapters(self, model: Any, options: RecoverOptions) -> tuple[int, TrainResult]:
        """Train adapters and merge them."""
        model.requires_grad_(False)
        adapters = Adapters(model, options.adapters)
        result = self._train(model, adapters.cached(self.loss))
        adapters.merge()
        return adapters.parameters, result

    def _train(self, model: Any, loss: Loss, after_step: Callable[[int], None] = lambda _: None) -> TrainResult:
        return train(
            model,
            loss,
            self.batches,
            self.options,
            after_step=after_step,
            folder=self.states,
            key=self.key,
            resume=self.resume,
            progress=self.progress,
        )


def _loss(
    model: Any, options: RecoverOptions, teacher: str | Path | None, device: str, progress: Progress
) -> tuple[Loss, dict[str, Any], list[LoadedModel]]:
    """The loss, what was settled about it, and the models it needs."""
    if teacher is None:
        return lm_loss, {}, []
    progress(f"loading the teacher {teacher}")
    dense = load_torch(teacher, device=device)
    weights = {"kl": options.kl, "lm": options.lm, "temperature": options.temperature}
    loss = distill_loss(model, dense.model.to(device), hidden=options.hidden, **weights)  # type: ignore[arg-type]
    return loss, {"hidden": loss.hidden}, [dense]


def _key(
    options: RecoverOptions, settings: dict[str, Any], models: Sequence[LoadedModel], batches: TextBatches, device: str
) -> str:
    """Names a run: whatever changes its result is in it."""
    facts = asdict(options) | settings
    del facts["checkpoint_minutes"]
    facts |= {"models": [loaded.checkpoint.fingerprint() for loaded in models], "text": batches.sha256}
    facts |= {"device": torch.device(device).type}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _report_of(folder: Path) -> Any:
    """The report of the model that is recovered, so that it is not lost; None when it has none."""
    try:
        return json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _pruned_matrices(model: torch.nn.Module, pruning: Any) -> dict[str, Any]:
    """What `verify` reads of a report: the pattern, and the matrices that were pruned, their zeros counted again."""
    told = pruning if isinstance(pruning, dict) else {}
    if not isinstance(told.get("matrices"), dict):
        return {}
    found = find_stack(model).matrices
    counted = {
        name: {"zeros": matrix.size - int(torch.count_nonzero(matrix.stored)), "transposed": matrix.transposed}
        for name, matrix in found.items()
        if name in told["matrices"]
    }
    return {"pattern": told.get("pattern"), "matrices": counted}


def _warnings(options: RecoverOptions, masks: Masks, batches: TextBatches) -> list[str]:
    notes = []
    if options.method == "lora" and masks:
        notes.append(
            "lora on a pruned model: what it learned under zeros was cut when merging; masklora trains what it merges"
        )
    passes = options.training.steps * options.batch / len(batches.windows)
    if passes > 4:
        notes.append(f"the text was read {passes:.1f} times; a longer one generalises better")
    return notes


def _card(report: dict[str, Any]) -> str:
    """The model card."""
    before, after, where = report["before"], report["after"], report["evaluation"]
    what = f"perplexity ({where['source']}, {before['windows']} windows of {before['ctx']})"
    zeros = [report[f"sparsity_{when}"] for when in ("before", "after")]
    return f"""---
tags: [thinfer, pruned]
library_name: transformers
---

# {Path(report["model"]).name}, recovered with thinfer

Trained again after pruning ({report["options"]["method"]}, loss {report["options"]["loss"]}, {report["tokens"]} tokens
of {report["text"]["source"]}); every zero of its matrices was kept.

| | before | after |
| --- | ---: | ---: |
| {what} | {before["ppl"]:.3f} | {after["ppl"]:.3f} |
| sparsity of the blocks' matrices | {zeros[0]:.4f} | {zeros[1]:.4f} |

All settings and the curve of the loss are in report.json.
"""
