"""Recording: what predictors learn from, written to the scratch disk by one dense run of the engine."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from thinfer.activation.contextual import top_share
from thinfer.activation.profile import head_grams, head_norms
from thinfer.activation.scores import Float32, block_sites, column_norms
from thinfer.core.graph import Graph, Node
from thinfer.core.predictor import Target
from thinfer.engine.batch import Batch
from thinfer.engine.finite import require_numbers
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import ResourceError, UsageError

Progress = Callable[[str], None]
Bool = NDArray[np.bool_]
# Fewer exact zeros than this are accidents of rounding: such a model has nothing to predict.
_LEAST_ZEROS = 0.05


@dataclass(frozen=True, slots=True)
class Task:
    """One predictor to train.

    Attributes:
        target: "neurons" or "heads".
        layer: whose.
        aim: site where they are left out ("layers.3.down", "layers.3.o").
        own: site of the linear that makes them ("layers.3.gate_up", "layers.3.qkv").
        source: site whose input the predictor reads: `own`, or that of an earlier layer.
        inputs: width of that input.
        outputs: number of neurons or heads.
    """

    target: Target
    layer: int
    aim: str
    own: str
    source: str
    inputs: int
    outputs: int


def make_tasks(
    graph: Graph, heads: int, targets: Sequence[Target], lookahead: int, layers: Sequence[int] | None
) -> list[Task]:
    """The predictors of a model, by layer; the first ``lookahead`` layers read their own input.

    Raises UsageError for a layer that the model has not.
    """
    linears = {node.attrs["site"]: node for node in graph.nodes if node.op == "linear"}
    makers = {node.output: node for node in graph.nodes}
    found: dict[tuple[Target, int], tuple[Node, Node]] = {}
    kinds: dict[str, Target] = {"down": "neurons", "o": "heads"}
    for node in linears.values():
        target = kinds.get(node.attrs["kind"])
        if target is not None:
            found[target, node.attrs["layer"]] = (node, _maker(node, makers))
    count = 1 + max(layer for _, layer in found)
    wanted = range(count) if layers is None else sorted(set(layers))
    unknown = [layer for layer in wanted if not 0 <= layer < count]
    if unknown:
        raise UsageError(f"layer {unknown[0]} is not there; the model has layers 0 to {count - 1}")
    tasks = []
    for layer in wanted:
        for target in targets:
            aim, own = found[target, layer]
            _, source = found[target, layer - lookahead if layer >= lookahead else layer]
            outputs = heads if target == "heads" else graph.buffers[aim.inputs[0]]
            width = graph.buffers[source.inputs[0]]
            sites = (aim.attrs["site"], own.attrs["site"], source.attrs["site"])
            tasks.append(Task(target, layer, *sites, width, outputs))
    return tasks


def _maker(node: Node, makers: Mapping[str, Node]) -> Node:
    """The linear from which this one's input is made without another linear between."""
    before = makers[node.inputs[0]]
    while before.op != "linear":
        before = makers[before.inputs[0]]
    return before


