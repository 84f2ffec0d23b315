"""What was measured while a model learned: points that survive an interruption, and their picture."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinfer.errors import ArtifactError
from thinfer.pruning.writing import writing

Point = Mapping[str, Any]


class LearningCurve:
    """Points by step, in a JSON file that is replaced whole at each of them.

    A run that continues from an earlier state measures again what it had measured, and the point is replaced.

    Args:
        path: the file; its folder is made with the first point.
        key: names the run; points of another run are forgotten.

    Raises:
        ArtifactError: the file is damaged.

    Example: ``LearningCurve(folder / "curve.json", key).add(100, {"tokens": 51200, "ppl": 20.5})``.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._points: dict[int, Point] = {}
        if path.is_file():
            try:
                document = json.loads(path.read_text(encoding="utf-8"))
                if document["key"] == key:
                    self._points = {int(point["step"]): point for point in document["points"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ArtifactError(f"{path}: {error}; delete it") from error

    @property
    def points(self) -> list[Point]:
        """All points in the order of their steps, each with "step"."""
        return [self._points[step] for step in sorted(self._points)]

    def add(self, step: int, values: Point) -> None:
        """Put a point there and write the file; ResourceError when the disk is full."""
        self._points[step] = {"step": step, **values}
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        text = json.dumps({"key": self._key, "points": self.points}, indent=1) + "\n"
        try:
            with writing(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                unfinished.write_text(text, encoding="utf-8")
                unfinished.replace(self._path)
        finally:
            unfinished.unlink(missing_ok=True)


def can_plot() -> bool:
    """Whether matplotlib is there; without it no pictures are drawn."""
    return find_spec("matplotlib") is not None


def plot_curves(
    curves: Mapping[str, Sequence[Point]],
    path: Path,
    *,
    quality: str,
    label: str,
    title: str,
    levels: Mapping[str, float] | None = None,
    logarithmic: bool = False,
) -> None:
    """Draw quality and the share of zeros against tokens, and the zeros of each layer at the end, as a PNG.

    Args:
        curves: points by name of the model; each has "tokens", `quality` and "sparsity" (one number a layer).
        path: file to write.
        quality: key of what is drawn above.
        label: of that axis.
        title: of the picture.
        levels: horizontal lines by name.
        logarithmic: the axis of quality.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 9), layout="constrained")
    FigureCanvasAgg(figure)
    above, middle, below = figure.subplots(3, 1)
    for name, points in curves.items():
        tokens = [point["tokens"] for point in points]
        above.plot(tokens, [point[quality] for point in points], ".-", label=name)
        means = [100 * sum(point["sparsity"]) / len(point["sparsity"]) for point in points]
        middle.plot(tokens, means, ".-", label=name)
        if points:
            zeros = [100 * share for share in points[-1]["sparsity"]]
            below.plot(range(len(zeros)), zeros, "o-", label=name)
    for number, (name, value) in enumerate((levels or {}).items()):
        above.axhline(value, color="0.4", linestyle=("--", ":", "-.")[number % 3], label=name)
    if logarithmic:
        above.set_yscale("log")
    above.set(title=title, ylabel=label)
    middle.set(xlabel="tokens", ylabel="neurons at zero, %")
    below.set(xlabel="layer", ylabel="neurons at zero at the end, %")
    for axes in (middle, below):
        axes.set_ylim(0, 100)
    for axes in (above, middle, below):
        axes.grid(alpha=0.3)
    above.legend()
    figure.savefig(path, dpi=120)
