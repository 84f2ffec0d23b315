"""Chooses and builds the executor of a graph."""

from importlib.util import find_spec

from thinfer.core.graph import Graph
from thinfer.core.neuron_selector import NeuronSelector
from thinfer.core.selector import ThresholdSelector
from thinfer.engine.executor import Executor
from thinfer.engine.hybrid import HybridExecutor
from thinfer.engine.kv_cache import KvLayout
from thinfer.engine.options import EngineOptions
from thinfer.engine.predictors import PredictedSets
from thinfer.engine.reference import ReferenceExecutor
from thinfer.errors import UnsupportedError
from thinfer.models.loader import Model


def build_executor(
    model: Model,
    graph: Graph,
    layout: KvLayout,
    options: EngineOptions,
    selector: ThresholdSelector | None,
    neurons: NeuronSelector | None = None,
) -> tuple[Executor, list[str]]:
    """The executor that runs the graph with these thresholds and neurons, and lines that say what was chosen.

    With ``options.executor`` "auto" the nodes' own executors are used, and those that name "cpu" run on "reference"
    where the native part was not built; a named executor runs every node. An executor that is not built raises
    UnsupportedError.
    """
    notes: list[str] = []
    names = {node.executor for node in graph.nodes}
    if options.executor != "auto":
        names = {options.executor}
    elif "cpu" in names and find_spec("thinfer._core") is None:
        names = {"reference"}
        notes.append("executor  reference (NumPy, slow): the native part is not built; `make setup` builds it")
    if len(names) > 1 and neurons is not None and neurons.predicts:
        raise UnsupportedError("predictors need all of the graph on one executor; run without them: neurons='off'")
    built = {name: _build_one(name, model, graph, layout, options, selector, neurons) for name in sorted(names)}
    if len(built) == 1:
        return next(iter(built.values())), notes
    return HybridExecutor(graph, built), notes


def _build_one(
    name: str,
    model: Model,
    graph: Graph,
    layout: KvLayout,
    options: EngineOptions,
    selector: ThresholdSelector | None,
    neurons: NeuronSelector | None,
) -> Executor:
    if name == "reference":
        predicted = PredictedSets(neurons, graph) if neurons is not None and neurons.predicts else None
        return ReferenceExecutor(model, layout, graph=graph, selector=selector, predicted=predicted)
    if name != "cpu":
        raise UnsupportedError(f"executor {name!r} is unknown; the executors are cpu, reference")
    if find_spec("thinfer._core") is None:
        raise UnsupportedError("the native executor is not built: run `make setup`, or choose executor reference")
    from thinfer.engine.cpu import CpuExecutor

    return CpuExecutor(model, layout, options, graph=graph, selector=selector, neurons=neurons)
