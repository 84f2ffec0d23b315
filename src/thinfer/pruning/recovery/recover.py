"""Recovery of a pruned model folder: load, train what may change, put the zeros to the proof, measure, save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from thinfer.errors import UsageError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.recovery.lora import Adapters
from thinfer.pruning.recovery.masked import Masks, hold, require_zeros, zero_masks
from thinfer.pruning.recovery.options import RecoverOptions
from thinfer.pruning.recovery.session import Evaluation, Job, Progress, Session
from thinfer.pruning.recovery.trainer import TrainResult
from thinfer.pruning.saving import round_weights, save_folder


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
    job = Job(ref, out, teacher, text, evaluation, resume, device, progress)
    with job.places() as (folder, states):
        # Adapters can sit on weights of 16 bits; weights that are trained, or adapted themselves, cannot.
        loaded = job.load(ref, dtype="auto" if options.method == "lora" else "float32")
        dense = None if teacher is None else job.load(teacher, "the teacher ")
        return _recover(Session(job, options, loaded, dense, states), options, folder)


def _recover(session: Session, options: RecoverOptions, folder: Path) -> dict[str, Any]:
    model, loaded, progress = session.model, session.loaded, session.job.progress
    before, masks = session.measure("before"), zero_masks(model)
    counted = count_zeros(model)
    trainable, result = _train_all(session, masks) if options.method == "full" else _train_adapters(session, options)
    progress("checking the zeros")
    round_weights(model, loaded.save_dtype, remedy="use a lower --lr, or recover a model stored in float32")
    require_zeros(model, masks)
    after = session.measure("after")
    pruning = _report_of(loaded.checkpoint.path)
    report = session.report(result, trainable) | {
        "sparsity_before": counted,
        "sparsity_after": count_zeros(model),
        "before": before.to_dict(),
        "after": after.to_dict(),
        **_pruned_matrices(model, pruning),
        "pruning": pruning,
    }
    if options.method == "lora" and masks:
        report["notes"].append(
            "lora on a pruned model: what it learned under zeros was cut when merging; masklora trains what it merges"
        )
    progress(f"writing {folder}")
    files = {"report.json": json.dumps(report, indent=2) + "\n", "README.md": _card(report)}
    recipe = loaded.checkpoint.path / "recipe.yaml"
    if recipe.is_file():
        files["recipe.yaml"] = recipe.read_text(encoding="utf-8")
    save_folder(model, folder, source=loaded.checkpoint, files=files, dtype=loaded.save_dtype)
    session.close()
    return report


def _train_all(session: Session, masks: Masks) -> tuple[int, TrainResult]:
    """Train all weights under the masks; returns how many, and the curve."""
    model = session.model
    model.requires_grad_(True)
    with hold(model, masks) as after_step:
        result = session.train(session.loss, after_step=after_step)
    return sum(parameter.numel() for parameter in model.parameters()), result


def _train_adapters(session: Session, options: RecoverOptions) -> tuple[int, TrainResult]:
    """Train adapters and merge them; returns how many numbers they have, and the curve."""
    session.model.requires_grad_(False)
    adapters = Adapters(session.model, options.adapters)
    result = session.train(adapters.cached(session.loss))
    adapters.merge()
    return adapters.parameters, result


def count_zeros(model: torch.nn.Module) -> float:
    """Fraction of the weights of the blocks' matrices that is exactly zero."""
    matrices = find_stack(model).matrices.values()
    return sum(int((matrix.stored == 0).sum()) for matrix in matrices) / sum(matrix.size for matrix in matrices)


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
