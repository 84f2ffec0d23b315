"""A whole pruning run, from a recipe to a folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from thinfer.calibration.text import TokenWindows, cut_windows, read_documents, read_text, token_windows
from thinfer.errors import CheckFailed, ResourceError, ThinferError, UsageError
from thinfer.pruning.blocks import Stack, find_stack
from thinfer.pruning.checkpoint import LoadedModel, load_torch, require_device
from thinfer.pruning.phases import Phases
from thinfer.pruning.pipeline import check_rates, prune_model
from thinfer.pruning.quality import Quality, torch_perplexity
from thinfer.pruning.recipe import DEFAULT_SAMPLES, Recipe, select_matrices
from thinfer.pruning.report import model_card, new_report, quality_notes, sensitivity_plot, speed_facts
from thinfer.pruning.saving import require_new_folder, round_weights, save_folder
from thinfer.pruning.verify import REPORT_FILE
from thinfer.pruning.view import DenseView
from thinfer.pruning.writing import exclusive, writing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int, str], None]
"""Told how many steps are done, of how many (0: unknown), and what runs now."""

RECIPE_FILE = "recipe.yaml"
SENSITIVITY_FILE = "sensitivity.svg"
EVALUATION_WINDOWS = 10
_BLOCKS = "blocks"


def prune(recipe: Recipe, out: str | Path, *, progress: Progress = lambda done, total, what: None) -> dict[str, Any]:
    """Prune a model as a recipe says and write the result as a Hugging Face folder.

    Finished blocks lie in ``OUT.partial`` until the run is complete; the same call again goes on after them.

    Args:
        recipe: what to do; `model` must be named.
        out: folder to write; it appears whole or not at all.
        progress: told what runs.

    Returns:
        The report, as it stands in report.json.

    Raises:
        UsageError: no model, a folder that exists, a text too short, targets that match nothing, another run that
            writes the same folder.
        CheckFailed: weights, inputs or predictions that are not finite.
        ArtifactError: ``OUT.partial`` holds blocks of another recipe, model or text.
        ResourceError: the disk is full.

    Example:
        >>> prune(Recipe(model="model.gguf", sparsity=0.5), "pruned")["sparsity"]  # doctest: +SKIP
        0.5
    """
    if recipe.model is None:
        raise UsageError("which model? name a folder, a .gguf file or a hub id")
    target = require_new_folder(out)
    require_device(recipe.device)
    partial = partial_folder(out)
    with exclusive(partial):
        try:
            return _Run(recipe, recipe.model, target, progress).finish()
        except ThinferError:
            if not any(partial.glob(f"{_BLOCKS}/*.safetensors")):
                shutil.rmtree(partial, ignore_errors=True)
            raise


def partial_folder(out: str | Path) -> Path:
    """Where the finished blocks of an interrupted run lie."""
    path = Path(out).expanduser().absolute()
    return path.with_name(path.name + ".partial")


def calibration_windows(recipe: Recipe, loaded: LoadedModel) -> TokenWindows:
    """The calibration windows of a recipe; without a text, as many of the shipped excerpt as it has."""
    length, samples = window_length(recipe, loaded.model), recipe.samples
    if samples is None:
        samples = DEFAULT_SAMPLES
        if recipe.text is None:
            documents, _, _ = read_documents(None)
            tokens = sum(len(loaded.encode(document)) for document in documents)
            body = length - (loaded.bos_id is not None)
            samples = max(1, min(samples, tokens // max(1, body)))
    return token_windows(
        loaded.encode,
        recipe.text,
        samples=samples,
        held_out=0,
        length=length,
        seed=recipe.seed,
        bos_id=loaded.bos_id,
    )


def window_length(recipe: Recipe, model: PreTrainedModel) -> int:
    """Tokens of a calibration window: those asked for, at most what the model can hold."""
    return min(recipe.seqlen, positions(model) or recipe.seqlen)


def positions(model: PreTrainedModel) -> int | None:
    """The longest context of a model, where its configuration says one."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 1 else None


