"""Predictor: a small network that says ahead of time which neurons or heads of a layer a token needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thinfer.core.neuron_selector import SINK_TOKENS, NeuronPredictor, NeuronSelector, StoredMatrix
from thinfer.errors import ArtifactError

Target = Literal["neurons", "heads"]
Kind = Literal["lowrank", "mlp"]
StoredType = Literal["Q8_0", "Q4_0"]

PREDICTOR_SECTION = "predictors"
# Values and bytes of a block along the input, as in GGUF: the engine packs these matrices like any others.
BLOCK_VALUES = 32
BLOCK_BYTES: Mapping[str, int] = {"Q8_0": 34, "Q4_0": 18}
# What a predictor must reach on text that it was not trained on: this recall at this many times the true density.
COUNTS_RECALL = 0.95
COUNTS_DENSITY = 1.5

_SIZES = ("inputs", "rank", "outputs")
_FIELDS = (
    "target",
    "layer",
    "aim",
    "source",
    "kind",
    "type",
    *_SIZES,
    "threshold",
    "recall",
    "density",
    "true_density",
)


@dataclass(frozen=True, slots=True, eq=False)
class Predictor:
    """Score of each output: ``second · f(first · x) + bias``; what scores above the threshold is needed.

    f is the identity for "lowrank" and ReLU for "mlp". Low-rank: DejaVu, arxiv.org/abs/2310.17157; MLP sized by layer:
    PowerInfer, arxiv.org/abs/2312.12456.

    Attributes:
        target: "neurons" of the FFN (outputs of gate and up, inputs of down) or "heads" of the attention.
        layer: whose neurons or heads.
        aim: site at whose input they are left out, such as "layers.3.down".
        source: site whose input x is read, such as "layers.3.gate_up"; of an earlier layer if it looks ahead.
        kind: "lowrank" or "mlp".
        type: block type of both matrices.
        inputs, rank, outputs: sizes; inputs and rank are multiples of 32.
        threshold: scores above it are needed.
        recall: share of what was needed that it finds, on held-out text.
        density: share of all outputs that it names there.
        true_density: share of all outputs that were needed there.
        first: uint8 [rank, row bytes], blocks of the matrix [rank, inputs].
        second: uint8 [outputs, row bytes], blocks of the matrix [outputs, rank].
        bias: float32 [outputs].
    """

    target: Target
    layer: int
    aim: str
    source: str
    kind: Kind
    type: StoredType
    inputs: int
    rank: int
    outputs: int
    threshold: float
    recall: float
    density: float
    true_density: float
    first: NDArray[np.uint8]
    second: NDArray[np.uint8]
    bias: NDArray[np.float32]

    def __post_init__(self) -> None:
        if (
            self.target not in ("neurons", "heads")
            or self.kind not in ("lowrank", "mlp")
            or self.type not in BLOCK_BYTES
        ):
            raise ArtifactError(f"{self.name}: unknown target, kind or type; train the predictors again")
        if self.inputs % BLOCK_VALUES or self.rank % BLOCK_VALUES or min(self.inputs, self.rank, self.outputs) < 1:
            raise ArtifactError(f"{self.name}: sizes are not multiples of {BLOCK_VALUES}; train the predictors again")
        size = BLOCK_BYTES[self.type]
        expected = {
            "first": (self.rank, self.inputs // BLOCK_VALUES * size),
            "second": (self.outputs, self.rank // BLOCK_VALUES * size),
            "bias": (self.outputs,),
        }
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                found = getattr(self, name).shape
                raise ArtifactError(f"{self.name}: {name} has shape {found}, not {shape}; train the predictors again")
        begin, _, rest = self.source.partition(".")
        if begin != "layers" or not rest.partition(".")[0].isdecimal():
            raise ArtifactError(f"{self.name}: reads {self.source}, which is no layer's; train the predictors again")

    @property
    def name(self) -> str:
        """Such as "neurons.3"."""
        return f"{self.target}.{self.layer}"

    @property
    def nbytes(self) -> int:
        """Bytes that one prediction reads."""
        return self.scorer.nbytes

    @property
    def parameters(self) -> int:
        """Values of both matrices and the bias."""
        return self.rank * (self.inputs + self.outputs) + self.outputs

    @property
    def counts(self) -> bool:
        """Whether it was good enough on held-out text to be used: recall 0.95 at 1.5 times the true density at most."""
        return self.recall >= COUNTS_RECALL and self.density <= COUNTS_DENSITY * self.true_density

    @property
    def scorer(self) -> NeuronPredictor:
        """What the engine runs: the same scores, shifted so that the threshold is 0."""
        return NeuronPredictor(
            factors=(
                StoredMatrix(self.first, self.type, self.inputs),
                StoredMatrix(self.second, self.type, self.rank),
            ),
            threshold=0.0,
            source=int(self.source.split(".")[1]),
            hidden_act="relu" if self.kind == "mlp" else "none",
            bias=self.bias - np.float32(self.threshold),
            density=self.density,
        )

    def to_entry(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The JSON entry and the tensors under which an Artifact stores this predictor."""
        entry = {name: getattr(self, name) for name in _FIELDS}
        prefix = f"{PREDICTOR_SECTION}.{self.name}"
        return entry, {f"{prefix}.{part}": getattr(self, part) for part in ("first", "second", "bias")}

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Predictor:
        """The predictor that `to_entry` stored; ArtifactError when a field is missing or damaged."""
        try:
            prefix = f"{PREDICTOR_SECTION}.{entry['target']}.{int(entry['layer'])}"
            values: dict[str, Any] = {name: entry[name] for name in _FIELDS}
            values |= {part: tensors[f"{prefix}.{part}"] for part in ("first", "second", "bias")}
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"a predictor of the artifact is damaged: {error!r}; train the predictors again"
            ) from error


def selector_of(
    predictors: Iterable[Predictor],
    *,
    rates: Mapping[int, float] = MappingProxyType({}),
    site_rates: Mapping[str, float] = MappingProxyType({}),
    sink_tokens: int = SINK_TOKENS,
) -> NeuronSelector:
    """The selector that runs these predictors, or what fires where there are none; see NeuronSelector for the rest.

    Example: `selector_of(p for p in found if p.counts).kind` is "predictor" or "exact".
    """
    chosen = {(each.target, each.layer): each.scorer for each in predictors}
    return NeuronSelector(
        "predictor" if chosen else "exact",
        rates=rates,
        site_rates=site_rates,
        predictors={layer: scorer for (target, layer), scorer in chosen.items() if target == "neurons"},
        heads={layer: scorer for (target, layer), scorer in chosen.items() if target == "heads"},
        sink_tokens=sink_tokens,
    )
