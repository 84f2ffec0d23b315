"""Pictures of a profile: the curve of the hottest neurons, sparsity by layer, and how sets of neurons unite."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from thinfer.core.profile import UNION_SIZES, ActivationProfile
from thinfer.errors import UsageError


def require_plots() -> None:
    """Raise UsageError unless pictures can be drawn; asked before the work is done."""
    if find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib: pip install 'thinfer[plot]'")


def plot_profile(found: ActivationProfile, folder: str | Path, title: str) -> list[Path]:
    """Draw power-law.png, sparsity.png and union.png into the folder; returns their paths.

    Example: `plot_profile(found, "profile", "SmolLM2-135M, ReLU")`.
    """
    drawings = {"power-law": _power_law, "sparsity": _sparsity, "union": _union}
    return [_draw(draw, found, Path(folder) / f"{name}.png", title) for name, draw in drawings.items()]


def _draw(draw: Any, found: ActivationProfile, path: Path, title: str) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    draw(found, axes)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path


def _power_law(found: ActivationProfile, axes: Any) -> None:
    points = np.linspace(0, 100, 101)
    axes.plot(points, 100 * found.curve("count"), label="how often they fire")
    axes.plot(points, 100 * found.curve("magnitude"), "--", label="how strongly")
    axes.axhline(80, color="grey", linewidth=0.8)
    axes.set_xlabel("hottest neurons of the model, %")
    axes.set_ylabel("share of all activations, %")
    axes.legend()


def _sparsity(found: ActivationProfile, axes: Any) -> None:
    axes.bar(np.arange(len(found.reuse)), 100 * found.sparsity(), color="#4477aa", width=0.7)
    axes.set_ylim(0, 100)
    axes.set_xlabel("layer")
    axes.set_ylabel("activations that are exactly zero, %")


def _union(found: ActivationProfile, axes: Any) -> None:
    axes.plot(UNION_SIZES, 100 * found.union_random.mean(axis=0), "o-", label="tokens drawn at random")
    axes.plot(UNION_SIZES, 100 * found.union_window.mean(axis=0), "s--", label="tokens in a row")
    axes.set_xscale("log", base=2)
    axes.set_xticks(UNION_SIZES, [str(size) for size in UNION_SIZES])
    axes.set_ylim(0, 100)
    axes.set_xlabel("tokens in the batch")
    axes.set_ylabel("neurons that fire on any of them, %")
    axes.legend()
