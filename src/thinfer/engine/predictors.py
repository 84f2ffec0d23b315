"""Finds predictors that belong to a checkpoint, and evaluates them: the NumPy definition of what they name."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinfer.core.artifact import Artifact
from thinfer.core.graph import Graph
from thinfer.core.neuron_selector import NeuronPredictor, NeuronSelector
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
    if PREDICTOR_SECTION not in artifact.sections:
        raise ArtifactError(f"{folder}: holds no predictors; make them with thinfer predict train")
    artifact.check(fingerprint)
    return stored_predictors(artifact, folder)


def stored_predictors(artifact: Artifact, folder: str | Path) -> list[Predictor]:
    """The predictors in an artifact that was read from this folder; ArtifactError when they are damaged."""
    section = artifact.sections[PREDICTOR_SECTION]
    entries = section.get("entries") if isinstance(section, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ArtifactError(f"{folder}: the section of the predictors is damaged; train the predictors again")
    return [Predictor.from_entry(entry, artifact.tensors) for entry in entries]


def predictor_site(layer: int) -> str:
    """Where the predictor of a layer's neurons is counted.

    Example:
        >>> predictor_site(3)
        'layers.3.predictor'
    """
    return f"layers.{layer}.predictor"


class Scorer:
    """A predictor with its matrices decoded to float32.

    Example: `Scorer(predictor.scorer).needed(x)` for x [M, inputs] gives bool [M, outputs].
    """

    def __init__(self, predictor: NeuronPredictor) -> None:
        self._predictor = predictor
        self._factors = [_decode(factor.raw, factor.type) for factor in predictor.factors]

    def scores(self, x: Float32) -> Float32:
        """Scores float32 [M, outputs] of inputs [M, inputs]."""
        for index, factor in enumerate(self._factors):
            if index and self._predictor.hidden_act == "relu":
                x = np.maximum(x, 0)
            x = x @ factor.T
        return x if self._predictor.bias is None else x + self._predictor.bias

    def needed(self, x: Float32) -> Bool:
        """Which outputs [M, outputs] are needed. A NaN leaves nothing out."""
        needed: Bool = ~(self.scores(x) <= np.float32(self._predictor.threshold))
        return needed


class PredictedSets:
    """A ChannelMask of predictors: what they read they see at its own site, and act where they aim.

    Neurons are left out at the input of `down`, heads at that of `o`.

    Example: `executor.set_selector(PredictedSets(NeuronSelector("predictor", predictors=found), graph))`.
    """

    def __init__(self, selector: NeuronSelector, graph: Graph) -> None:
        linears = {(n.attrs["kind"], n.attrs["layer"]): n.attrs["site"] for n in graph.nodes if n.op == "linear"}
        widths = {n.attrs["layer"]: n.attrs["head_dim"] for n in graph.nodes if n.op == "attention"}
        self._sources: dict[str, list[tuple[str, int, Scorer]]] = {}
        self._needed: dict[str, Bool] = {}
        kinds = ((selector.predictors, ("gate_up", "up"), "down"), (selector.heads, ("qkv",), "o"))
        for predictors, sources, aim in kinds:
            for layer, predictor in predictors.items():
                source = next(
                    linears[kind, predictor.source] for kind in sources if (kind, predictor.source) in linears
                )
                width = widths[layer] if aim == "o" else 1
                self._sources.setdefault(source, []).append((linears[aim, layer], width, Scorer(predictor)))

    def keep(self, site: str, x: Float32, columns: Sequence[int] | None = None) -> Bool | None:
        """What was predicted for this site, and new predictions from what it shows."""
        for aim, width, scorer in self._sources.get(site, ()):
            self._needed[aim] = np.repeat(scorer.needed(x), width, axis=1)
        mask = self._needed.pop(site, None)
        return mask if mask is None or columns is None else mask[:, list(columns)]


def _decode(raw: NDArray[np.uint8], kind: str) -> Float32:
    # Half a second of imports, needed for models with predictors only.
    import gguf

    values: Float32 = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return values