class _Run:
    """One run; what is slow and already known of an interrupted one is read from its folder."""

    def __init__(self, recipe: Recipe, model: str, out: Path, progress: Progress) -> None:
        self._recipe = recipe
        self._out = out
        self._tell = progress
        self._partial = partial_folder(out)
        self._phases = Phases(recipe.device)
        self._report = new_report(recipe)
        self._tell(0, 0, f"loading {model}")
        with self._phases.measure("load"):
            self._loaded = load_torch(model, dtype=recipe.dtype, device=recipe.device)
        self._notes = list(self._loaded.notes)
        self._save_dtype = recipe.save_dtype if recipe.save_dtype != "auto" else self._loaded.save_dtype

    def finish(self) -> dict[str, Any]:
        """Measure, prune, measure, save."""
        recipe, report, model = self._recipe, self._report, self._loaded.model
        report["model"] = {
            "ref": self._loaded.ref,
            "kind": self._loaded.checkpoint.kind,
            "fingerprint": self._loaded.checkpoint.fingerprint(),
            "type": model.config.model_type,
        }
        parameters = model.num_parameters()
        # What is wrong with names or texts shows before any long work.
        stack = find_stack(model)
        names = select_matrices(stack.matrices, recipe.target, recipe.ignore)
        check_rates(stack, dict.fromkeys(names, recipe.target_sparsity), recipe.sparsity_pattern)
        windows = self._windows()
        evaluation = self._evaluation()
        before = self._measured("before", evaluation) if evaluation is not None else None
        if recipe.structured:
            self._cut(windows)
        else:
            self._prune(names, windows)
        round_weights(model, self._save_dtype)
        if not recipe.structured:
            self._count(stack, names)
        after = self._quality(evaluation, "after").to_dict() if evaluation is not None else None
        if evaluation is not None:
            report["perplexity"] = {"dataset": evaluation[1], "before": before, "after": after}
        self._notes += quality_notes(before, after)
        report["parameters"] = {"before": parameters, "after": model.num_parameters()}
        report["save_dtype"] = self._save_dtype
        report["bytes"] = model.num_parameters() * getattr(torch, self._save_dtype).itemsize
        report["speed"] = speed_facts(recipe.structured)
        report["notes"] = self._notes
        self._save()
        return report

    def _windows(self) -> TokenWindows | None:
        recipe = self._recipe
        needed = recipe.structured or recipe.allocation != "uniform"
        parts = [] if recipe.structured else [recipe.make_method(), *recipe.make_refinements()]
        if not needed and not any(part.needs for part in parts):
            return None
        windows = calibration_windows(recipe, self._loaded)
        if windows.length < recipe.seqlen:
            self._notes.append(f"windows have {windows.length} tokens, the longest context of the model")
        self._report["calibration"] = {
            "source": windows.source,
            "sha256": windows.sha256,
            "samples": len(windows.windows),
            "seqlen": windows.length,
            "tokens": windows.tokens,
            "seed": windows.seed,
            "bos": self._loaded.bos_id is not None,
            "windows_sha256": _digest([list(window) for window in windows.windows]),
        }
        return windows

    def _evaluation(self) -> tuple[list[list[int]], dict[str, Any]] | None:
        recipe, loaded = self._recipe, self._loaded
        if not recipe.evaluate:
            return None
        from thinfer.data import evaluation_text

        text = evaluation_text() if recipe.eval_text is None else read_text(str(recipe.eval_text))
        limit = positions(loaded.model)
        ctx = recipe.eval_ctx if limit is None else min(recipe.eval_ctx, limit - (loaded.bos_id is not None))
        ids = loaded.encode(text)
        windows = recipe.eval_windows
        if windows is None:
            windows = max(1, min(EVALUATION_WINDOWS, -(-(len(ids) - ctx + 1) // (ctx * recipe.eval_stride))))
        cut = cut_windows(ids, ctx, windows, recipe.eval_stride)
        dataset = {
            "source": "the text that ships with thinfer" if recipe.eval_text is None else recipe.eval_text.name,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "ctx": ctx,
            "windows": len(cut),
            "stride": recipe.eval_stride,
            "bos": loaded.bos_id is not None,
        }
        return cut, dataset

    def _quality(self, evaluation: tuple[list[list[int]], dict[str, Any]], when: str) -> Quality:
        model = self._loaded.model
        with self._phases.measure(f"evaluate {when}"):
            for device in dict.fromkeys((self._recipe.device, "cpu")):
                try:
                    _move(model, device)
                    return torch_perplexity(
                        model,
                        evaluation[0],
                        bos_id=self._loaded.bos_id,
                        progress=lambda line: self._tell(0, 0, f"{when}: {line}"),
                    )
                except torch.OutOfMemoryError:
                    # Pruning needs one block on the device, evaluation all of them; the CPU holds the model anyway.
                    self._tell(0, 0, f"{when}: too large for {device}, measuring on the CPU")
                finally:
                    _move(model, "cpu")
        raise ResourceError("too little memory to measure perplexity; use --eval-ctx 512, or --no-evaluate")

    def _measured(self, when: str, evaluation: tuple[list[list[int]], dict[str, Any]]) -> dict[str, Any]:
        key = {"evaluation": evaluation[1], "dtype": str(self._loaded.model.dtype)}
        return self._once(when, key, lambda: self._quality(evaluation, when).to_dict())

    def _prune(self, names: list[str], windows: TokenWindows | None) -> None:
        recipe, report = self._recipe, self._report
        ids = None if windows is None else torch.tensor(windows.windows)
        parts: dict[str, Any] = {
            "method": recipe.make_method(),
            "refinements": recipe.make_refinements(),
            "pattern": recipe.sparsity_pattern,
            "device": recipe.device,
        }
        key = {part: report.get(part) for part in ("method", "refinements", "pattern", "allocation", "calibration")}
        key |= {"names": names, "sparsity": recipe.target_sparsity, "dtype": str(self._loaded.model.dtype)}
        self._tell(0, 0, f"spreading the sparsity: {recipe.allocation}")
        with self._phases.measure("allocate"):
            spread = self._once("rates", key, lambda: self._allocate(ids, names, parts))
        report["allocation"] |= {"scans": spread["scans"]} if spread["scans"] else {}
        result = prune_model(
            self._loaded.model,
            ids,
            spread["rates"],
            **parts,
            true_sequential=recipe.true_sequential,
            workdir=self._partial / _BLOCKS,
            progress=self._tell,
        )
        report["matrices"] = result.matrices
        report["skipped"] = result.skipped
        report["resumed_blocks"] = result.resumed
        report["phases"] = result.phases

    def _allocate(self, ids: Tensor | None, names: list[str], parts: dict[str, Any]) -> dict[str, Any]:
        """The rate of each matrix, and the curves that the allocation measured, if it did."""
        recipe = self._recipe
        allocation = recipe.make_allocation()
        view = DenseView(self._loaded.model, ids, names, **parts, tell=lambda line: self._tell(0, 0, line))
        rates = allocation.rates(view, recipe.target_sparsity)
        return {"rates": rates, "scans": [asdict(scan) for scan in getattr(allocation, "scans", ())]}

    def _cut(self, windows: TokenWindows | None) -> None:
        recipe, model = self._recipe, self._loaded.model
        with self._phases.measure("prune"):
            result = recipe.make_method().prune(
                model,
                [] if windows is None else list(windows.windows),
                recipe.target_sparsity,
                device=recipe.device,
                progress=self._tell,
            )
        self._report["sparsity"] = result.sparsity
        self._report["structure"] = {
            "shapes_before": {name: list(shape) for name, shape in result.before.items()},
            "shapes_after": {name: list(shape) for name, shape in result.after.items()},
            "kept": dict(result.kept),
        }
        self._report["method_notes"] = dict(result.notes)

    def _count(self, stack: Stack, names: list[str]) -> None:
        """Count the zeros that are about to be written, and check that they are those asked for."""
        zeros = size = 0
        for name in names:
            matrix = stack.matrices[name]
            facts = self._report["matrices"][name]
            facts["zeros"] = matrix.size - int(torch.count_nonzero(matrix.stored))
            facts["transposed"] = matrix.transposed
            zeros, size = zeros + facts["zeros"], size + matrix.size
        self._report["sparsity"] = zeros / size
        self._report["sparsity_of_blocks"] = zeros / sum(matrix.size for matrix in stack.matrices.values())
        asked = self._recipe.target_sparsity
        # Weights that were zero before only add; each matrix may round by half a weight.
        if zeros < asked * size - len(names):
            raise CheckFailed(f"{zeros / size:.4%} of the weights are zero, {asked:.4%} asked for; report this")

    def _save(self) -> None:
        self._tell(0, 0, f"writing {self._out}")
        calibrated = self._report.get("calibration")
        recipe = replace(self._recipe, samples=calibrated["samples"]) if calibrated else self._recipe
        self._report["phases"] = self._phases.to_dict() | self._report.get("phases", {})
        files: dict[str, str | bytes] = {
            REPORT_FILE: json.dumps(self._report, indent=2) + "\n",
            RECIPE_FILE: recipe.to_yaml(),
            "README.md": model_card(self._report),
        }
        scans = self._report.get("allocation", {}).get("scans", [])
        files |= {SENSITIVITY_FILE: sensitivity_plot(scans[-1])} if scans else {}
        save_folder(self._loaded.model, self._out, source=self._loaded.checkpoint, files=files, dtype=self._save_dtype)
        shutil.rmtree(self._partial, ignore_errors=True)

    def _once(self, name: str, key: Mapping[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What an interrupted run of the same kind has found out already, else what `compute` gives, which is kept."""
        file = self._partial / f"{name}.json"
        digest = _digest({"model": self._report["model"]["fingerprint"], **key})
        if file.is_file():
            try:
                kept = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                kept = {}
            if isinstance(kept, dict) and kept.get("key") == digest:
                found: dict[str, Any] = kept["value"]
                return found
        value = compute()
        half = file.with_suffix(".tmp")
        with writing(file):
            half.write_text(json.dumps({"key": digest, "value": value}), encoding="utf-8")
            os.replace(half, file)
        return value


def _move(model: nn.Module, device: str) -> None:
    """To a device; torch's own types describe the method as one that takes a model."""
    nn.Module.to(model, device)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
