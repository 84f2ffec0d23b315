"""A graph whose nodes name several executors: cut into segments, independent neighbours run at the same time."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise

import numpy as np

from thinfer.core.active_set import ActiveSet
from thinfer.core.graph import Graph, Segment
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.batch import Batch
from thinfer.engine.executor import Executor, Float32, LinearCount, Observe
from thinfer.errors import UsageError


def cut_segments(graph: Graph) -> list[Segment]:
    """Cut the nodes into consecutive segments of one executor each, so that only buffers pass between them.

    A segment also ends after a node that another executor reads from, and begins anew at a node that reads from
    another executor: so the two halves of a split FFN are neighbours that need nothing of each other.
    """
    makers = {node.output: node.executor for node in graph.nodes}
    readers: dict[str, set[str]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, set()).add(node.executor)
    cuts = [0]
    for index in range(1, len(graph.nodes)):
        before, node = graph.nodes[index - 1], graph.nodes[index]
        given_away = readers.get(before.output, set()) - {before.executor}
        taken_over = any(makers[name] != node.executor for name in node.inputs)
        if before.executor != node.executor or given_away or taken_over:
            cuts.append(index)
    cuts.append(len(graph.nodes))
    segments = []
    for first, last in pairwise(cuts):
        inside = graph.nodes[first:last]
        made = [node.output for node in inside]
        read = [name for node in inside for name in node.inputs if name not in made]
        outside = {name for node in graph.nodes[last:] for name in node.inputs} | {graph.logits}
        segments.append(
            Segment(
                first,
                last,
                inside[0].executor,
                inputs=tuple(dict.fromkeys(read)),
                outputs=tuple(name for name in made if name in outside),
            )
        )
    return segments


def concurrent_stages(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group neighbouring segments that run on different executors and read nothing of each other."""
    stages: list[list[Segment]] = []
    for segment in segments:
        stage = stages[-1] if stages else []
        busy = {other.executor for other in stage}
        made = {name for other in stage for name in other.outputs}
        if stage and segment.executor not in busy and made.isdisjoint(segment.inputs):
            stage.append(segment)
        else:
            stages.append([segment])
    return stages


class HybridExecutor:
    """Runs a graph over several executors; the segments of one stage run on one Python thread each.

    The native executor releases the GIL, so the two halves of a split FFN really overlap. Executors exchange
    buffers only; each holds keys and values of the attention nodes that name it.
    """

    name = "hybrid"

    def __init__(self, graph: Graph, executors: Mapping[str, Executor]) -> None:
        self._graph = graph
        self._executors = dict(executors)
        self._stages = concurrent_stages(cut_segments(graph))
        self._last_use = self._liveness()
        width = max(len(stage) for stage in self._stages)
        self._pool = ThreadPoolExecutor(max_workers=width - 1, thread_name_prefix="segment") if width > 1 else None

    def run(self, batch: Batch, *, observe: Observe | None = None) -> Float32:
        """Run the whole graph; logits float32 [L, vocab] of the rows that ``batch.out_rows`` names."""
        return self.run_nodes(0, len(self._graph.nodes), batch, {}, (self._graph.logits,), observe=observe)[
            self._graph.logits
        ]

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
        """Run the stages inside ``first`` to ``last - 1``, which must lie on borders of segments."""
        buffers = dict(inputs)
        for index, stage in enumerate(self._stages):
            if stage[0].first < first or stage[-1].last > last:
                continue
            made = self._run_stage(stage, batch, buffers, observe)
            for part in made:
                buffers.update(part)
            for name in self._last_use[index]:
                if name not in outputs:
                    buffers.pop(name, None)
        return {name: buffers[name] for name in outputs}

    def set_selector(self, selector: ThresholdSelector | None) -> None:
        """Give the thresholds to every executor."""
        for executor in self._executors.values():
            executor.set_selector(selector)

    def set_active(self, layer: int, active: ActiveSet | None) -> None:
        """Refused: a list of neurons needs a whole FFN on one executor."""
        raise UsageError(f"neurons of layer {layer} cannot be listed: the graph runs on several executors; use one")

    def counters(self) -> dict[str, LinearCount]:
        """Counts of all executors, added by site."""
        total: dict[str, LinearCount] = {}
        for executor in self._executors.values():
            for site, count in executor.counters().items():
                total.setdefault(site, LinearCount()).add(count)
        return total

    def reset_counters(self) -> None:
        """Set the counts of every executor to zero."""
        for executor in self._executors.values():
            executor.reset_counters()

    def describe(self) -> list[str]:
        """What runs where, then the lines of every executor."""
        shares = dict.fromkeys(self._executors, 0)
        for node in self._graph.nodes:
            shares[node.executor] += 1
        together = sum(len(stage) > 1 for stage in self._stages)
        nodes = ", ".join(f"{name} {count} nodes" for name, count in shares.items())
        lines = [f"hybrid    {nodes}; {together} stages run on several executors at once"]
        for executor in self._executors.values():
            lines.extend(executor.describe())
        return lines

    def close(self) -> None:
        """Stop the threads and close every executor."""
        if self._pool is not None:
            self._pool.shutdown()
        for executor in self._executors.values():
            executor.close()

    def _run_stage(
        self, stage: Sequence[Segment], batch: Batch, buffers: Mapping[str, Float32], observe: Observe | None
    ) -> list[dict[str, Float32]]:
        if self._pool is None or len(stage) == 1:
            return [self._run_segment(segment, batch, buffers, observe) for segment in stage]
        others = [self._pool.submit(self._run_segment, segment, batch, buffers, observe) for segment in stage[1:]]
        try:
            made = [self._run_segment(stage[0], batch, buffers, observe)]
        finally:
            # Never leave a segment running: its executor's buffers belong to this step.
            wait(others)
        return made + [other.result() for other in others]

    def _run_segment(
        self, segment: Segment, batch: Batch, buffers: Mapping[str, Float32], observe: Observe | None
    ) -> dict[str, Float32]:
        given = {name: buffers[name] for name in segment.inputs}
        made = self._executors[segment.executor].run_nodes(
            segment.first, segment.last, batch, given, segment.outputs, observe=observe
        )
        # The executor may reuse its memory in its next segment while another one still reads these rows.
        return {name: np.array(value, np.float32) for name, value in made.items()}

    def _liveness(self) -> list[list[str]]:
        """For every stage the buffers that no later stage reads."""
        last: dict[str, int] = {}
        for index, stage in enumerate(self._stages):
            for segment in stage:
                for name in (*segment.inputs, *segment.outputs):
                    last[name] = index
        dead: list[list[str]] = [[] for _ in self._stages]
        for name, index in last.items():
            dead[index].append(name)
        return dead
