"""Measures the pruning methods on real models and writes the table of docs/pruning-results.md.

python scripts/pruning_table.py --model MODEL.gguf --calibration C4.jsonl --text WIKITEXT.txt --tasks FOLDER -o RUNS

Each row is one run of `thinfer prune` through its Python interface. Its figures go to RUNS/results.json as soon as they
are known, and rows that are there already are not run again, so the script can be stopped and started at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinfer import LLM
from thinfer.calibration.text import cut_windows, read_text
from thinfer.evals.local_tasks import load_tasks
from thinfer.evals.tasks import score_tasks
from thinfer.pruning.checkpoint import LoadedModel, load_torch
from thinfer.pruning.quality import torch_perplexity
from thinfer.pruning.recipe import Recipe
from thinfer.pruning.recovery.options import RecoverOptions
from thinfer.pruning.recovery.recover import recover
from thinfer.pruning.run import prune

LEVELS: dict[str, dict[str, Any]] = {
    "30 %": {"sparsity": 0.3},
    "50 %": {"sparsity": 0.5},
    "2:4": {"pattern": "2:4"},
    "4:8": {"pattern": "4:8"},
}
TASKS = ["piqa", "arc_easy"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: what its recipe says beyond the protocol, and what else is done with the result."""

    name: str
    level: str
    recipe: dict[str, Any] = field(default_factory=dict)
    tasks: bool = False
    recovery: bool = False

    @property
    def key(self) -> str:
        """The line in results.json."""
        return f"{self.name} {self.level}".strip()


def rows() -> list[Row]:
    """All lines, the quick and the most wanted first."""
    lines = [Row("dense", "", tasks=True)]
    for level in ("50 %", "30 %", "2:4", "4:8"):
        for method in ("magnitude", "wanda", "ria", "sparsegpt"):
            lines.append(Row(method, level, {"method": method} | LEVELS[level], tasks=level == "50 %"))
    for method in ("llm-pruner", "flap"):
        for level, sparsity in (("10 %", 0.1), ("20 %", 0.2)):
            lines.append(Row(method, level, {"method": method, "sparsity": sparsity}))
    for method in ("wanda", "sparsegpt"):
        for name, extra in (("owl", {"allocation": "owl"}), ("sparseswaps", {"refine": ("sparseswaps",)})):
            recipe = {"method": method, "sparsity": 0.5} | extra
            lines.append(Row(f"{method} + {name}", "50 %", recipe, tasks=True))
    for level in ("50 %", "2:4", "30 %", "4:8"):
        lines.append(Row("alps", level, {"method": "alps"} | LEVELS[level], tasks=level == "50 %"))
    for method in ("llm-pruner", "flap"):
        recipe = {"method": method, "sparsity": 0.2}
        lines.append(Row(f"{method}, recovered", "20 %", recipe, recovery=True))
    return lines


@dataclass(frozen=True, slots=True)
class Protocol:
    """What all lines share."""

    model: str
    calibration: Path
    text: Path
    recovery_text: Path | None
    recovery_tokens: int
    tasks: Path | None
    limit: int
    samples: int
    seqlen: int
    ctx: int
    windows: int
    stride: int

    def perplexity(self, loaded: LoadedModel) -> dict[str, Any]:
        """Perplexity of the evaluation text."""
        ids = loaded.encode(read_text(str(self.text)))
        windows = cut_windows(ids, self.ctx, self.windows, self.stride)
        return torch_perplexity(loaded.model, windows, bos_id=loaded.bos_id).to_dict()

    def accuracy(self, ref: str) -> dict[str, float]:
        """Accuracy on the tasks, run by the engine."""
        if self.tasks is None:
            return {}
        with LLM(ref) as llm:
            scores = score_tasks(llm, load_tasks(TASKS, self.tasks), limit=self.limit)
        return {task.name: task.metrics["acc"] for task in scores.tasks}


