"""Finds predictors that belong to a checkpoint, and evaluates them: the NumPy definition of what they name."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinfer.core.artifact import Artifact
from thinfer.core.predictor import PREDICTOR_SECTION, Predictor
from thinfer.errors import ArtifactError

Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


def load_predictors(folder: str | Path, fingerprint: str) -> list[Predictor]:
    """All predictors of a thinfer folder, whether they count or not.

    Args:
        folder: where `thinfer predict train` wrote.
        fingerprint: of the checkpoint they shall be used with.

    Raises:
        ArtifactError: there are none, they are damaged, or they were trained on other weights.

    Example: `load_predictors("predictors", model.checkpoint.fingerprint())`.
    """
    artifact = Artifact.read(folder)
    section = artifact.sections.get(PREDICTOR_SECTION)
    if section is None:
        raise ArtifactError(f"{folder}: holds no predictors; make them with thinfer predict train")
    artifact.check(fingerprint)
    entries = section.get("entries") if isinstance(section, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ArtifactError(f"{folder}: the section of the predictors is damaged; train the predictors again")
    return [Predictor.from_entry(entry, artifact.tensors) for entry in entries]


class Scorer:
    """A predictor with its matrices decoded to float32.

    Example: `Scorer(predictor).needed(x)` for x [M, inputs] gives bool [M, outputs].
    """

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self._first = _decode(predictor.first, predictor.type)
        self._second = _decode(predictor.second, predictor.type)

    def scores(self, x: Float32) -> Float32:
        """Scores float32 [M, outputs] of inputs [M, inputs]."""
        hidden: Float32 = x @ self._first.T
        if self.predictor.kind == "mlp":
            np.maximum(hidden, 0, out=hidden)
        scores: Float32 = hidden @ self._second.T + self.predictor.bias
        return scores

    def needed(self, x: Float32) -> Bool:
        """Which outputs [M, outputs] are needed. A NaN leaves nothing out."""
        needed: Bool = ~(self.scores(x) <= np.float32(self.predictor.threshold))
        return needed


class PredictedSets:
    """A ChannelMask of predictors: what they read they see at its own site, and act where they aim.

    Neurons are left out at the input of `down`, heads at that of `o`, ``head_dim`` channels each.

    Example: `executor.set_selector(PredictedSets(predictors, head_dim=64))`.
    """

    def __init__(self, predictors: Iterable[Predictor], head_dim: int) -> None:
        self._head_dim = head_dim
        self._sources: dict[str, list[Scorer]] = {}
        self._needed: dict[str, Bool] = {}
        for predictor in predictors:
            self._sources.setdefault(predictor.source, []).append(Scorer(predictor))

    def keep(self, site: str, x: Float32, columns: Sequence[int] | None = None) -> Bool | None:
        """What was predicted for this site, and new predictions from what it shows."""
        for scorer in self._sources.get(site, ()):
            predictor = scorer.predictor
            needed = scorer.needed(x)
            if predictor.target == "heads":
                needed = np.repeat(needed, self._head_dim, axis=1)
            self._needed[predictor.aim] = needed
        mask = self._needed.pop(site, None)
        return mask if mask is None or columns is None else mask[:, list(columns)]


def _decode(raw: NDArray[np.uint8], kind: str) -> Float32:
    # Half a second of imports, needed for models with predictors only.
    import gguf

    values: Float32 = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return values
