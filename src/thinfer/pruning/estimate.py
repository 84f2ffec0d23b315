"""Predicts memory, time and size of a pruning run: measures one block with random weights, and multiplies."""

from __future__ import annotations

import copy
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from thinfer.errors import CheckFailed
from thinfer.pruning.blocks import Stack, find_stack
from thinfer.pruning.checkpoint import LoadedModel, load_skeleton, require_device
from thinfer.pruning.phases import Phases
from thinfer.pruning.pipeline import batches_of, check_rates, prune_model
from thinfer.pruning.recipe import Recipe, select_matrices
from thinfer.pruning.run import EVALUATION_WINDOWS, calibration_windows, positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLE_TOKENS = 4096
_SAMPLE_VOCABULARY = 1024
_HEAD_ROWS = 16384
_HEAD_TOKENS = 64
_SCAN_TOKENS = 4096
# Disks differ; this is a slow one of today.
_WRITE_BYTES_PER_SECOND = 300e6
_BACKWARD = 3
"""A forward and a backward pass take about three times a forward pass."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one block took: seconds by phase, tokens run, bytes beyond weights and hidden states, its pruned weights."""

    seconds: dict[str, float]
    tokens: int
    working_bytes: int
    weights: int

    def forward(self, tokens: int, weights: int) -> float:
        """Seconds to run `tokens` through blocks of so many weights."""
        return self.seconds.get("replay", 0.0) * tokens / self.tokens * weights / self.weights


