"""What a refinement may start from."""

from __future__ import annotations

from thinfer.errors import UsageError
from thinfer.pruning.base import Pruned


def refuse_quantised(pruned: Pruned) -> None:
    """UsageError for a matrix whose kept weights were rounded: new values would not lie on their grid."""
    if "bits" in pruned.notes:
        raise UsageError("a refinement cannot follow quantisation: it changes weights; leave bits out, or --refine")
