"""Which FFN neurons and heads a model computes: those that fire, those a caller lists, or those a predictor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from thinfer.errors import UsageError

SINK_TOKENS = 4
NeuronKind = Literal["exact", "given", "predictor"]


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [rows, inputs] as GGUF stores its rows: `raw` uint8 [rows, row_bytes] of a block type or float type."""

    raw: NDArray[np.uint8]
    type: str
    inputs: int


@dataclass(frozen=True, slots=True)
class NeuronPredictor:
    """Scores the neurons (or the heads) of a layer before they are computed; those above `threshold` are computed.

    Attributes:
        factors: matrices applied one after another to the input [hidden] of the FFN (for heads: of q, k and v); the
            last has one row a neuron.
        threshold: a neuron is computed when its score is above; 0 or more.
        source: layer whose input is read: the predicted layer's own, or an earlier one (lookahead).
        hidden_act: between the factors: "relu" (an MLP) or "none" (low rank).
        bias: float32 added to the scores, one a neuron; None: nothing.
        density: share of the neurons that it is expected to name; None: not known.

    Deja Vu, arxiv.org/abs/2310.17157; PowerInfer, arxiv.org/abs/2312.12456.
    """

    factors: tuple[StoredMatrix, ...]
    threshold: float
    source: int
    hidden_act: Literal["none", "relu"] = "none"
    bias: NDArray[np.float32] | None = None
    density: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that one prediction reads."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return bias + sum(factor.raw.nbytes for factor in self.factors)

    def __post_init__(self) -> None:
        if not self.factors:
            raise UsageError("a neuron predictor needs at least one matrix")
        if not self.threshold >= 0:
            raise UsageError(
                f"the threshold of a neuron predictor must be 0 or more, not {self.threshold}; shift its bias"
            )
        for before, after in zip(self.factors, self.factors[1:], strict=False):
            if after.inputs != len(before.raw):
                raise UsageError(
                    f"a predictor's matrix takes {after.inputs} inputs, the one before gives {len(before.raw)}"
                )


@dataclass(frozen=True, slots=True)
class NeuronSelector:
    """How the neurons of a model's FFNs, and its heads, are chosen.

    * "exact": the gate of every neuron, then only what is not multiplied by an exact 0; changes no token.
    * "given": what `Engine.set_active` names for a layer, and of that what fires; without a list all neurons.
    * "predictor": what the layer's predictor names; layers without one are as in "exact". `heads` are predictors of
      heads, by layer: what a head that is not named would have added is left out, its keys and values are not.

    `rates` maps a layer to the fraction of its neurons that is expected not to fire, `site_rates` a linear's site to
    the fraction of its inputs that is expected to be 0: they help to choose layouts and never change what is computed.
    Predictors act on rows that are run sparse (at decode), not on the first `sink_tokens` positions of a sequence.
    """

    kind: NeuronKind = "exact"
    rates: Mapping[int, float] = field(default_factory=dict)
    predictors: Mapping[int, NeuronPredictor] = field(default_factory=dict)
    heads: Mapping[int, NeuronPredictor] = field(default_factory=dict)
    site_rates: Mapping[str, float] = field(default_factory=dict)
    sink_tokens: int = SINK_TOKENS

    def __post_init__(self) -> None:
        if self.kind not in get_args(NeuronKind):
            raise UsageError(f"neuron selector {self.kind!r} is unknown; known: {', '.join(get_args(NeuronKind))}")
        if self.predicts != (self.kind == "predictor"):
            raise UsageError("predictors and the neuron selector 'predictor' belong together")
        for layer, rate in self.rates.items():
            if not 0 <= rate <= 1:
                raise UsageError(f"neuron rate of layer {layer} must lie between 0 and 1, not {rate}")
        for layer, predictor in (*self.predictors.items(), *self.heads.items()):
            if not 0 <= predictor.source <= layer:
                raise UsageError(
                    f"the predictor of layer {layer} reads layer {predictor.source}, which is not before it"
                )

    @property
    def predicts(self) -> bool:
        """Whether there are predictors, so that rows run sparse differ from others."""
        return bool(self.predictors or self.heads)

    def listed(self, layer: int) -> bool:
        """Whether this layer's gate is computed for listed neurons only."""
        return self.kind == "given" or layer in self.predictors
