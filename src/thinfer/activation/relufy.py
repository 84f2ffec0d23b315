"""A dense model turned into a ReLU model: swap, fit, train, put to the proof, measure, save."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinfer.activation.generated_text import MixedBatches, write_windows
from thinfer.activation.learning_curve import LearningCurve, can_plot
from thinfer.activation.refit import refit_down
from thinfer.activation.relu_swap import Ffn, ReluSwap, ZeroMeter, activation_name, read_relufied
from thinfer.activation.relufy_card import card, plot
from thinfer.activation.relufy_loss import ReluLoss, choose_trainable
from thinfer.activation.relufy_options import RelufyOptions
from thinfer.errors import CheckFailed, UsageError
from thinfer.models.registry import architectures
from thinfer.pruning.checkpoint import LoadedModel
from thinfer.pruning.recovery.distill import require_same_states
from thinfer.pruning.recovery.language import TextBatches
from thinfer.pruning.recovery.lora import Adapters
from thinfer.pruning.recovery.session import Evaluation, Job, Progress, Session
from thinfer.pruning.recovery.state import kept
from thinfer.pruning.recovery.trainer import TrainResult
from thinfer.pruning.saving import round_weights, save_folder
from thinfer.pruning.writing import writing


def relufy(
    ref: str | Path,
    out: str | Path,
    options: RelufyOptions,
    *,
    teacher: str | Path | None = None,
    text: str | Path | None = None,
    evaluation: Evaluation | None = None,
    resume: bool = False,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Turn a model into a ReLU model and write the folder `out`; returns its report.

    The state of an unfinished run lies beside `out`, in a hidden folder that its messages name. The folder appears
    after it has been read back and gives the predictions that were measured.

    Args:
        ref: the dense model: a Hugging Face folder, a .gguf file or a hub id; for stage 2 also the result of stage 1.
        out: folder to write.
        options: how.
        teacher: the dense model to learn from; None: `ref` itself.
        text: what to train on, as for `text_batches`; None: the text that ships with thinfer.
        evaluation: what perplexity is measured on; None: `Evaluation()`.
        resume: continue an unfinished run; begins when there is none.
        device: where to train.
        progress: told what is done, and the time left.

    Raises:
        UsageError: a model that has ReLU already and nothing to learn from, a folder that exists, a short text, an
            unfinished run where `resume` is off, or another run that writes the same folder.
        UnsupportedError: an architecture whose configuration cannot express the result.
        CheckFailed: the loss is not finite, or the folder does not give what was measured; nothing is written.
        ResourceError: the disk is full.

    Example:
        >>> relufy("SmolLM2", "SmolLM2-relu", RelufyOptions(tokens=100_000))["after"]["sparsity"]  # doctest: +SKIP
        0.67
    """
    job = Job(ref, out, teacher, text, evaluation, resume, device, progress)
    with job.places() as (folder, states):
        loaded = job.load(ref, dtype="float32")
        if teacher is None and options.loss == "distill" and options.stage == 1 and _has_relu(loaded):
            raise UsageError(f"{ref} has ReLU already; give the dense model to learn from: --teacher MODEL")
        dense = None
        if options.loss == "distill" or options.refit_windows or options.generated_windows:
            dense = job.load(ref if teacher is None else teacher, "the dense model ")
            dense.model.requires_grad_(False)
            if options.refit_windows:
                require_same_states(loaded.model, dense.model, "--refit 0")
        return _Run(Session(job, options, loaded, dense, states), options).go(folder)


