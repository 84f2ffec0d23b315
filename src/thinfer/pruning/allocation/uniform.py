"""Uniform allocation: every matrix takes the same share."""

from __future__ import annotations

from dataclasses import dataclass

from thinfer.pruning.base import ModelView


@dataclass(frozen=True, slots=True)
class Uniform:
    """Gives every matrix the sparsity asked for.

    Example: ``Uniform().rates(view, 0.5)`` is ``{"model.layers.0.self_attn.q_proj": 0.5, ...}``.
    """

    def rates(self, view: ModelView, sparsity: float) -> dict[str, float]:
        """The same sparsity for every matrix of the view."""
        return {name: sparsity for block in view.blocks for name in block}


METHOD = Uniform
