"""What a pruning run did, as report.json and as a model card."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from thinfer.pruning.recipe import Recipe, describe

_LARGE_RISE = 1.5


def new_report(recipe: Recipe) -> dict[str, Any]:
    """The part of a report that is known before the run: what is asked for, with every default."""
    report: dict[str, Any] = {
        "thinfer": version("thinfer"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "recipe": recipe.to_dict(),
        "method": describe(recipe.make_method()),
    }
    if not recipe.structured:
        report["allocation"] = describe(recipe.make_allocation())
        report["refinements"] = [describe(part) for part in recipe.make_refinements()]
        report["pattern"] = recipe.pattern
    return report


def quality_notes(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> list[str]:
    """A warning where perplexity rose much, as it does on small models and without fine-tuning."""
    if before is None or after is None or after["ppl"] <= _LARGE_RISE * before["ppl"]:
        return []
    return [
        f"perplexity rose from {before['ppl']:.2f} to {after['ppl']:.2f}; prune less, use a stronger method, or let it "
        "recover: thinfer recover"
    ]


def speed_facts(structured: bool) -> dict[str, str]:
    """What the result gains at run time, said plainly: zeros that are stored make nothing smaller or faster."""
    if structured:
        return {"accelerated_by": "any engine", "why": "the model is smaller, and dense"}
    return {
        "accelerated_by": "none",
        "why": "zeros are stored like other weights: the folder is as large and as fast as the dense model's",
    }


def model_card(report: Mapping[str, Any]) -> str:
    """README.md of a pruned model."""
    recipe, method = report["recipe"], report["method"]["name"]
    base = report["model"]["ref"].rstrip("/")
    if Path(base).expanduser().exists():
        base = Path(base).name  # where it lay is nobody's business
    lines = [
        "---",
        "library_name: transformers",
        "tags: [thinfer, pruned]",
        "---",
        "",
        f"# {base.rpartition('/')[2]}, pruned with {method}",
        "",
        f"Made from `{base}` by `thinfer prune`: {_what(report)}. It is an ordinary Hugging Face folder.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in _rows(report).items()),
        "",
        "`recipe.yaml` makes it again (`thinfer prune --recipe recipe.yaml -o DIR`); `report.json` has every setting, "
        "the error of every layer, and what was measured.",
    ]
    notes = report.get("notes", [])
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    if recipe["evaluate"] and "perplexity" in report:
        how = report["perplexity"]["dataset"]
        lines += [
            "",
            f"Perplexity is that of {how['source']} ({how['windows']} windows of {how['ctx']} tokens, stride "
            f"{how['stride']}, {'with' if how['bos'] else 'without'} BOS); compare it only with figures of the "
            "same text, tokenizer and window length.",
        ]
    return "\n".join(lines) + "\n"


def sensitivity_plot(scan: Mapping[str, Any]) -> str:
    """The curves of a sensitivity scan as SVG: rise of the loss against the rate, a line for each kind of matrix."""
    import io

    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for kind, curve in scan["curves"].items():
        axes.plot([rate for rate, _ in curve], [rise for _, rise in curve], marker="o", label=kind)
    axes.set_xlabel("sparsity of this kind of matrix, all others dense")
    axes.set_ylabel("rise of the loss (nats a token)")
    axes.legend(fontsize="small")
    drawn = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    canvas.print_svg(drawn, metadata={"Date": None})
    return drawn.getvalue()


def _what(report: Mapping[str, Any]) -> str:
    recipe = report["recipe"]
    if "pattern" not in report:
        return f"{report['sparsity']:.1%} of the parameters of its blocks are gone"
    extra = f", pattern {report['pattern']}" if report["pattern"] != "unstructured" else ""
    parts = [part["name"] for part in report["refinements"]]
    if recipe["allocation"] != "uniform":
        parts.insert(0, f"rates by {recipe['allocation']}")
    return f"{report['sparsity']:.1%} of the weights pruned are zero{extra}" + (
        f" ({', '.join(parts)})" if parts else ""
    )


def _rows(report: Mapping[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = {
        "sparsity of what was pruned": f"{report['sparsity']:.2%}",
        "parameters": f"{report['parameters']['after']:,} (before: {report['parameters']['before']:,})",
        "weights": f"{report['bytes'] / 1e6:.1f} MB, {report['save_dtype']}",
    }
    if "perplexity" in report:
        before, after = report["perplexity"]["before"], report["perplexity"]["after"]
        rows["perplexity"] = f"{after['ppl']:.2f} ± {after['ppl_stderr']:.2f} (dense: {before['ppl']:.2f})"
    if "calibration" in report:
        text = report["calibration"]
        rows["calibration"] = f"{text['samples']} windows of {text['seqlen']} tokens of {text['source']}"
    rows["runs faster with"] = report["speed"]["accelerated_by"]
    return rows
