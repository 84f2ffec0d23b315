"""Counts the zeros of a stored model and checks its pattern; needs neither PyTorch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckpointError
from thinfer.formats.checkpoint import Checkpoint, open_checkpoint
from thinfer.formats.json_file import read_json

REPORT_FILE = "report.json"

_COMMON = ("2:4", "4:8")
# A matrix of a block has the block's number in its name; embeddings and heads have none.
_IN_BLOCK = re.compile(r"(^|\.)\d+\.")


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """One weight matrix: its zeros counted, and whether it follows the pattern."""

    name: str
    shape: tuple[int, ...]
    zeros: int
    pattern_ok: bool

    @property
    def size(self) -> int:
        """Number of weights."""
        return int(np.prod(self.shape))


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a report says of a tensor: its zeros, if it says, and whether it is stored as [inputs, outputs]."""

    zeros: int | None
    transposed: bool


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found.

    Attributes:
        tensors: the pruned matrices, or where the folder does not say which, all matrices of blocks.
        pattern: the pattern they were checked for, or the one that was found.
        problems: what is not as the report of the folder or the caller says, in words; empty when all is well.
    """

    tensors: tuple[TensorCheck, ...]
    pattern: SparsityPattern
    problems: tuple[str, ...]

    @property
    def sparsity(self) -> float:
        """Zeros of all the matrices together over their weights."""
        return sum(check.zeros for check in self.tensors) / max(1, sum(check.size for check in self.tensors))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: "tensors" (name, shape, sparsity, pattern_ok), "sparsity" and "pattern"."""
        rows = [
            {
                "name": check.name,
                "shape": list(check.shape),
                "sparsity": check.zeros / max(1, check.size),
                "pattern_ok": check.pattern_ok,
            }
            for check in self.tensors
        ]
        return {"tensors": rows, "sparsity": self.sparsity, "pattern": str(self.pattern)}


def verify(ref: str | Path, pattern: SparsityPattern | None = None) -> Verification:
    """Count the zeros of every pruned matrix of a stored model and check its pattern.

    Args:
        ref: a folder that `thinfer prune` wrote, any other Hugging Face folder, or a GGUF file.
        pattern: what must hold; None: what the folder's report says, else the n:m that all matrices follow, if any.

    Raises:
        CheckpointError: the model is missing or corrupt, or has no matrices in blocks.

    Example:
        >>> verify("pruned").sparsity  # doctest: +SKIP
        0.5
    """
    checkpoint = open_checkpoint(ref)
    report = _report(checkpoint)
    pruned = report.get("matrices")
    expected_facts = _tensors(checkpoint, pruned if isinstance(pruned, Mapping) else {})
    if not expected_facts:
        raise CheckpointError(f"{ref}: no weight matrices in numbered blocks; is it a decoder?")
    said = report.get("pattern")
    expected = pattern or (SparsityPattern.parse(said) if isinstance(said, str) else None)
    candidates = [expected] if expected else [SparsityPattern.parse(text) for text in _COMMON]
    counted = [_count(checkpoint, name, facts, candidates) for name, facts in expected_facts.items()]
    held = [found for found in candidates if all(followed[str(found)] for _, _, _, followed in counted)]
    result = expected or (held[0] if held else SparsityPattern())
    checks = tuple(
        TensorCheck(name, shape, zeros, followed.get(str(result), True)) for name, shape, zeros, followed in counted
    )
    problems = [f"{check.name} does not follow {result}" for check in checks if not check.pattern_ok]
    for check in checks:
        zeros = expected_facts[check.name].zeros
        if zeros is not None and zeros != check.zeros:
            problems.append(f"{check.name} has {check.zeros} zeros, its report says {zeros}: it was changed since")
    return Verification(checks, result, tuple(problems))


def follows(values: NDArray[Any], pattern: SparsityPattern) -> bool:
    """Whether of each m values in a row of the last axis at most n differ from zero; always, when unstructured.

    Example:
        >>> follows(np.array([[1.0, 0.0, 0.0, 2.0]]), SparsityPattern(2, 4))
        True
    """
    if not pattern.structured:
        return True
    if values.shape[-1] % pattern.m:
        return False
    groups = (values != 0).reshape(-1, pattern.m)
    return bool(np.all(groups.sum(axis=1) <= pattern.n))


def _report(checkpoint: Checkpoint) -> dict[str, object]:
    folder = checkpoint.path if checkpoint.kind == "hf" else checkpoint.path.parent
    file = folder / REPORT_FILE
    return read_json(file) if checkpoint.kind == "hf" and file.is_file() else {}


def _tensors(checkpoint: Checkpoint, told: Mapping[str, Any]) -> dict[str, _Facts]:
    """Stored tensors to look at, with what the report says of each."""
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for name, facts in told.items():
        # The experts of one fused tensor are told one by one, with their index.
        parts.setdefault(name.partition("[")[0], []).append(facts if isinstance(facts, Mapping) else {})
    found: dict[str, _Facts] = {}
    missing = not told
    for name, all_facts in parts.items():
        stored = next((tensor for tensor in (f"{name}.weight", name) if tensor in checkpoint.tensors), None)
        if stored is None:
            missing = True
            continue
        shape = checkpoint.tensors[stored].shape
        zeros = [facts.get("zeros") for facts in all_facts]
        whole = len(zeros) == (shape[0] if len(shape) > 2 else 1) and all(isinstance(count, int) for count in zeros)
        across = any(facts.get("transposed") is True for facts in all_facts)
        found[stored] = _Facts(sum(count or 0 for count in zeros) if whole else None, across)
    if not missing:
        return found
    # Experts that a model holds fused may be stored one by one under other names.
    return found | {
        info.name: _Facts(None, False)
        for info in checkpoint.tensors.values()
        if info.name not in found
        and len(info.shape) > 1
        and _IN_BLOCK.search(info.name)
        and ("experts." in info.name if told else _is_weight(info.name))
    }


def _is_weight(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name


def _count(
    checkpoint: Checkpoint, name: str, facts: _Facts, patterns: list[SparsityPattern]
) -> tuple[str, tuple[int, ...], int, dict[str, bool]]:
    try:
        values = checkpoint.decode(name)
    finally:
        checkpoint.release(name)
    # Some layers store [inputs, outputs]; patterns run along the inputs.
    along = values.swapaxes(-1, -2) if facts.transposed else values
    followed = {str(pattern): follows(along, pattern) for pattern in patterns}
    return name, tuple(values.shape), int(values.size - np.count_nonzero(values)), followed
