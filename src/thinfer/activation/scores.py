"""Scores of input channels and their thresholds: TEAL and WINA.

A channel i of a linear's input x is dropped where its score is at most the site's threshold:

    TEAL  |x_i|                  arxiv.org/abs/2408.14690
    WINA  |x_i| · ‖W[:, i]‖₂     arxiv.org/abs/2505.19427; W is the fused matrix of the site (q|k|v, gate|up)

The threshold for rate r is the r-quantile of the scores at that site, so a fraction r of the channels is dropped on
average. Unlike TEAL's paper no distribution is assumed to be symmetric: scores are magnitudes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thinfer.calibration.observer import ScoreHistogram
from thinfer.core.graph import Graph
from thinfer.core.selector import ThresholdSelector
from thinfer.models.loader import Model

Float32 = NDArray[np.float32]
Method = Literal["teal", "wina"]
BLOCK_KINDS = ("qkv", "o", "gate_up", "up", "down")


@dataclass(frozen=True, slots=True)
class Site:
    """One distinct input of block linears.

    Attributes:
        name: such as "layers.3.qkv".
        kind: qkv, o, gate_up (without a gate up) or down.
        layer: index of the block.
        weights: names of the matrices that share the input.
        channels: width of the input.
        nbytes: stored bytes of the matrices.
    """

    name: str
    kind: str
    layer: int
    weights: tuple[str, ...]
    channels: int
    nbytes: int


def block_sites(model: Model, graph: Graph) -> list[Site]:
    """The inputs of all linears inside the blocks, in order; the output head is not one of them."""
    sites = []
    for node in graph.nodes:
        if node.op == "linear" and node.attrs["kind"] in BLOCK_KINDS:
            sizes = [model.weights.source(name).raw.nbytes for name in node.weights]
            sites.append(
                Site(
                    node.attrs["site"],
                    node.attrs["kind"],
                    node.attrs["layer"],
                    node.weights,
                    graph.buffers[node.inputs[0]],
                    sum(sizes),
                )
            )
    return sites


def column_norms(model: Model, site: Site) -> Float32:
    """‖W[:, i]‖₂ of the site's fused matrix, float32 [channels]; one matrix is decoded at a time."""
    squares = np.zeros(site.channels, np.float64)
    for name in site.weights:
        weight = model.weights.float32(name)
        squares += np.einsum("oi,oi->i", weight, weight, dtype=np.float64)
    return np.sqrt(squares).astype(np.float32)


def make_selector(
    method: Method,
    histograms: Mapping[str, ScoreHistogram],
    scales: Mapping[str, Float32],
    rates: Mapping[str, float],
    *,
    sink_tokens: int = 4,
    prefill: bool = False,
) -> ThresholdSelector:
    """The selector that drops a fraction ``rates[site]`` of the channels at every site.

    Args:
        method: "teal" or "wina".
        histograms: observed scores of every site.
        scales: column norms of every site for WINA, else empty.
        rates: fraction to drop, by site, between 0 and 1.
        sink_tokens: first positions that stay dense.
        prefill: whether prompts are sparse too.
    """
    # A site at rate 0 is left out, so it stays dense to the bit.
    thresholds = {site: histograms[site].quantile(rate) for site, rate in rates.items() if rate > 0}
    return ThresholdSelector(
        method,
        thresholds,
        {site: scales[site] for site in thresholds if site in scales},
        sink_tokens=sink_tokens,
        prefill=prefill,
        rates={site: float(rates[site]) for site in thresholds},
    )
