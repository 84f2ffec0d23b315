"""ActivationProfile: which neurons fire, how often, and together with which others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thinfer.errors import ArtifactError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Weight = Literal["count", "magnitude"]

PROFILE_SECTION = "profile"
UNION_SIZES = (1, 2, 4, 8, 16, 32, 64)
# One bin a power of two: the exponent field of a float32. Bin 0 holds zeros (and values below 2^-126).
OCTAVES = 256
# The hot set of PowerInfer: the fewest neurons that make this share of all activations.
HOT_SHARE = 0.8

_ARRAYS = ("counts", "magnitudes", "head_norms", "reuse", "union_random", "union_window", "histograms")


@dataclass(frozen=True, slots=True)
class ActivationProfile:
    """What the FFN neurons and the attention heads of a model did on some texts.

    A neuron's activation is its entry in the input of `down`; it fires when that is not exactly zero. L layers, N
    neurons in each, H heads, T texts.

    Attributes:
        texts: names of the texts.
        tokens: tokens observed of each text.
        counts: int64 [T, L, N], tokens on which the neuron fired.
        magnitudes: float64 [T, L, N], sum of |activation|.
        head_norms: float32 [L, H], mean norm of what the head adds to the residual stream, in the model's units.
        reuse: float64 [L], mean share of a token's firing neurons that had fired on the token before.
        union_random: float64 [L, 7], mean share of neurons that fire on any of 1, 2, 4 … 64 tokens drawn at random.
        union_window: float64 [L, 7], the same for 1, 2, 4 … 64 tokens in a row.
        sites: names of the linears' inputs, such as "layers.0.qkv".
        histograms: int64 [sites, 256], how many values of each input had this binary exponent (bias 127, as in
            float32); bin 0 counts zeros.

    PowerInfer, arxiv.org/abs/2312.12456.

    Example: `ActivationProfile.from_section(artifact.sections["profile"], artifact.tensors).sparsity()`.
    """

    texts: tuple[str, ...]
    tokens: tuple[int, ...]
    counts: Int64
    magnitudes: Float64
    head_norms: Float32
    reuse: Float64
    union_random: Float64
    union_window: Float64
    sites: tuple[str, ...]
    histograms: Int64

    def __post_init__(self) -> None:
        texts, layers, neurons = self.counts.shape if self.counts.ndim == 3 else (-1, -1, -1)
        union = (layers, len(UNION_SIZES))
        expected = {
            "counts": (len(self.texts), layers, neurons),
            "magnitudes": (texts, layers, neurons),
            "head_norms": (layers, self.head_norms.shape[-1] if self.head_norms.ndim else 0),
            "reuse": (layers,),
            "union_random": union,
            "union_window": union,
            "histograms": (len(self.sites), OCTAVES),
        }
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ArtifactError(
                    f"profile: {name} has shape {getattr(self, name).shape}, not {shape}; profile again"
                )
        if len(self.tokens) != len(self.texts) or min(self.tokens, default=0) < 1:
            raise ArtifactError("profile: every text needs a number of tokens; profile again")

    def sparsity(self) -> Float64:
        """Share of exact zeros among the activations of each layer, float64 [L]."""
        fired = self.counts.sum(axis=(0, 2)) / (sum(self.tokens) * self.counts.shape[2])
        return np.asarray(1 - fired, np.float64)

    def rates(self) -> Float64:
        """Share of the tokens on which each neuron fired, float64 [L, N]."""
        return np.asarray(self.counts.sum(axis=0) / sum(self.tokens), np.float64)

    def expected_reuse(self) -> Float64:
        """The `reuse` of each layer if neighbouring tokens had nothing in common: Σ rate² / Σ rate, float64 [L]."""
        rates = self.rates()
        return np.asarray((rates**2).sum(axis=1) / np.maximum(rates.sum(axis=1), 1e-30), np.float64)

    def neurons_for(self, share: float = HOT_SHARE, by: Weight = "count") -> Float64:
        """Share of each layer's neurons that make this share of its activations, hottest first, float64 [L]."""
        return np.array([len(hot_set(layer, share)) / len(layer) for layer in self._weight(by).sum(axis=0)])

    def neurons_of_model_for(self, share: float = HOT_SHARE, by: Weight = "count") -> float:
        """The same over the neurons of all layers together."""
        everything = self._weight(by).sum(axis=0).ravel()
        return len(hot_set(everything, share)) / len(everything)

    def curve(self, by: Weight = "count", points: int = 101) -> Float64:
        """Share of all activations made by the hottest 0 … 100 % of the model's neurons, float64 [points]."""
        ordered = np.sort(self._weight(by).sum(axis=0).ravel())[::-1]
        reached = np.concatenate([[0.0], np.cumsum(ordered, dtype=np.float64)])
        total = reached[-1] or 1.0
        return np.interp(np.linspace(0, len(ordered), points), np.arange(len(reached)), reached / total)

    def overlap(self, share: float = HOT_SHARE, by: Weight = "count") -> Float64:
        """|A ∩ B| / min(|A|, |B|) of the texts' hot sets A and B, mean over the layers, float64 [T, T]."""
        hot = [[set(hot_set(layer, share).tolist()) for layer in text] for text in self._weight(by)]
        result = np.ones((len(hot), len(hot)))
        for i, first in enumerate(hot):
            for j, second in enumerate(hot):
                shares = [len(a & b) / max(min(len(a), len(b)), 1) for a, b in zip(first, second, strict=True)]
                result[i, j] = float(np.mean(shares))
        return result

    def power_law(self) -> float:
        """The exponent a of rate ∝ rank^-a, by least squares on the logarithms over the model's firing neurons.

        Neurons are ranked within their layer, and 0 is no skew at all. NaN when fewer than two neurons of a layer ever
        fired in all layers.
        """
        slopes = []
        for layer in self.rates():
            ordered = np.sort(layer[layer > 0])[::-1]
            if len(ordered) > 1:
                slopes.append(-np.polyfit(np.log(np.arange(1, len(ordered) + 1)), np.log(ordered), 1)[0])
        return float(np.mean(slopes)) if slopes else float("nan")

    def to_section(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The JSON section and the tensors under which an Artifact stores this profile."""
        section = {"texts": list(self.texts), "tokens": list(self.tokens), "sites": list(self.sites)}
        return section, {f"{PROFILE_SECTION}.{name}": getattr(self, name) for name in _ARRAYS}

    @classmethod
    def from_section(cls, section: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> ActivationProfile:
        """The profile that `to_section` stored; ArtifactError when a field is missing or has a wrong type or shape."""
        try:
            return cls(
                texts=tuple(map(str, section["texts"])),
                tokens=tuple(map(int, section["tokens"])),
                sites=tuple(map(str, section["sites"])),
                **{name: tensors[f"{PROFILE_SECTION}.{name}"] for name in _ARRAYS},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"profile section of the artifact is damaged: {error!r}; profile again") from error

    def _weight(self, by: Weight) -> NDArray[Any]:
        return self.counts if by == "count" else self.magnitudes


def hot_set(weights: NDArray[Any], share: float) -> Int64:
    """Ascending ids of the fewest neurons whose weights [N] reach this share of the sum; none when the sum is 0.

    Of equal weights the lower id comes first.

    Example:
        >>> hot_set(np.array([1, 6, 0, 3]), 0.8).tolist()
        [1, 3]
    """
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order], dtype=np.float64)
    if not reached[-1] > 0:
        return np.empty(0, np.int64)
    # A share of the sum is met in exact arithmetic; the sum of floats may miss it by a rounding.
    count = int(np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))) + 1
    return np.sort(order[:count]).astype(np.int64)
