"""A dense model turned into a ReLU model: swap, fit, train, put to the proof, measure, save."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thinfer.activation.generated_text import MixedBatches, write_windows
from thinfer.activation.learning_curve import LearningCurve, Point, can_plot, plot_curves
from thinfer.activation.refit import refit_down
from thinfer.activation.relu_swap import Ffn, ReluSwap, ZeroMeter, activation_name, neurons_seen, read_relufied
from thinfer.activation.relufy_options import RelufyOptions
from thinfer.errors import ArtifactError, CheckFailed, UsageError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.checkpoint import (
    LoadedModel,
    load_torch,
    require_device,
    require_new_folder,
    round_weights,
    save_folder,
)
from thinfer.pruning.quality import torch_perplexity
from thinfer.pruning.recovery.distill import distill_loss
from thinfer.pruning.recovery.language import TextBatches, lm_loss, text_batches
from thinfer.pruning.recovery.lora import Adapters
from thinfer.pruning.recovery.recover import Evaluation
from thinfer.pruning.recovery.state import STATE_NAME
from thinfer.pruning.recovery.trainer import Loss, TrainResult, train
from thinfer.pruning.writing import exclusive, writing

Progress = Callable[[str], None]


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
    require_device(device)
    folder = require_new_folder(out)
    states = folder.parent / f".{folder.name}.training"
    if not resume and (states / STATE_NAME).exists():
        raise UsageError(f"{states}: has an unfinished run; --resume continues it, or delete that folder")
    with exclusive(states):
        run = _prepared(ref, options, teacher, text, evaluation or Evaluation(), states, device, progress)
        return run.go(folder, str(ref), None if teacher is None else str(teacher), resume)


def _prepared(
    ref: str | Path,
    options: RelufyOptions,
    teacher: str | Path | None,
    text: str | Path | None,
    evaluation: Evaluation,
    states: Path,
    device: str,
    progress: Progress,
) -> _Run:
    """Models and text, loaded."""
    progress(f"loading {ref}")
    loaded = load_torch(ref, dtype="float32", device=device)
    if teacher is None and options.loss == "distill" and options.stage == 1 and _has_relu(loaded):
        raise UsageError(f"{ref} has ReLU already; give the dense model to learn from: --teacher MODEL")
    loaded.model.to(device)  # type: ignore[arg-type]
    dense = load_torch(ref if teacher is None else teacher, device=device) if _needs_dense(options) else None
    if dense is not None:
        dense.model.to(device).requires_grad_(False)  # type: ignore[arg-type]
    batches = text_batches(
        loaded.encode,
        text,
        length=options.seqlen,
        batch=options.micro_batch,
        seed=options.seed,
        bos_id=loaded.bos_id,
        device=device,
    )
    key = _key(options, loaded, dense, batches, device)
    return _Run(loaded, dense, options, batches, evaluation, states, key, progress)


class _Run:
    """One model on its way to ReLU."""

    def __init__(
        self,
        loaded: LoadedModel,
        dense: LoadedModel | None,
        options: RelufyOptions,
        batches: TextBatches,
        evaluation: Evaluation,
        states: Path,
        key: str,
        progress: Progress,
    ) -> None:
        self._loaded, self._dense, self._options, self._batches = loaded, dense, options, batches
        self._states, self._key, self._progress = states, key, progress
        self._model: Any = loaded.model
        self._evaluation, self._windows = evaluation, evaluation.cut(loaded)
        self._curve = LearningCurve(states / "curve.json", f"{key} {evaluation}")

    def go(self, folder: Path, ref: str, teacher: str | None, resume: bool) -> dict[str, Any]:
        options, model = self._options, self._model
        before = self._measure("dense", (self._dense or self._loaded).model, ())
        swap = ReluSwap(model, options.stage, options.shift)
        self._ffns = swap.ffns
        swapped = self._measure("right after the swap", model, self._ffns)
        fitted = self._refit() if options.refit_windows else []
        start = self._measure("fitted", model, self._ffns) if fitted else swapped
        swap.set(options.relu_share(0))
        trainable, result = self._train(swap, resume)
        swap.set(1.0)
        dtype = self._loaded.save_dtype if options.save_dtype == "auto" else options.save_dtype
        round_weights(model, dtype)
        after = self._measure("after", model, self._ffns)
        tokens = options.training.steps * options.batch * options.seqlen
        first = {"step": 0, "tokens": 0, "ppl": start["ppl"], "sparsity": start["sparsity_by_layer"]}
        report: dict[str, Any] = {
            "model": ref,
            "teacher": teacher,
            "options": asdict(options) | {"lr": options.training.lr, "refit": options.refit_windows},
            "activation_before": swap.old,
            "text": {
                "source": self._batches.source,
                "sha256": self._batches.sha256,
                "windows": len(self._batches.windows),
                "windows_written_by_the_dense_model": options.generated_windows,
            },
            "evaluation": {
                "source": "built-in" if self._evaluation.text is None else self._evaluation.text.name,
                "ctx": self._evaluation.ctx,
                "windows": len(self._windows),
                "stride": self._evaluation.stride,
            },
            "tokens": tokens,
            "tokens_fitted_on": options.refit_windows * options.seqlen,
            "tokens_per_second": tokens / max(result.seconds, 1e-9),
            "trainable_parameters": trainable,
            "dense": before,
            "swapped": swapped,
            "fitted": fitted,
            "start": start,
            "after": after,
            "curve": [first, *self._curve.points],
            "training": result.to_dict(),
            "device": str(next(model.parameters()).device),
            "threads": torch.get_num_threads(),
            "notes": list(self._loaded.notes) + self._notes(),
        }
        self._progress(f"writing {folder}")
        self._save(swap, folder, report, dtype)
        return report

    def _measure(self, when: str, model: Any, ffns: tuple[Ffn, ...]) -> dict[str, Any]:
        """Perplexity, and the share of neurons at zero where `ffns` are given."""
        meter = ZeroMeter(ffns)
        with meter.counting():
            quality = torch_perplexity(
                model,
                self._windows,
                bos_id=self._loaded.bos_id,
                progress=lambda line: self._progress(f"perplexity {when}: {line}"),
            )
        shares = meter.shares()
        zeros = {"sparsity": sum(shares) / len(shares), "sparsity_by_layer": shares} if shares else {}
        return quality.to_dict() | zeros

    def _refit(self) -> list[dict[str, float]]:
        """Fit the down matrices, or take them from the state of an interrupted run."""
        dense = self._dense
        assert dense is not None  # noqa: S101 - `_needs_dense` has seen to it
        weights = {str(layer): _weight(ffn) for layer, ffn in enumerate(self._ffns)}

        def fit() -> tuple[dict[str, Tensor], Any]:
            one_by_one = TextBatches(
                self._batches.windows, 1, self._batches.seed, self._batches.source, self._batches.sha256
            )
            windows = [one_by_one(number) for number in range(self._options.refit_windows)]
            errors = refit_down(self._model, dense.model, self._ffns, windows, progress=self._progress)
            return {name: weight.detach() for name, weight in weights.items()}, errors

        tensors, errors = self._kept("refit", fit)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tensors[name])
        found: list[dict[str, float]] = errors
        return found

    def _train(self, swap: ReluSwap, resume: bool) -> tuple[int, TrainResult]:
        """Train what may change; returns how many numbers that is, and the curve."""
        options, model = self._options, self._model
        batches = self._mixed()
        loss = ReluLoss(self._loss(), swap, options)
        points = {
            round(options.training.steps * number / options.eval_points) - 1
            for number in range(1, options.eval_points + 1)
        }

        def after_step(step: int) -> None:
            if step in points:
                found = self._measure(f"at step {step + 1}", model, self._ffns)
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
                compiled: Any = self._dense.model
                compiled.compile()
        result = train(
            model,
            loss if adapters is None else adapters.cached(loss),
            lambda number: (number, batches(number)),
            options.training,
            after_step=after_step,
            folder=self._states,
            key=self._key,
            resume=resume,
            progress=self._progress,
        )
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if adapters is not None:
            adapters.merge(keep_zeros=False)
        return trainable, result

    def _mixed(self) -> Callable[[int], Tensor]:
        """The batches, some of their windows written by the dense model."""
        options, dense = self._options, self._dense
        if not options.generated_windows or dense is None:
            return self._batches

        def write() -> tuple[dict[str, Tensor], Any]:
            count = options.generated_windows
            written = write_windows(dense.model, self._batches, count, seed=options.seed, progress=self._progress)
            return {"windows": written}, None

        tensors, _ = self._kept("written", write)
        return MixedBatches(self._batches, tensors["windows"].to(self._batches.windows.device), options.generated)

    def _loss(self) -> Loss:
        options, dense = self._options, self._dense
        if options.loss == "lm" or dense is None:
            return lm_loss
        weights = {"kl": options.kl, "lm": options.lm, "temperature": options.temperature}
        return distill_loss(self._model, dense.model, hidden=options.hidden, **weights)

    def _kept(self, name: str, make: Callable[[], tuple[dict[str, Tensor], Any]]) -> tuple[dict[str, Tensor], Any]:
        """What `make` gives, tensors and facts, from the folder of states where this run left it there before."""
        path = self._states / f"{name}.safetensors"
        if path.exists():
            try:
                with safe_open(path, framework="pt") as file:
                    kept = json.loads((file.metadata() or {}).get("kept", "{}"))
                    if kept.get("key") == self._key:
                        return {key: file.get_tensor(key) for key in file.keys()}, kept["facts"]  # noqa: SIM118
            except (SafetensorError, OSError, ValueError) as error:
                raise ArtifactError(f"{path}: {error}; delete {self._states} and start again") from error
        tensors, facts = make()
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        document = json.dumps({"key": self._key, "facts": facts})
        with writing(path):
            save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, unfinished, {"kept": document})
            unfinished.replace(path)
        return tensors, facts

    def _save(self, swap: ReluSwap, folder: Path, report: dict[str, Any], dtype: str) -> None:
        """Write beside the folder, read back, compare, and only then let it appear."""
        draft = self._states / "model"
        shutil.rmtree(draft, ignore_errors=True)
        files: dict[str, str | bytes] = {
            "report.json": json.dumps(report, indent=2) + "\n",
            "README.md": _card(report, can_plot()),
        }
        config = swap.config_file()
        if config is not None:
            files["config.json"] = config
        if can_plot():
            picture = self._states / "learning-curve.png"
            _plot(report, picture)
            files["learning-curve.png"] = picture.read_bytes()
        save_folder(self._model, draft, source=self._loaded.checkpoint, files=files, dtype=dtype)
        ids = torch.tensor([self._windows[0][:64]])
        with torch.no_grad():
            given = read_relufied(draft)(input_ids=ids, use_cache=False).logits
            wanted = self._model(input_ids=ids.to(next(self._model.parameters()).device), use_cache=False).logits.cpu()
        if not torch.allclose(given.float(), wanted.float(), rtol=1e-2, atol=1e-2 * float(wanted.abs().max())):
            raise CheckFailed(f"{draft} does not give what was trained; nothing was written to {folder}")
        if folder.exists():
            folder.rmdir()
        draft.replace(folder)
        shutil.rmtree(self._states, ignore_errors=True)

    def _notes(self) -> list[str]:
        options, notes = self._options, []
        passes = options.training.steps * options.batch * (1 - options.generated) / len(self._batches.windows)
        if passes > 4:
            notes.append(f"the text was read {passes:.1f} times; a longer one generalises better")
        if options.stage == 2:
            notes.append("model type relufied_*: thinfer reads it, transformers does not")
        return notes


@dataclass(frozen=True, slots=True)
class ReluLoss:
    """A loss of a batch (number, ids), at the share of ReLU and with the L1 penalty of that batch's step.

    The penalty is the mean over layers of mean |neuron| / root mean square of the layer's neurons, the latter taken as
    a constant: one strength fits layers of all sizes.

    Attributes:
        base: the loss of a model and ids.
        swap: the model's activations.
        options: ramp and penalty.

    Example: ``train(model, ReluLoss(lm_loss, swap, options), lambda n: (n, batches(n)), options.training)``.
    """

    base: Loss
    swap: ReluSwap
    options: RelufyOptions

    def __call__(self, model: Any, batch: tuple[int, Tensor]) -> Tensor:
        """The loss, a scalar; it depends on the number of the batch alone, so that a run can continue anywhere."""
        number, ids = batch
        step = number // self.options.training.accumulate
        self.swap.set(self.options.relu_share(step))
        strength = self.options.penalty(step)
        if not strength:
            return self.base(model, ids)
        with neuron_sizes(self.swap.ffns) as sizes:
            loss = self.base(model, ids)
        return loss + strength * torch.stack(sizes).mean()


@contextmanager
def neuron_sizes(ffns: tuple[Ffn, ...]) -> Iterator[list[Tensor]]:
    """A list that gains mean |neuron| / rms, with its gradient, of each layer that runs within."""
    sizes: list[Tensor] = []

    def see(layer: int, neurons: Tensor) -> None:
        values = neurons.float()
        sizes.append(values.abs().mean() / values.detach().square().mean().sqrt().clamp_min(1e-9))

    with neurons_seen(ffns, see):
        yield sizes


def choose_trainable(model: Any, ffns: tuple[Ffn, ...], what: str) -> None:
    """Let gradients reach the FFNs ("ffn"), the blocks ("blocks") or everything ("all"), and every norm."""
    inside = f"{find_stack(model).name}."
    linears = {id(parameter) for ffn in ffns for linear in ffn.linears for parameter in linear.parameters()}
    for name, parameter in model.named_parameters():
        wanted = what == "all" or parameter.ndim == 1 or (what == "blocks" and name.startswith(inside))
        parameter.requires_grad_(wanted or id(parameter) in linears)


def _has_relu(loaded: LoadedModel) -> bool:
    return activation_name(loaded.model.config) == "relu"


def _needs_dense(options: RelufyOptions) -> bool:
    return options.loss == "distill" or options.refit_windows > 0 or options.generated_windows > 0


def _weight(ffn: Ffn) -> Tensor:
    weight: Any = ffn.down.weight
    assert isinstance(weight, Tensor)  # noqa: S101
    return weight


def _key(
    options: RelufyOptions, loaded: LoadedModel, dense: LoadedModel | None, batches: TextBatches, device: str
) -> str:
    """Names a run: whatever changes its result is in it."""
    facts: dict[str, Any] = asdict(options)
    for name in ("checkpoint_minutes", "eval_points", "save_dtype"):
        del facts[name]
    models = [loaded] if dense is None else [loaded, dense]
    facts |= {"models": [model.checkpoint.fingerprint() for model in models], "text": batches.sha256}
    facts |= {"device": torch.device(device).type}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _plot(report: dict[str, Any], path: Path) -> None:
    curve: list[Point] = report["curve"]
    plot_curves(
        {"ReLU": curve},
        path,
        quality="ppl",
        label="perplexity",
        title=Path(report["model"]).name,
        levels={"dense": report["dense"]["ppl"], "right after the swap": report["swapped"]["ppl"]},
        logarithmic=True,
    )


def _card(report: dict[str, Any], picture: bool) -> str:
    """The model card."""
    options, where = report["options"], report["evaluation"]
    steps = (("dense", "dense"), ("right after the swap", "swapped"), ("fitted", "start"), ("trained", "after"))
    rows = "\n".join(
        f"| {name} | {report[key]['ppl']:.3f} | "
        + (f"{100 * report[key]['sparsity']:.1f} %" if "sparsity" in report[key] else "")
        + " |"
        for name, key in steps
    )
    image = "\n![learning curve](learning-curve.png)\n" if picture else ""
    return f"""---
tags: [thinfer, relu]
library_name: {"transformers" if options["stage"] == 1 else "thinfer"}
---

# {Path(report["model"]).name} with ReLU

Made by `thinfer relufy`, stage {options["stage"]}: {report["activation_before"]} became ReLU, trained on
{report["tokens"]} tokens of {report["text"]["source"]} (loss {options["loss"]}); {report["tokens_fitted_on"]} tokens
fitted the down matrices before.

| | perplexity ({where["source"]}, {where["windows"]} windows of {where["ctx"]}) | neurons at zero |
| --- | ---: | ---: |
{rows}
{image}
All settings, the zeros of every layer and the curve are in report.json.
"""