def estimate(recipe: Recipe, *, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Predict what a run will take, without loading the weights.

    One block of the model's shape, with random weights, is pruned on a little random text with the recipe's own method;
    the measured seconds are multiplied by blocks and tokens. Methods whose work depends on the weights may differ.

    Returns:
        "seconds" by phase and in all, "memory_bytes" by what holds them and in all (of the process), "size_bytes" of
        the folder's weights, and "calibration", all ready for JSON.

    Raises:
        UsageError, CheckpointError, UnsupportedError: as the run itself would.

    Example:
        >>> estimate(Recipe(model="model.gguf", sparsity=0.5))["seconds"]["total"]  # doctest: +SKIP
        95.0
    """
    require_device(recipe.device)
    progress("reading the configuration")
    loaded = load_skeleton(str(recipe.model), dtype=recipe.dtype, device=recipe.device)
    model = loaded.model
    stack = find_stack(model)
    names = select_matrices(stack.matrices, recipe.target, recipe.ignore)
    check_rates(stack, dict.fromkeys(names, recipe.target_sparsity), recipe.sparsity_pattern)
    block_weights = sum(matrix.size for matrix in stack.matrices.values())
    pruned_weights = sum(stack.matrices[name].size for name in names)
    tokens, windows = _calibration_tokens(recipe, loaded)
    progress("measuring one block with random weights")
    sample = _measure(recipe, model, windows or min(recipe.seqlen, 512))
    seconds = _seconds(recipe, loaded, stack, sample, tokens, pruned_weights, block_weights)
    seconds["total"] = sum(seconds.values())
    parameters = model.num_parameters()
    save_dtype = recipe.save_dtype if recipe.save_dtype != "auto" else loaded.save_dtype
    left = parameters - (round(recipe.target_sparsity * block_weights) if recipe.structured else 0)
    memory = _memory(recipe, model, sample, tokens)
    memory["total"] = sum(memory.values())
    return {
        "model": {"ref": loaded.ref, "parameters": parameters, "in_blocks": block_weights, "to_prune": pruned_weights},
        "calibration": {"tokens": tokens, "seqlen": windows},
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "memory_bytes": memory,
        "size_bytes": left * getattr(torch, save_dtype).itemsize,
        "save_dtype": save_dtype,
        "measured": {"tokens": sample.tokens, "seconds_of_one_block": sample.seconds},
    }


def _calibration_tokens(recipe: Recipe, loaded: LoadedModel) -> tuple[int, int]:
    """Tokens of all windows and of one; 0 where nothing is observed."""
    if not recipe.structured and recipe.allocation == "uniform":
        parts = [recipe.make_method(), *recipe.make_refinements()]
        if not any(part.needs for part in parts):
            return 0, 0
    windows = calibration_windows(recipe, loaded)
    return windows.tokens, windows.length


def _measure(recipe: Recipe, model: PreTrainedModel, seqlen: int) -> _Sample:
    """Prune one block of the model's shape; structured methods are measured by what a plain method runs."""
    from thinfer.pruning.base import make

    config = one_block(model.config)
    small: Any = type(model)(config)
    small.to(model.dtype)
    small.train(False)
    count = max(2, _SAMPLE_TOKENS // seqlen)
    ids = torch.randint(0, _SAMPLE_VOCABULARY, (count, seqlen), generator=torch.Generator().manual_seed(0))
    stack = find_stack(small)
    rates = dict.fromkeys(stack.matrices, recipe.target_sparsity)
    method = make("wanda") if recipe.structured else recipe.make_method()
    # First calls start threads and import parts.
    prune_model(copy.deepcopy(small), ids[:1, :32], dict.fromkeys(rates, 0.0), method=make("wanda"))
    before = _resident_bytes()
    phases = Phases(recipe.device)
    try:
        with phases.measure("all"):
            result = prune_model(
                small,
                ids,
                rates,
                method=method,
                refinements=recipe.make_refinements(),
                pattern=recipe.sparsity_pattern,
                true_sequential=recipe.true_sequential,
                device=recipe.device,
            )
        peak = int(phases.to_dict()["all"]["peak_bytes"])
        seconds = {name: float(facts["seconds"]) for name, facts in result.phases.items()}
        peak = max([peak, *(int(facts["peak_bytes"]) for facts in result.phases.values())])
    except CheckFailed:
        # Random weights may give a method nothing to work on; what it costs is then not known.
        seconds, peak = {}, before
    base: Any = small.base_model
    base.to(recipe.device)
    # Pruning runs a block again only for the next one, and here there is none.
    started = time.perf_counter()
    with torch.inference_mode():
        for window in batches_of(ids):
            base(input_ids=window.to(recipe.device), use_cache=False)
    seconds["replay"] = time.perf_counter() - started
    hidden = ids.numel() * _width(config) * model.dtype.itemsize
    weights = sum(matrix.size for matrix in stack.matrices.values())
    return _Sample(seconds, ids.numel(), max(0, peak - before - hidden), weights)


def one_block(config: Any) -> Any:
    """The configuration with one block and few tokens in its vocabulary."""
    config = copy.deepcopy(config)
    layers = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers and layers > 1:
            setattr(config, name, value[:1])
    config.num_hidden_layers = 1
    config.vocab_size = _SAMPLE_VOCABULARY
    config.pad_token_id = None
    return config


def _seconds(
    recipe: Recipe,
    loaded: LoadedModel,
    stack: Stack,
    sample: _Sample,
    tokens: int,
    pruned_weights: int,
    block_weights: int,
) -> dict[str, float]:
    share = pruned_weights / sample.weights
    per_token = tokens / sample.tokens
    seconds = {"load": _load_seconds(loaded)}
    if recipe.evaluate:
        limit = positions(loaded.model) or recipe.eval_ctx
        scored = min(recipe.eval_ctx, limit) * (recipe.eval_windows or EVALUATION_WINDOWS)
        forward = sample.forward(scored, block_weights) + _head_seconds(loaded.model, scored)
        seconds["evaluate"] = 2 * forward
    statistics = sample.seconds.get("statistics", 0.0) * per_token * share
    if recipe.structured:
        method = recipe.make_method()
        own = getattr(method, "samples", None)
        # A method that needs gradients says how much text it takes; the others run all windows once.
        run = _BACKWARD * own * method.tokens if own is not None else tokens
        seconds["prune"] = sample.forward(run, block_weights)
    else:
        prune = sample.seconds.get("prune", 0.0) * share
        if recipe.allocation == "sensitivity":
            probes = len(recipe.make_allocation().probes)
            kinds = len({matrix.kind for matrix in stack.matrices.values()})
            scan = sample.forward(_SCAN_TOKENS, block_weights) + _head_seconds(loaded.model, _SCAN_TOKENS)
            seconds["allocate"] = statistics + probes * (kinds * scan + prune)
        elif recipe.allocation != "uniform":
            seconds["allocate"] = statistics
        # The last block need not run again.
        rest = 1 - 1 / len(stack.blocks)
        seconds["capture"] = sample.seconds.get("capture", 0.0) * per_token
        seconds["statistics"] = statistics
        seconds["prune"] = prune
        seconds["replay"] = sample.forward(tokens, block_weights) * rest
    size = loaded.model.num_parameters() * getattr(torch, loaded.save_dtype).itemsize
    seconds["save"] = size / _WRITE_BYTES_PER_SECOND
    return seconds


def _memory(recipe: Recipe, model: PreTrainedModel, sample: _Sample, tokens: int) -> dict[str, int]:
    weights = model.num_parameters() * model.dtype.itemsize
    memory = {"process": _resident_bytes(), "model": weights}
    hidden = tokens * _width(model.config) * model.dtype.itemsize
    if recipe.structured:
        gradients = hasattr(recipe.make_method(), "samples")
        work = 2 * weights if gradients else sample.working_bytes
    else:
        work = hidden + sample.working_bytes
    if recipe.evaluate:
        # Logits of a window, once more while its losses are summed.
        logits = min(recipe.eval_ctx, positions(model) or recipe.eval_ctx) * model.config.vocab_size
        work = max(work, 2 * logits * model.dtype.itemsize)
    memory["hidden_states_and_statistics"] = work
    return memory


def _load_seconds(loaded: LoadedModel) -> float:
    """Seconds to read and decode all tensors, from those of the largest ones up to about 20 million weights."""
    checkpoint = loaded.checkpoint
    ordered = sorted(checkpoint.tensors.values(), key=lambda info: -info.nbytes)
    total = sum(info.nbytes for info in ordered)
    read, started = 0, time.perf_counter()
    for info in ordered[:4]:
        checkpoint.decode(info.name)
        checkpoint.release(info.name)
        read += info.nbytes
    return (time.perf_counter() - started) * total / max(1, read)


def _head_seconds(model: PreTrainedModel, tokens: int) -> float:
    """Seconds for logits and losses of `tokens`."""
    width, rows = _width(model.config), min(_HEAD_ROWS, model.config.vocab_size)
    states, head = torch.randn(_HEAD_TOKENS, width), torch.randn(rows, width)
    targets = torch.zeros(_HEAD_TOKENS, dtype=torch.long)
    started = time.perf_counter()
    functional.cross_entropy(functional.linear(states, head).double(), targets)
    seconds = time.perf_counter() - started
    return float(seconds * tokens / _HEAD_TOKENS * model.config.vocab_size / rows)


def _width(config: Any) -> int:
    return int(config.hidden_size)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
