"""Finds the thresholds that belong to a checkpoint, and refuses those made for other weights."""

from dataclasses import dataclass
from pathlib import Path

from thinfer.core.artifact import JSON_NAME, Artifact, read_document
from thinfer.core.selector import ThresholdSelector
from thinfer.formats.checkpoint import Checkpoint

SELECTOR_SECTION = "selector"


@dataclass(frozen=True, slots=True)
class FoundSelector:
    """The selector to use, where it came from, and what to say about it at start-up."""

    selector: ThresholdSelector | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()


def find_selector(checkpoint: Checkpoint, wanted: bool) -> FoundSelector:
    """Thresholds from the thinfer folder the checkpoint was opened through, else from a thinfer.json beside it.

    Args:
        checkpoint: the base checkpoint.
        wanted: False leaves what is found unused, and says so.

    Raises:
        ArtifactError: the artifact is damaged, or was made for other weights.
    """
    folder = checkpoint.artifact_dir
    if folder is None:
        beside = checkpoint.path.parent if checkpoint.path.is_file() else checkpoint.path
        if not (beside / JSON_NAME).is_file():
            return FoundSelector()
        base = read_document(beside)["base"]
        if (beside / base).resolve() != checkpoint.path.resolve():
            return FoundSelector(notes=(f"ignored   {beside / JSON_NAME}: it belongs to {base}",))
        folder = beside
    if not wanted:
        return FoundSelector(folder=folder, notes=(f"ignored   the thresholds in {folder}: sparsity is off",))
    artifact = Artifact.read(folder)
    artifact.check(checkpoint.fingerprint())
    section = artifact.sections.get(SELECTOR_SECTION)
    if section is None:
        return FoundSelector(folder=folder, notes=(f"ignored   {folder / JSON_NAME}: it holds no thresholds",))
    selector = ThresholdSelector.from_section(section, artifact.tensors)
    return FoundSelector(selector, folder, (f"artifact  {folder}",))
