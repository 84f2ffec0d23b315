"""Masks of any module by the size of its weights, alone or given what was pruned before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from thinfer.errors import UsageError
from thinfer.pruning.masks import keep_highest, zero_count
from thinfer.pruning.recovery.masked import Masks

Scope = Literal["global", "layer", "sigma"]
"""What competes: all weights; the weights of one matrix; all weights, each relative to its matrix's deviation."""


def prunable(model: nn.Module, include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[str]:
    """Names of the weights to prune: all trainable parameters of two or more dimensions but embeddings.

    Args:
        model: any module.
        include: patterns with * and ?; a weight must match one of them.
        exclude: patterns of weights to leave dense.

    Raises:
        UsageError: a pattern matches no weight.

    Example: ``prunable(model, exclude=["head.*"])``.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and parameter.requires_grad and id(parameter) not in embeddings
    ]
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"pattern {pattern!r} matches no weight; there are {', '.join(names) or 'none'}")

    def matches(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return [name for name in names if matches(name, include) and not matches(name, exclude)]


def magnitude_masks(
    model: nn.Module,
    sparsity: float,
    scope: Scope = "global",
    names: Sequence[str] | None = None,
    before: Masks | None = None,
) -> Masks:
    """Keep the largest weights; what was pruned before stays pruned.

    "sigma" is the rule of Han et al. 2015 (arxiv.org/abs/1506.02626), which prunes |w| < q · σ of its matrix, with the
    one q that gives the sparsity asked for; σ is that of the weights that are left.

    Args:
        model: any module.
        sparsity: fraction of the named weights together ("layer": of each) that is zero; exactly
            round(sparsity · size) are.
        scope: what competes.
        names: of the weights; None: `prunable(model)`.
        before: masks of an earlier round.

    Returns:
        A mask for every name.

    Raises:
        UsageError: a sparsity outside 0 to 1, or below that of `before`.
        CheckFailed: a weight is NaN or infinite.
    """
    parameters = dict(model.named_parameters())
    names = prunable(model) if names is None else names
    scores = {}
    for name in names:
        weight = parameters[name].detach().float()
        kept = before[name] if before and name in before else torch.ones_like(weight, dtype=torch.bool)
        score = weight.abs()
        if scope == "sigma":
            score = score / weight[kept].std(correction=0).nan_to_num(0).clamp_min(torch.finfo(torch.float32).tiny)
        scores[name] = score.masked_fill(~kept, -1)
    groups = [[name] for name in names] if scope == "layer" else [list(names)]
    masks: Masks = {}
    for group in groups:
        together = torch.cat([scores[name].flatten() for name in group])
        zeros = zero_count(len(together), sparsity)
        if zeros < int((together < 0).sum()):
            raise UsageError(f"sparsity {sparsity:g} is less than what is pruned already; it can only rise")
        parts = torch.split(keep_highest(together[None], zeros)[0], [scores[name].numel() for name in group])
        masks |= {name: part.view_as(scores[name]) for name, part in zip(group, parts, strict=True)}
    return masks
