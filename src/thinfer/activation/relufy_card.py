"""What a ReLU model's folder says of itself: its card, and the picture of how it came to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinfer.activation.learning_curve import Point, plot_curves


def plot(report: dict[str, Any], path: Path) -> None:
    """Draw the learning curve of a report as a PNG."""
    curve: list[Point] = report["curve"]
    plot_curves(
        {"ReLU": curve},
        path,
        quality="ppl",
        label="perplexity",
        title=Path(report["model"]).name,
        levels={"dense": report["dense"]["ppl"], "right after the swap": report["swapped"]["ppl"]},
        logarithmic=True,
    )


def card(report: dict[str, Any], picture: bool) -> str:
    """The model card; `picture`: whether there is one to show."""
    options, where = report["options"], report["evaluation"]
    steps = (("dense", "dense"), ("right after the swap", "swapped"), ("fitted", "start"), ("trained", "after"))
    rows = "\n".join(
        f"| {name} | {report[key]['ppl']:.3f} | "
        + (f"{100 * report[key]['sparsity']:.1f} %" if "sparsity" in report[key] else "")
        + " |"
        for name, key in steps
    )
    image = "\n![learning curve](learning-curve.png)\n" if picture else ""
    return f"""---
tags: [thinfer, relu]
library_name: {"transformers" if options["stage"] == 1 else "thinfer"}
---

# {Path(report["model"]).name} with ReLU

Made by `thinfer relufy`, stage {options["stage"]}: {report["activation_before"]} became ReLU, trained on
{report["tokens"]} tokens of {report["text"]["source"]} (loss {options["loss"]}); {report["tokens_fitted_on"]} tokens
fitted the down matrices before.

| | perplexity ({where["source"]}, {where["windows"]} windows of {where["ctx"]}) | neurons at zero |
| --- | ---: | ---: |
{rows}
{image}
All settings, the zeros of every layer and the curve are in report.json.
"""