class Recording:
    """Inputs and labels of all tasks, on disk; windows follow each other without their sink tokens.

    The files have no name: nothing stays behind, however the process ends. Use it in a `with` block.

    Attributes:
        tokens: rows recorded.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: Sequence[Task],
        *,
        label_share: float | None,
        head_share: float,
        sink_tokens: int,
    ) -> None:
        """Prepare to record.

        Args:
            engine: the model, which runs dense.
            tasks: what will be trained.
            label_share: neurons needed are the share of the largest by what they add; None: those that are not 0.
            head_share: heads needed are this share of the largest by what they add.
            sink_tokens: first positions of each window that are left out.
        """
        self.tokens = 0
        self._engine = engine
        self._stack = ExitStack()
        self._files: dict[tuple[str, str], IO[bytes]] = {}
        self._shares = {"neurons": label_share, "heads": head_share}
        self._sinks = sink_tokens
        model = engine.model
        sites = {site.name: site for site in block_sites(model, engine.graph)}
        self._aims = {task.aim: task for task in tasks}
        self._inputs = {site for task in tasks for site in (task.source, task.own)}
        self._widths = {site: sites[site].channels for site in self._inputs}
        self._scales: dict[str, Float32] = {}
        for task in tasks:
            if task.target == "heads":
                self._scales[task.aim] = head_grams(model, sites[task.aim], task.outputs)
            elif label_share is not None:
                self._scales[task.aim] = column_norms(model, sites[task.aim])

    def nbytes(self, tokens: int) -> int:
        """Bytes that recording so many tokens takes on the disk."""
        labels = sum(-(-task.outputs // 8) for task in self._aims.values())
        return tokens * (2 * sum(self._widths.values()) + labels)

    def run(self, windows: Sequence[Sequence[int]], progress: Progress) -> None:
        """Record these windows; ResourceError when the scratch disk has too little room.

        UsageError when the neurons have next to no exact zeros and no label_share was given; CheckFailed when an
        activation is NaN.
        """
        needed = self.nbytes(sum(map(len, windows)))
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ResourceError(
                f"recording takes {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; "
                "take fewer tokens, or set TMPDIR to a larger disk"
            )
        for number, window in enumerate(windows, 1):
            progress(f"recording window {number} of {len(windows)}")
            sequence = self._engine.new_sequence()
            try:
                self._engine.step([Work(sequence, window, "none")], observe=self._observe)
            finally:
                self._engine.free(sequence)
            self.tokens += max(len(window) - self._sinks, 0)
        for file in self._files.values():
            file.flush()
        self._check_zeros()

    def inputs(self, site: str) -> NDArray[np.float16]:
        """What the linear at this site read, float16 [tokens, width], mapped from the disk."""
        return self._mapped(site, "x", np.float16)

    def labels(self, task: Task) -> Bool:
        """What the task's layer needed, bool [tokens, outputs]."""
        return np.unpackbits(self._mapped(task.aim, "y", np.uint8), axis=1, count=task.outputs).astype(bool)

    def close(self) -> None:
        """Give the disk space back, once no array of `inputs` is left; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _observe(self, batch: Batch, site: str, x: Float32) -> None:
        rows = batch.positions >= self._sinks
        if site in self._inputs or site in self._aims:
            require_numbers(x, f"the input of {site}")
        if site in self._inputs:
            # Activations beyond float16 are clipped: they are far on their side of any threshold.
            self._write(site, "x", np.clip(x[rows], -65504, 65504).astype(np.float16))
        task = self._aims.get(site)
        if task is not None:
            self._write(site, "y", np.packbits(self._needed(task, x[rows]), axis=1))

    def _needed(self, task: Task, x: Float32) -> Bool:
        share = self._shares[task.target]
        if share is None:
            return np.asarray(x != 0)
        scale = self._scales[task.aim]
        return top_share(head_norms(x, scale) if task.target == "heads" else np.abs(x) * scale, share)

    def _check_zeros(self) -> None:
        neurons = [task for task in self._aims.values() if task.target == "neurons"]
        if self._shares["neurons"] is not None or not neurons:
            return
        fired = float(np.mean([self.labels(task).mean() for task in neurons]))
        if fired > 1 - _LEAST_ZEROS:
            raise UsageError(
                f"{fired:.1%} of the activations are not zero: this model has no sparse neurons to predict; name the "
                "share to keep with --label-share 0.3, or make it sparse with thinfer relufy"
            )

    def _write(self, site: str, kind: str, rows: NDArray[Any]) -> None:
        if (site, kind) not in self._files:
            file = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (close does it)
            self._files[site, kind] = file
        self._files[site, kind].write(rows.tobytes())

    def _mapped(self, site: str, kind: str, dtype: type[Any]) -> NDArray[Any]:
        """All rows of one file; mapping leaves its position at the end, where writing goes on."""
        return np.asarray(np.memmap(self._files[site, kind], dtype, "r")).reshape(self.tokens, -1)
