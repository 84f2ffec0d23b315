"""ActiveSet: which indices of an axis are needed now, the one type of every dynamic sparsity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinfer.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class ActiveSet:
    """Ascending indices of an axis for each of some groups (rows of a batch, experts); the others are not needed.

    Group r needs `ids[offsets[r]:offsets[r + 1]]`. A kernel may read the union of all groups once: what group r does
    not name is masked there. Raises UsageError when the arrays do not describe that.

    Attributes:
        size: indices of the axis; ids are below it.
        ids: int32 [n].
        offsets: int32 [groups + 1], from 0 to n.
        weights: float32 [n] factors of the ids, as a router gives them; None: 1.

    Example: `ActiveSet.of([[0, 7], [7]], size=8).union().tolist()` is `[0, 7]`.
    """

    size: int
    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        ids, offsets = self.ids, self.offsets
        if ids.dtype != np.int32 or offsets.dtype != np.int32 or ids.ndim != 1 or offsets.ndim != 1:
            raise UsageError("active set: ids and offsets must be int32 with one dimension")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
            raise UsageError(f"active set: offsets must rise from 0 to the number of ids, {len(ids)}")
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.size):
            raise UsageError(f"active set: ids must lie in 0..{self.size - 1}")
        falls = np.diff(ids) <= 0
        falls[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(ids))] - 1] = False
        if falls.any():
            raise UsageError("active set: the ids of a group must ascend, each once")
        if self.weights is not None and self.weights.shape != ids.shape:
            raise UsageError("active set: weights need one value an id")

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], size: int) -> ActiveSet:
        """The set of these ids, a sequence a group."""
        ids = [np.asarray(group, np.int32) for group in groups]
        return cls(size, np.concatenate([np.empty(0, np.int32), *ids]), _offsets([len(group) for group in groups]))

    @classmethod
    def all(cls, size: int, groups: int = 1) -> ActiveSet:
        """Every index for every group: dense execution."""
        return cls(size, np.tile(np.arange(size, dtype=np.int32), groups), _offsets([size] * groups))

    @classmethod
    def where(cls, needed: NDArray[np.bool_]) -> ActiveSet:
        """The indices that are True in each row of `needed` [groups, size]."""
        rows, ids = np.nonzero(needed)
        counts = np.bincount(rows, minlength=len(needed)).tolist()
        return cls(needed.shape[1], ids.astype(np.int32), _offsets(counts))

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.offsets) - 1

    @property
    def density(self) -> float:
        """Needed part of the axis, the mean over groups; 1 without groups."""
        return len(self.ids) / (self.groups * self.size) if self.groups else 1.0

    def group(self, index: int) -> NDArray[np.int32]:
        """The ids of one group."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def union(self) -> NDArray[np.int32]:
        """Ascending ids that any group needs."""
        return np.unique(self.ids)

    def mask(self) -> NDArray[np.bool_]:
        """Bool [groups, size]: what each group needs."""
        needed = np.zeros((self.groups, self.size), np.bool_)
        needed[np.repeat(np.arange(self.groups), np.diff(self.offsets)), self.ids] = True
        return needed

    def intersection(self, other: ActiveSet) -> ActiveSet:
        """What both need, group by group; UsageError when sizes or groups differ. Weights are dropped."""
        if (self.size, self.groups) != (other.size, other.groups):
            raise UsageError("active set: only sets over the same axis and groups can be intersected")
        return ActiveSet.where(self.mask() & other.mask())


def _offsets(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int32)
