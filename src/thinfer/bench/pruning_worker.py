"""The other end of a `Worker` that prunes: ``python -m thinfer.bench.pruning_worker``, one run a process.

The floor is what the passes over the calibration text must multiply, at the rate that this machine reaches on a float32
product of the model's own largest matrix: every block runs once dense up to the last input of a matrix, for its
statistics, and once pruned, for the next block (the last one does not), with the causal half of its attention; methods
that ask for Gram matrices sum the half of each. What a method computes from these sums is not in it, nor are loading
and saving.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinfer.bench.worker import peak_rss_bytes, serve
from thinfer.errors import UsageError

if TYPE_CHECKING:
    from thinfer.pruning.blocks import Stack
    from thinfer.pruning.recipe import Recipe

_ROWS = 2048
"""Rows of the timed product, as many as a pruning run multiplies together."""
_REPEATS = 5
_TRACED = 16


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Prune as `thinfer.bench.pruning.measure` says; its row."""
    from thinfer.pruning.checkpoint import load_skeleton, require_torch

    require_torch()
    import torch

    from thinfer.pruning.blocks import find_stack
    from thinfer.pruning.recipe import make_recipe
    from thinfer.pruning.run import prune

    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    chosen = {name: request[name] for name in ("model", "method", "samples", "seqlen", "sparsity")}
    recipe = make_recipe({**chosen, "dtype": "float32", "evaluate": False})
    if recipe.structured:
        raise UsageError(f"--method {recipe.method} removes structures; bench prune times methods that zero weights")
    skeleton = load_skeleton(request["model"], dtype="float32").model
    stack = find_stack(skeleton)
    block_bytes = max(sum(p.nbytes for p in block.module.parameters()) for block in stack.blocks)
    largest = max((matrix.shape for matrix in stack.matrices.values()), key=lambda shape: shape[0] * shape[1])
    before = gemm_rate(*largest)
    started = time.perf_counter()
    report = prune(recipe, Path(request["out"]))
    seconds = time.perf_counter() - started
    # Phases start the system's own peak anew; the last one goes on through the saving.
    peak = max([peak_rss_bytes(), *(int(facts["peak_bytes"]) for facts in report["phases"].values())])
    rate = max(before, gemm_rate(*largest))
    windows = report.get("calibration", {"samples": 0, "seqlen": 0})
    operations = floor_operations(recipe, skeleton, stack, windows["samples"], windows["seqlen"])
    return {
        **chosen,
        "samples": windows["samples"],
        "seqlen": windows["seqlen"],
        "sparsity": report["sparsity"],
        "seconds": seconds,
        "floor_seconds": operations / rate,
        "gemm_gflop_s": rate / 1e9,
        "phases": {name: float(facts["seconds"]) for name, facts in report["phases"].items()},
        "peak_rss_bytes": peak,
        "model_bytes": sum(parameter.nbytes for parameter in skeleton.parameters()),
        "block_bytes": block_bytes,
        "threads": torch.get_num_threads(),
    }


def gemm_rate(outputs: int, inputs: int) -> float:
    """Operations a second of a float32 product with a matrix [outputs, inputs], the best of a few."""
    import torch

    x, weight = torch.randn(_ROWS, inputs), torch.randn(outputs, inputs)
    best = float("inf")
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - started)
    return 2.0 * _ROWS * inputs * outputs / best


def floor_operations(recipe: Recipe, model: Any, stack: Stack, samples: int, seqlen: int) -> float:
    """Operations of the passes over `samples` windows of `seqlen` tokens; matrices of experts, where few run, count 0.

    Args:
        recipe: its method says what is summed.
        model: the shapes.
        stack: of the model.
        samples: 0 where no text is run.
        seqlen: tokens of a window.
    """
    import torch

    from thinfer.pruning.blocks import find_stack
    from thinfer.pruning.estimate import one_block
    from thinfer.pruning.replay import trace_blocks

    if not samples:
        return 0.0
    tokens, config = samples * seqlen, model.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = 2.0 * tokens * seqlen * width
    small: Any = type(model)(one_block(config))
    small.train(False)
    sample = find_stack(small)
    with torch.no_grad():
        (trace,) = trace_blocks(small, sample, torch.zeros(1, _TRACED, dtype=torch.long))
    shapes = {matrix.name: matrix.shape for matrix in sample.blocks[0].matrices}
    # A run for statistics ends when the last input has been seen, before it is multiplied.
    unused = sum(outputs * inputs for outputs, inputs in (shapes[name] for name in trace.inputs[-1]))
    total = 0.0
    for block in stack.blocks:
        counts = Counter(matrix.kind for matrix in block.matrices)
        dense = sum(matrix.size for matrix in block.matrices if counts[matrix.kind] == 1)
        total += 2.0 * tokens * max(0, dense - unused) + attention
        if block is not stack.blocks[-1]:
            total += 2.0 * tokens * dense + attention
    if "gram" in recipe.make_method().needs:
        # n² multiplications and additions for the half of a symmetric matrix, of each distinct input.
        total += len(stack.blocks) * sum(float(tokens) * shapes[names[0]][1] ** 2 for names in trace.inputs)
    return total


if __name__ == "__main__":
    serve(run)