class _Run:
    """One model on its way to ReLU."""

    def __init__(self, session: Session, options: RelufyOptions) -> None:
        self._session, self._options = session, options
        self._model, self._batches = session.model, session.batches
        dense = session.dense
        self._dense: Any = None if dense is None else dense.model
        measured = hashlib.sha256(json.dumps(session.windows).encode()).hexdigest()
        self._curve = LearningCurve(session.states / "curve.json", f"{session.key} {measured} {options.eval_points}")

    def go(self, folder: Path) -> dict[str, Any]:
        """Swap, fit, train, measure each step of the way, and write the folder; its report."""
        options, model, session = self._options, self._model, self._session
        before = self._measure("dense", self._dense or model, ())
        swap = ReluSwap(model, options.stage, options.shift)
        swapped = self._measure("right after the swap", model, swap.ffns)
        fitted = self._refit(swap.ffns) if options.refit_windows else []
        start = self._measure("fitted", model, swap.ffns) if fitted else swapped
        trainable, result = self._train(swap)
        swap.set(1.0)
        dtype = session.loaded.save_dtype if options.save_dtype == "auto" else options.save_dtype
        round_weights(model, dtype)
        after = self._measure("after", model, swap.ffns)
        first = {"step": 0, "tokens": 0, "ppl": start["ppl"], "sparsity": start["sparsity_by_layer"]}
        report = session.report(result, trainable, text_share=1 - options.generated) | {
            "activation_before": swap.old,
            "tokens_fitted_on": options.refit_windows * options.seqlen,
            "dense": before,
            "swapped": swapped,
            "fitted": fitted,
            "start": start,
            "after": after,
            "curve": [first, *self._curve.points],
        }
        kind = str(model.config.model_type)
        report["options"]["refit"] = options.refit_windows
        report["text"]["windows_written_by_the_dense_model"] = options.generated_windows
        if options.stage == 2:
            report["notes"].append("model type relufied_*: thinfer reads it, transformers does not")
        elif not any(kind in architecture.HF_TYPES for architecture in architectures().values()):
            report["notes"].append(f"model type {kind}: transformers reads it, thinfer does not run it")
        session.job.progress(f"writing {folder}")
        self._save(swap, folder, report, dtype)
        session.close()
        return report

    def _measure(self, when: str, model: Any, ffns: tuple[Ffn, ...]) -> dict[str, Any]:
        """Perplexity, and the share of neurons at zero where `ffns` are given."""
        meter = ZeroMeter(ffns)
        # Hooks and another length would be compiled for, beyond the number of variants that PyTorch keeps.
        with torch.compiler.set_stance("force_eager"), meter.counting():
            quality = self._session.measure(when, model)
        shares = meter.shares()
        zeros = {"sparsity": sum(shares) / len(shares), "sparsity_by_layer": shares} if shares else {}
        return quality.to_dict() | zeros

    def _refit(self, ffns: tuple[Ffn, ...]) -> list[dict[str, float]]:
        """Fit the down matrices, or take them from the state of an interrupted run."""
        session, text = self._session, self._batches
        weights = {str(layer): _weight(ffn) for layer, ffn in enumerate(ffns)}

        def fit() -> tuple[dict[str, Tensor], Any]:
            one_by_one = TextBatches(text.windows, 1, text.seed, text.source, text.sha256)
            windows = [one_by_one(number) for number in range(self._options.refit_windows)]
            errors = refit_down(self._model, self._dense, ffns, windows, progress=session.job.progress)
            return {name: weight.detach() for name, weight in weights.items()}, errors

        tensors, errors = kept(session.states, "refit", session.key, fit)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tensors[name])
        found: list[dict[str, float]] = errors
        return found

    def _train(self, swap: ReluSwap) -> tuple[int, TrainResult]:
        """Train what may change; returns how many numbers that is, and the curve."""
        options, model = self._options, self._model
        batches = self._mixed()
        loss = ReluLoss(self._session.loss, swap, options)
        points = {
            round(options.steps * number / options.eval_points) - 1 for number in range(1, options.eval_points + 1)
        }

        def measure(step: int) -> None:
            if step in points:
                found = self._measure(f"at step {step + 1}", model, swap.ffns)
                tokens = (step + 1) * options.batch * options.seqlen
                point = {"tokens": tokens, "ppl": found["ppl"], "sparsity": found["sparsity_by_layer"]}
                self._curve.add(step + 1, point | {"relu": options.relu_share(step)})

        adapters = None
        model.requires_grad_(False)
        if options.lora:
            adapters = Adapters(model, options.adapters)
        else:
            choose_trainable(model, swap.ffns, options.train)
        if options.compile:
            model.compile()
            if self._dense is not None:
                self._dense.compile()
        result = self._session.train(
            loss if adapters is None else adapters.cached(loss),
            lambda number: (number, batches(number)),
            measure=measure,
        )
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if adapters is not None:
            adapters.merge(keep_zeros=False)
        return trainable, result

    def _mixed(self) -> Callable[[int], Tensor]:
        """The batches, some of their windows written by the dense model."""
        options, session, text = self._options, self._session, self._batches
        if not options.generated_windows:
            return text

        def write() -> tuple[dict[str, Tensor], Any]:
            count = options.generated_windows
            windows = write_windows(self._dense, text, count, seed=options.seed, progress=session.job.progress)
            return {"windows": windows}, None

        tensors, _ = kept(session.states, "written", session.key, write)
        return MixedBatches(text, tensors["windows"].to(text.windows.device), options.generated)

    def _save(self, swap: ReluSwap, folder: Path, report: dict[str, Any], dtype: str) -> None:
        """Write beside the folder, read back, compare, and only then let it appear."""
        session = self._session
        draft = session.states / "model"
        shutil.rmtree(draft, ignore_errors=True)
        files: dict[str, str | bytes] = {
            "report.json": json.dumps(report, indent=2) + "\n",
            "README.md": card(report, can_plot()),
        }
        config = swap.config_file()
        if config is not None:
            files["config.json"] = config
        if can_plot():
            picture = session.states / "learning-curve.png"
            with writing(picture):
                plot(report, picture)
            files["learning-curve.png"] = picture.read_bytes()
        save_folder(self._model, draft, source=session.loaded.checkpoint, files=files, dtype=dtype)
        ids = torch.tensor([session.windows[0][:64]])
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            given = read_relufied(draft)(input_ids=ids, use_cache=False).logits
            wanted = self._model(input_ids=ids.to(session.job.device), use_cache=False).logits.cpu()
        if not torch.allclose(given.float(), wanted.float(), rtol=1e-2, atol=1e-2 * float(wanted.abs().max())):
            raise CheckFailed(f"{draft} does not give what was trained; nothing was written to {folder}")
        with writing(folder):
            if folder.exists():
                folder.rmdir()
            draft.replace(folder)


def _has_relu(loaded: LoadedModel) -> bool:
    return activation_name(loaded.model.config) == "relu"


def _weight(ffn: Ffn) -> Tensor:
    weight: Any = ffn.down.weight
    assert isinstance(weight, Tensor)  # noqa: S101
    return weight
