"""What every executor offers: the only things the engine knows about how a node is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from thinfer.core.active_set import ActiveSet
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.batch import Batch

Float32 = NDArray[np.float32]
Observe = Callable[[str, Float32], None]
"""Called with a linear's site and its input [M, width] before the selector acts; the array is only valid inside."""


@dataclass(slots=True)
class LinearCount:
    """What linears read, summed over rows since the last reset.

    Attributes:
        active: input channels that were multiplied, summed over rows.
        total: input channels there are, summed over rows.
        bytes: weight bytes read; a matrix read once for a batch of rows counts once.
        dense_bytes: what the same passes read without thresholds.
        needed: neurons that fired (their output is not 0) in rows where the layer's predictor was checked.
        found: of them those that the predictor named.
    """

    active: int = 0
    total: int = 0
    bytes: int = 0
    dense_bytes: int = 0
    needed: int = 0
    found: int = 0

    def add(self, other: "LinearCount") -> None:
        """Add what other linears, or another executor, read."""
        self.active += other.active
        self.total += other.total
        self.bytes += other.bytes
        self.dense_bytes += other.dense_bytes
        self.needed += other.needed
        self.found += other.found

    def minus(self, before: "LinearCount") -> "LinearCount":
        """What was read since an earlier count."""
        return LinearCount(
            self.active - before.active,
            self.total - before.total,
            self.bytes - before.bytes,
            self.dense_bytes - before.dense_bytes,
            self.needed - before.needed,
            self.found - before.found,
        )


class Executor(Protocol):
    """Runs the nodes of one graph that name it; holds their weights, buffers and keys and values."""

    name: str

    def run(self, batch: Batch, *, observe: Observe | None = None) -> Float32:
        """Run the whole graph; returns logits float32 [L, vocab] of ``batch.out_rows``, valid until the next run."""
        ...

    def run_nodes(
        self,
        first: int,
        last: int,
        batch: Batch,
        inputs: Mapping[str, Float32],
        outputs: Sequence[str],
        *,
        observe: Observe | None = None,
    ) -> dict[str, Float32]:
        """Run nodes ``first`` to ``last - 1`` of the graph: buffers in, buffers out, each float32 [rows, width]."""
        ...

    def set_selector(self, selector: ThresholdSelector | None) -> None:
        """Use these thresholds for sparse rows from now on; None makes every row dense."""
        ...

    def set_active(self, layer: int, active: ActiveSet | None) -> None:
        """Compute only these neurons of a layer's FFN, a group a row of the next batches; None: all of them.

        UsageError for a layer that was not built for lists.
        """
        ...

    def counters(self) -> Mapping[str, LinearCount]:
        """Counts by site ("layers.3.qkv", "lm_head") since the last reset."""
        ...

    def reset_counters(self) -> None:
        """Set all counts to zero."""
        ...

    def describe(self) -> list[str]:
        """Lines for start-up: what was chosen, what it costs, what was ignored."""
        ...

    def close(self) -> None:
        """Release memory and threads; the executor is not used afterwards."""
        ...