def measure(row: Row, protocol: Protocol, out: Path) -> dict[str, Any]:
    """Run one line; the pruned folder is removed again."""
    folder = out / "model"
    shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = {"cpus": os.cpu_count(), "samples": protocol.samples, "seqlen": protocol.seqlen}
    ref = protocol.model
    if row.recipe:
        recipe = Recipe(
            model=protocol.model,
            text=protocol.calibration,
            samples=protocol.samples,
            seqlen=protocol.seqlen,
            dtype="float32",
            save_dtype="float32",
            evaluate=False,
            **row.recipe,
        )
        started = time.perf_counter()
        report = prune(recipe, folder, progress=lambda done, total, what: None)
        result["seconds"] = time.perf_counter() - started
        result["phases"] = report["phases"]
        result["sparsity"] = report["sparsity"]
        result["parameters"] = report["parameters"]
        ref = str(folder)
    result["perplexity"] = protocol.perplexity(load_torch(ref, dtype="float32"))
    if row.tasks:
        result["tasks"] = protocol.accuracy(ref)
    if row.recovery and protocol.recovery_tokens:
        recovered = out / "recovered"
        shutil.rmtree(recovered, ignore_errors=True)
        options = RecoverOptions(method="lora", loss="lm", tokens=protocol.recovery_tokens)
        started = time.perf_counter()
        recover(folder, recovered, options, text=protocol.recovery_text, resume=True)
        result["recovery"] = {
            "tokens": protocol.recovery_tokens,
            "seconds": time.perf_counter() - started,
            "perplexity": protocol.perplexity(load_torch(recovered, dtype="float32")),
        }
        shutil.rmtree(recovered)
    shutil.rmtree(folder, ignore_errors=True)
    return result


def markdown(results: dict[str, Any]) -> str:
    """The table: perplexity by method and level, then what else was measured."""
    dense = results["dense"]["perplexity"]["ppl"]
    lines = ["| method | " + " | ".join(LEVELS) + " |", "| --- |" + " ---: |" * len(LEVELS)]
    names = list(dict.fromkeys(row.name for row in rows() if row.level in LEVELS))
    for name in names:
        cells = [results.get(f"{name} {level}") for level in LEVELS]
        lines.append(f"| {name} | " + " | ".join(f"{c['perplexity']['ppl']:.2f}" if c else "" for c in cells) + " |")
    lines += ["", "| method | parameters cut | perplexity | after recovery |", "| --- | ---: | ---: | ---: |"]
    for row in rows():
        cell = results.get(row.key)
        if cell and row.level in ("10 %", "20 %") and not row.recovery:
            recovered = results.get(f"{row.name}, recovered {row.level}", {}).get("recovery")
            after = f"{recovered['perplexity']['ppl']:.2f}" if recovered else ""
            size = cell["parameters"]
            cut = f"{size['before'] / 1e6:.1f} M to {size['after'] / 1e6:.1f} M"
            lines.append(f"| {row.name} {row.level} | {cut} | {cell['perplexity']['ppl']:.2f} | {after} |")
    lines += ["", "| method, 50 % | perplexity | piqa | arc_easy |", "| --- | ---: | ---: | ---: |"]
    for row in rows():
        cell = results.get(row.key)
        if cell and cell.get("tasks"):
            scores = " | ".join(f"{100 * cell['tasks'][task]:.1f}" for task in TASKS)
            lines.append(f"| {row.name} | {cell['perplexity']['ppl']:.2f} | {scores} |")
    return f"Dense perplexity: {dense:.2f}.\n\n" + "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--recovery-text", type=Path)
    parser.add_argument("--recovery-tokens", type=int, default=100_000)
    parser.add_argument("--tasks", type=Path)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--stride", type=int, default=7)
    parser.add_argument("--only", action="append", default=[], help="run only lines with these names, as 'wanda 50 %%'")
    parser.add_argument("-o", "--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    given = parse()
    out, only = given.out, given.only
    del given.out, given.only
    protocol = Protocol(**vars(given))
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    for row in rows():
        if row.key in results or (only and row.key not in only):
            continue
        results[row.key] = measure(row, protocol, out)
        half = file.with_suffix(".tmp")
        half.write_text(json.dumps(results, indent=1))
        os.replace(half, file)
        print(f"{row.key}: perplexity {results[row.key]['perplexity']['ppl']:.2f}", flush=True)
    (out / "table.md").write_text(markdown(results))


if __name__ == "__main__":
    main()
