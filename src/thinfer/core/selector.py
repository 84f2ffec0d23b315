"""Which input channels of a linear are needed for a token: the run-time half of activation sparsity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from thinfer.errors import ArtifactError

SELECTOR_SECTION = "selector"
_METHODS = ("teal", "wina")


class ChannelMask(Protocol):
    """Says which entries of a linear's input are needed, whatever decides it: thresholds, recorded sets, predictors."""

    def keep(self, site: str, x: NDArray[np.float32], columns: Sequence[int] | None = None) -> NDArray[np.bool_] | None:
        """Which entries of x [rows, channels] are kept at this site, as for `ThresholdSelector.keep`; None means all.

        Sites come in the order of the graph.
        """
        ...


@dataclass(frozen=True, slots=True)
class ThresholdSelector:
    """Drops channel i of a linear's input where |x_i| * scale_i <= threshold (NaN is never dropped).

    `thresholds` maps a site ("layers.3.qkv") to its threshold; sites not named stay dense. `channel_scale` maps a
    site to one float32 factor per channel (WINA's column norms); sites not named have scale 1 (TEAL). Positions below
    `sink_tokens` are always dense, and so is the prompt unless `prefill` is set. `rates` maps a site to the fraction of
    its channels that calibration expects to be dropped: it helps to choose kernels and never changes what is dropped.

    TEAL: arxiv.org/abs/2408.14690, WINA: arxiv.org/abs/2505.19427.
    """

    method: Literal["teal", "wina"]
    thresholds: Mapping[str, float]
    channel_scale: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    sink_tokens: int = 4
    prefill: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise ArtifactError(f"selector method {self.method!r} is unknown; known: {', '.join(_METHODS)}")
        for site, threshold in self.thresholds.items():
            if not threshold >= 0:
                raise ArtifactError(f"threshold of {site} must be 0 or more, not {threshold}")
        for site, rate in self.rates.items():
            if not 0 <= rate <= 1:
                raise ArtifactError(f"rate of {site} must lie between 0 and 1, not {rate}")

    def keep(self, site: str, x: NDArray[np.float32], columns: Sequence[int] | None = None) -> NDArray[np.bool_] | None:
        """Which entries of x [rows, channels] are kept at this site; None means all.

        `columns` names the channel of each column of x when x holds only some of them.
        """
        threshold = self.thresholds.get(site)
        if threshold is None:
            return None
        scale = self.channel_scale.get(site)
        magnitude = np.abs(x)
        if scale is not None:
            magnitude = magnitude * (scale if columns is None else scale[list(columns)])
        dropped: NDArray[np.bool_] = magnitude <= np.float32(threshold)
        return ~dropped

    def to_section(self) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
        """The JSON section and the tensors under which an Artifact stores this selector."""
        section = {
            "method": self.method,
            "thresholds": dict(self.thresholds),
            "sink_tokens": self.sink_tokens,
            "prefill": self.prefill,
            "rates": dict(self.rates),
        }
        tensors = {f"selector.scale.{site}": scale for site, scale in self.channel_scale.items()}
        return section, tensors

    @classmethod
    def from_section(cls, section: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> ThresholdSelector:
        """The selector that `to_section` stored; ArtifactError when a field is missing or has a wrong type.

        Artifacts of older versions have no rates.
        """
        prefix = "selector.scale."
        try:
            return cls(
                method=section["method"],
                thresholds={str(site): float(t) for site, t in section["thresholds"].items()},
                channel_scale={
                    name.removeprefix(prefix): np.asarray(value, np.float32)
                    for name, value in tensors.items()
                    if name.startswith(prefix)
                },
                sink_tokens=int(section["sink_tokens"]),
                prefill=bool(section["prefill"]),
                rates={str(site): float(rate) for site, rate in section.get("rates", {}).items()},
            )
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ArtifactError(f"selector section of the artifact is damaged: {error!r}; calibrate again") from error
