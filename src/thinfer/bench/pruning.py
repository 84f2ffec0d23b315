"""Pruning runs, timed: each method in a process of its own, against the products that it cannot do without."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinfer.bench.report import Row, short_name, table
from thinfer.bench.worker import Worker

METHODS = ("wanda", "sparsegpt")

_COMMAND = (sys.executable, "-m", "thinfer.bench.pruning_worker")


def measure(
    model: str,
    methods: Sequence[str] = METHODS,
    *,
    samples: int = 32,
    seqlen: int = 512,
    sparsity: float = 0.5,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Prune a model with each method, on the CPU, into a scratch folder that is then removed; a row a method.

    The scratch folder lies where TMPDIR says and takes the size of the result.

    Args:
        model: as for `thinfer.pruning.run.prune`.
        methods: names of methods that zero weights.
        samples: calibration windows, of the text that ships with thinfer.
        seqlen: tokens of a window.
        sparsity: of every matrix.
        threads: of PyTorch; None: its own number.
        progress: told the method.

    Returns:
        Rows of "model", "method", "samples", "seqlen", "sparsity" (counted), "seconds" (loading and saving included),
        "floor_seconds" (see `thinfer.bench.pruning_worker`), "gemm_gflop_s", "phases" (seconds by name),
        "peak_rss_bytes" of the process, "model_bytes" and "block_bytes" (of the largest block) in memory, "threads".

    Raises:
        UsageError: a method that is unknown or removes structures, or a text too short.
        PeerError: a process that ended by itself, as when the system has no memory left.

    Example:
        >>> measure("model.gguf", ["wanda"])[0]["seconds"]  # doctest: +SKIP
        75.2
    """
    rows = []
    for method in methods:
        progress(f"pruning with {method}")
        settings = {"model": model, "method": method, "samples": samples, "seqlen": seqlen, "sparsity": sparsity}
        with (
            tempfile.TemporaryDirectory(prefix="thinfer-bench-prune-") as scratch,
            Worker(_COMMAND, f"thinfer prune --method {method}") as worker,
        ):
            rows.append(worker.prune(settings | {"threads": threads, "out": str(Path(scratch) / "pruned")}))
    return rows


def as_md(rows: Sequence[Row]) -> str:
    """A table of the rows; the three longest phases by their names."""
    head = ["model", "method", "sparsity", "s", "floor s", "x floor", "phases, s", "peak MB", "model MB", "block MB"]
    body = []
    for row in rows:
        longest = sorted(row["phases"].items(), key=lambda item: -item[1])[:3]
        floor = row["floor_seconds"]
        body.append(
            [
                short_name(row["model"]),
                row["method"],
                f"{row['sparsity']:.3f}",
                f"{row['seconds']:.1f}",
                f"{floor:.1f}" if floor else "",
                f"{row['seconds'] / floor:.2f}" if floor else "",
                ", ".join(f"{name} {seconds:.1f}" for name, seconds in longest),
                *(f"{row[name] / 1e6:.0f}" for name in ("peak_rss_bytes", "model_bytes", "block_bytes")),
            ]
        )
    return table(head, body, left=2)
