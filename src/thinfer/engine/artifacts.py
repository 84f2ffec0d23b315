"""Finds what the engine uses of what thinfer learned about a checkpoint, and refuses what belongs to other weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinfer.core.artifact import JSON_NAME, Artifact, read_document
from thinfer.core.neuron_selector import SINK_TOKENS, NeuronSelector
from thinfer.core.predictor import PREDICTOR_SECTION, Predictor, selector_of
from thinfer.core.profile import PROFILE_SECTION, ActivationProfile
from thinfer.core.selector import SELECTOR_SECTION, ThresholdSelector
from thinfer.engine.options import EngineOptions
from thinfer.engine.predictors import stored_predictors
from thinfer.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Found:
    """The thresholds and neurons to use, where they came from, and what to say about them at start-up."""

    selector: ThresholdSelector | None = None
    neurons: NeuronSelector | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def find_artifact(checkpoint: Checkpoint, options: EngineOptions) -> Found:
    """Thresholds, predictors and rates from the thinfer folder the checkpoint was opened through, or from beside it.

    Of the predictors those that count are used. Without ``options.sparsity`` nothing is used, and with
    ``options.neurons`` "off" no predictors; the notes say so.

    Args:
        checkpoint: the base checkpoint.
        options: how the engine will run.

    Raises:
        ArtifactError: the artifact is damaged, or was made for other weights.

    Example: `find_artifact(open_checkpoint("sparse"), EngineOptions()).selector`.
    """
    folder = checkpoint.artifact_dir
    if folder is None:
        beside = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
        if not (beside / JSON_NAME).is_file():
            return Found()
        base = read_document(beside)["base"]
        if (beside / base).resolve() != checkpoint.path.resolve():
            return Found(notes=(f"ignored   {beside / JSON_NAME}: it belongs to {base}",))
        folder = beside
    if not options.sparsity:
        return Found(folder=folder, notes=(f"ignored   what {folder} holds: sparsity is off",))
    artifact = Artifact.read(folder)
    artifact.check(checkpoint.fingerprint())
    if not {SELECTOR_SECTION, PREDICTOR_SECTION, PROFILE_SECTION} & set(artifact.sections):
        nothing = f"ignored   {folder / JSON_NAME}: it holds neither thresholds nor predictors nor a profile"
        return Found(folder=folder, notes=(nothing,))
    section = artifact.sections.get(SELECTOR_SECTION)
    selector = None if section is None else ThresholdSelector.from_section(section, artifact.tensors)
    neurons, notes = _neurons(artifact, folder, options)
    return Found(selector, neurons, folder, (f"artifact  {folder}", *notes))


def _neurons(artifact: Artifact, folder: Path, options: EngineOptions) -> tuple[NeuronSelector | None, tuple[str, ...]]:
    """What decides which neurons and heads are computed; None where the artifact does not say."""
    there = PREDICTOR_SECTION in artifact.sections
    predictors = stored_predictors(artifact, folder) if there else []
    if options.neurons == "off":
        return None, (f"ignored   the predictors in {folder}: neurons is off",) if there else ()
    counting = [predictor for predictor in predictors if predictor.counts]
    of_neurons = [predictor for predictor in predictors if predictor.target == "neurons"]
    rates = {predictor.layer: 1 - predictor.true_density for predictor in of_neurons}
    site_rates: dict[str, float] = {}
    if PROFILE_SECTION in artifact.sections:
        profile = ActivationProfile.from_section(artifact.sections[PROFILE_SECTION], artifact.tensors)
        rates = dict(enumerate(profile.sparsity().tolist())) | rates
        zeros = profile.histograms[:, 0] / np.maximum(profile.histograms.sum(axis=1), 1)
        site_rates = dict(zip(profile.sites, zeros.tolist(), strict=True))
    if not counting and not rates:
        return None, _describe(predictors)
    sinks = artifact.sections[PREDICTOR_SECTION].get("sink_tokens", SINK_TOKENS) if there else SINK_TOKENS
    neurons = selector_of(counting, rates=rates, site_rates=site_rates, sink_tokens=int(sinks))
    return neurons, _describe(predictors)


def _describe(predictors: Sequence[Predictor]) -> tuple[str, ...]:
    """A line for each target: how many count, and what those reached on held-out text."""
    lines = []
    for target in ("neurons", "heads"):
        every = [predictor for predictor in predictors if predictor.target == target]
        used = [predictor for predictor in every if predictor.counts]
        if not every:
            continue
        line = f"predictor {target}: {len(used)} of {len(every)} layers count"
        if used:
            named, needed = (float(np.mean([getattr(p, n) for p in used])) for n in ("density", "true_density"))
            recall = sum(p.recall * p.true_density for p in used) / sum(p.true_density for p in used)
            line += f"; held out: recall {recall:.3f}, {named:.0%} named, {needed:.0%} needed"
            line += f"; {sum(p.nbytes for p in used) / 1e6:.2f} MB a token"
        lines.append(line)
    return tuple(lines)
