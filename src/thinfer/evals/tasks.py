"""Accuracy on multiple-choice and last-word tasks, through lm-eval, from local files."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from thinfer.errors import UsageError
from thinfer.evals.local_tasks import LocalTask

if TYPE_CHECKING:
    from thinfer.engine.llm import LLM

_JOINED = {
    "choices": "query + ' ' + choice",
    "contexts": "context option + ' ' + continuation",
    "last word": "context + ' ' + word",
}


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The result of one task.

    Attributes:
        name: The task.
        metrics: lm-eval's: acc; acc_norm, in which a choice's log-likelihood counts per character; perplexity of the
            last word; with _stderr the standard error of each mean.
        scored: Documents that were scored, from the start of the file.
        documents: Documents in the file.
        source: Name of the file.
        sha256: Hash of its bytes.
        prompt: How the fields of a document are joined.
        example: The first document as it is scored: what stands before, and what is scored.
    """

    name: str
    metrics: Mapping[str, float]
    scored: int
    documents: int
    source: str
    sha256: str
    prompt: str
    example: tuple[str, str]


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The results of all tasks; `mean_acc` is the plain mean of their acc.

    Attributes:
        tasks: One result each.
        limit: Most documents of a task; None: all.
        bos: Whether BOS stands before every text.
        truncated: Continuations whose context was cut at its beginning to fit.
        seconds: Wall time of the scoring.
        harness: Name and version of what computed the metrics.
    """

    tasks: tuple[TaskScore, ...]
    limit: int | None
    bos: bool
    truncated: int
    seconds: float
    harness: str

    @property
    def mean_acc(self) -> float:
        """Plain mean of the tasks' accuracies, between 0 and 1."""
        return sum(task.metrics["acc"] for task in self.tasks) / len(self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """The results, ready for JSON."""
        results = {
            task.name: {
                **task.metrics,
                "scored": task.scored,
                "documents": task.documents,
                "source": task.source,
                "sha256": task.sha256,
                "prompt": task.prompt,
                "example": list(task.example),
            }
            for task in self.tasks
        }
        facts = {name: getattr(self, name) for name in ("limit", "bos", "truncated", "seconds", "harness")}
        return {"results": results, "mean_acc": self.mean_acc, "num_fewshot": 0, **facts}


def require_harness() -> str:
    """Name and version of lm-eval; UsageError when it is not installed."""
    try:
        return f"lm-eval {version('lm-eval')}"
    except PackageNotFoundError:
        raise UsageError("eval tasks needs lm-eval: pip install 'thinfer[eval]'") from None


def score_tasks(
    llm: "LLM",
    tasks: Sequence[LocalTask],
    *,
    limit: int | None = None,
    decode: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> TaskScores:
    """Score a model on tasks, without examples in the prompt.

    Args:
        llm: The model; the caller closes it.
        tasks: From `load_tasks`.
        limit: Score the first documents of each task only.
        decode: Let the model's thresholds act on every row as they do in decode.
        progress: Told how far the scoring is.

    Raises:
        UsageError: lm-eval is not installed, or there are no tasks.
        CheckFailed: the model predicts NaN.

    Example:
        >>> score_tasks(LLM("model.gguf"), load_tasks(["copa"], Path("zeroshot"))).mean_acc  # doctest: +SKIP
        0.63
    """
    harness = require_harness()
    if not tasks:
        raise UsageError("no tasks to score; load some with load_tasks")
    from lm_eval.evaluator import evaluate

    from thinfer.evals.lm_eval_adapter import EngineLM

    adapter = EngineLM(llm, decode=decode, progress=progress)
    started = time.perf_counter()
    with _without_bars():
        results = evaluate(
            adapter,
            {task.name: harness_task(task) for task in tasks},
            limit=limit,
            # Standard errors of means are exact; only a bootstrap would use this number, and none is asked for.
            bootstrap_iters=1,
            log_samples=False,
        )
    seconds = time.perf_counter() - started
    scores = tuple(_score(task, results["results"][task.name], limit) for task in tasks)
    return TaskScores(scores, limit, llm.tokenizer.adds_bos, adapter.truncated, round(seconds, 2), harness)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Within, lm-eval shows no bar while it makes its requests: `progress` is told, and pipes get no bars."""
    from lm_eval.api import task as harness

    own = harness.tqdm
    harness.tqdm = partial(own, disable=True)
    try:
        yield
    finally:
        harness.tqdm = own


def harness_task(task: LocalTask) -> Any:
    """The task as lm-eval runs it, on a model of ours or on any other that lm-eval knows."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    class Local(ConfigurableTask):  # type: ignore[misc]  # lm-eval has no types
        """A task whose documents are here already."""

        def download(self, dataset_kwargs: Any = None, **_: Any) -> None:
            self.dataset = {"test": Dataset.from_list([dict(document) for document in task.documents])}

    return Local(config={"task": task.name, "test_split": "test", "num_fewshot": 0, **_config(task)})


def _config(task: LocalTask) -> dict[str, Any]:
    mean = {"aggregation": "mean", "higher_is_better": True}
    accuracy = {"metric": "acc", **mean}
    if task.kind == "choices":
        return {
            "output_type": "multiple_choice",
            "doc_to_text": lambda document: document["query"],
            "doc_to_choice": lambda document: document["choices"],
            "doc_to_target": lambda document: document["gold"],
            "metric_list": [accuracy, {"metric": "acc_norm", **mean}],
        }
    if task.kind == "contexts":
        # A number as the text means to lm-eval that the choices are contexts.
        return {
            "output_type": "multiple_choice",
            "doc_to_text": lambda document: document["gold"],
            "doc_to_choice": lambda document: document["context_options"],
            "doc_to_target": lambda document: document["continuation"],
            "metric_list": [accuracy],
        }
    return {
        "output_type": "loglikelihood",
        "doc_to_text": lambda document: document["context"],
        "doc_to_target": lambda document: " " + document["continuation"],
        "metric_list": [
            accuracy,
            # Of our own: lm-eval would bootstrap its standard error in other processes.
            {"metric": "perplexity", "aggregation": _perplexity, "higher_is_better": False},
        ],
    }


def _perplexity(log_likelihoods: Sequence[float]) -> float:
    return math.exp(-sum(log_likelihoods) / len(log_likelihoods))


def _score(task: LocalTask, result: Mapping[str, Any], limit: int | None) -> TaskScore:
    metrics = {}
    for key, value in result.items():
        name, _, kind = key.partition(",")
        if kind == "none" and isinstance(value, int | float) and math.isfinite(value):
            metrics[name] = float(value)
    first = task.documents[0]
    if task.kind == "choices":
        example = (first["query"], " " + first["choices"][first["gold"]])
    elif task.kind == "contexts":
        example = (first["context_options"][first["gold"]], " " + first["continuation"])
    else:
        example = (first["context"], " " + first["continuation"])
    total = len(task.documents)
    scored = total if limit is None else min(limit, total)
    return TaskScore(task.name, metrics, scored, total, task.source, task.sha256, _JOINED[task.kind], example)
