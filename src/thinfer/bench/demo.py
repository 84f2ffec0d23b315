"""The demo: one model, dense and at two levels of sparsity, its quality and speed in one table."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinfer.bench.report import table
from thinfer.bench.throughput import Test, measure, open_contender

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """How much the demo measures.

    Attributes:
        levels: sparsities to calibrate.
        ctx: tokens of a perplexity window.
        windows: number of windows.
        prompt_tokens: length of the timed prompt.
        decode_tokens: number of timed decode steps.
        rounds: timed rounds.
        samples: windows of 512 tokens that calibration observes.
        held_out: windows on which calibration measures.
    """

    levels: tuple[float, ...] = (0.25, 0.4)
    ctx: int = 512
    windows: int = 8
    prompt_tokens: int = 512
    decode_tokens: int = 128
    rounds: int = 5
    samples: int = 12
    held_out: int = 4


def configurations(
    model: str, out: Path, options: Mapping[str, Any], plan: DemoPlan, progress: Progress
) -> dict[str, str]:
    """Calibrate the levels; returns the reference of every configuration."""
    from thinfer.activation.threshold import calibrate

    chosen = {"dense": model}
    own = ("sparsity", "max_model_len")
    engine = {name: value for name, value in options.items() if name not in own}
    for level in plan.levels:
        folder = out / f"{Path(model).stem}-sparse-{level:g}"

        def tell(what: str, level: float = level) -> None:
            progress(f"calibrating sparsity {level:g}: {what}")

        calibrate(
            model,
            folder,
            progress=tell,
            sparsity=level,
            held_out=plan.held_out,
            samples=plan.samples,
            **engine,
        )
        chosen[f"sparse {level:g}"] = str(folder)
    return chosen


def quality(reference: str, plan: DemoPlan, options: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Perplexity of the shipped text, with the sparsity as it acts at decode."""
    from thinfer import LLM
    from thinfer.calibration.text import cut_windows
    from thinfer.data import evaluation_text
    from thinfer.evals.perplexity import perplexity

    with LLM(reference, **options) as llm:
        windows = cut_windows(llm.tokenizer.encode(evaluation_text(), add_special=False), plan.ctx, plan.windows)
        bos_id = llm.tokenizer.bos_id if llm.tokenizer.adds_bos else None
        return perplexity(llm.engine, windows, bos_id=bos_id, decode=True, progress=progress).to_dict()


def run_demo(model: str, out: Path, options: Mapping[str, Any], plan: DemoPlan, progress: Progress) -> dict[str, Any]:
    """Calibrate, measure quality, then speed in interleaved rounds.

    Returns:
        ``{"plan", "rows", "seconds"}``; a row has configuration, ppl, ppl_stderr, density, bytes_per_token, prefill
        and decode as benchmark rows.
    """
    begin = time.perf_counter()
    chosen = configurations(model, out, options, plan, progress)
    scores = {name: quality(reference, plan, options, progress) for name, reference in chosen.items()}
    tests = [Test("pp", plan.prompt_tokens), Test("tg", plan.decode_tokens)]
    with ExitStack() as open_workers:
        contenders = []
        for reference in chosen.values():
            contenders.append(open_contender(reference, options, tests))
            open_workers.callback(contenders[-1].worker.close)
        speeds = measure(contenders, tests, plan.rounds, progress=progress)
    rows = []
    for index, name in enumerate(chosen):
        prefill, decode = speeds[index], speeds[len(chosen) + index]
        rows.append(
            {
                "configuration": name,
                "ppl": scores[name]["ppl"],
                "ppl_stderr": scores[name]["ppl_stderr"],
                "density": decode["density"],
                "bytes_per_token": decode["bytes_per_token"],
                "prefill": prefill,
                "decode": decode,
            }
        )
    measured = {name: getattr(plan, name) for name in plan.__slots__}
    return {"model": model, "plan": measured, "rows": rows, "seconds": time.perf_counter() - begin}


def as_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The demo's table."""
    head = ["configuration", "perplexity", "density", "MB/token", rows[0]["prefill"]["test"] + " t/s"]
    head.append(rows[0]["decode"]["test"] + " t/s")
    body = [
        [
            row["configuration"],
            f"{row['ppl']:.2f} ± {row['ppl_stderr']:.2f}",
            f"{row['density']:.2f}",
            f"{row['bytes_per_token'] / 1e6:.1f}",
            _speed(row["prefill"]),
            _speed(row["decode"]),
        ]
        for row in rows
    ]
    return table(head, body)


def _speed(row: Mapping[str, Any]) -> str:
    return f"{row['t_s_median']:.1f} ± {row['t_s_stddev']:.1f}"


def save(result: Mapping[str, Any], out: Path, name: str) -> tuple[Path, Path | None]:
    """Write ``demo-NAME.json`` and, where matplotlib is installed, ``demo-NAME.png``; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    data = out / f"demo-{name}.json"
    data.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    try:
        import matplotlib as mpl
    except ImportError:
        return data, None
    mpl.use("Agg")
    picture = out / f"demo-{name}.png"
    plot(result, picture, name)
    return data, picture


def plot(result: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw decode speed with its spread, and perplexity, of every configuration."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    names = [row["configuration"] for row in rows]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    speed, quality_axes = figure.subplots(1, 2)
    panels = [
        (speed, [row["decode"]["t_s_median"] for row in rows], [row["decode"]["t_s_stddev"] for row in rows]),
        (quality_axes, [row["ppl"] for row in rows], [row["ppl_stderr"] for row in rows]),
    ]
    for axes, values, errors in panels:
        bars = axes.bar(names, values, yerr=errors, capsize=4, color="#4477aa", ecolor="#222222", width=0.6)
        axes.bar_label(bars, fmt="%.1f", label_type="center", color="white")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", length=0)
    speed.set_ylabel("decode, tokens a second")
    quality_axes.set_ylabel("perplexity (lower is better)")
    figure.suptitle(f"{title}: {rows[0]['decode']['cpu']}, {rows[0]['decode']['threads']} threads", fontsize=10)
    figure.savefig(path, dpi=150)
