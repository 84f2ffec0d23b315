"""Predictors: recorded, trained as large as each layer needs, measured on held-out text, stored quantised."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, get_args

import numpy as np

from thinfer.activation.masked_run import Bool, Comparison, Float32, WindowRunner
from thinfer.activation.observed import open_dense
from thinfer.activation.predictor_budget import Budget, least
from thinfer.activation.predictor_training import (
    Data,
    FitOptions,
    Fitted,
    Start,
    fit,
    pack,
    rank_for,
    require_training,
    threshold_for,
)
from thinfer.activation.recording import Recording, Task, make_tasks
from thinfer.calibration.text import TokenWindows, token_windows
from thinfer.core.artifact import Artifact, base_for, require_writable
from thinfer.core.predictor import (
    BLOCK_VALUES,
    COUNTS_DENSITY,
    COUNTS_RECALL,
    PREDICTOR_SECTION,
    Kind,
    Predictor,
    StoredType,
    Target,
    selector_of,
)
from thinfer.core.profile import HOT_SHARE, hot_set
from thinfer.core.whole import require_whole
from thinfer.engine.llm import LLM
from thinfer.engine.predictors import PredictedSets, Scorer
from thinfer.engine.runtime import Engine
from thinfer.errors import UnsupportedError, UsageError

Progress = Callable[[str], None]

_TYPES: dict[int, StoredType] = {8: "Q8_0", 4: "Q4_0"}
# Of the recorded windows, so many choose epoch, threshold and size.
_CHECK_SHARE = 0.2
_MOST_TRIES = 5
# Density over the true one that a size must hold there: a little less than what counts, for other text gives more.
_AIM = COUNTS_DENSITY - 0.1
_GROW, _SHRINK = 1.5, 2 / 3
# A layer as dense as this starts with all that the budget allows.
_DENSE = 0.25


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """What is predicted and how well; invalid values raise UsageError.

    Attributes:
        targets: "neurons", "heads" or both.
        kind: "lowrank" or "mlp".
        lookahead: layers between what a predictor reads and what it aims at: 0, the layer's own input, or 1.
        recall: share of what is needed that each shall find on the windows that its threshold is chosen on. Other
            windows give one or two points less, and below 0.95 none of them would count.
        tokens: tokens recorded to learn from, rounded up to whole windows.
        held_out: tokens recorded to measure on.
        seq_len: tokens of a window. Many short windows tell more than few long ones: thresholds hold for the kind of
            text they were chosen on, and a window is mostly of one kind.
        seed: chooses the windows and the order of training.
        epochs: most passes over the tokens for each size tried.
        batch: tokens of a training step.
        lr: highest learning rate.
        bits: 8 or 4, of the stored matrices.
        budget: all predictors together, as a fraction of the model's parameters.
        label_share: for models without exact zeros: neurons needed are this share of the largest.
        head_share: heads needed are this share of the largest.
        layers: which; None: all.
        device: cpu, cuda or cuda:N.
        sink_tokens: first positions of a window, which are left out.
        quality_windows: held-out windows on which the predictions' cost in quality is measured.
    """

    targets: Sequence[Target] = ("neurons",)
    kind: Kind = "lowrank"
    lookahead: int = 0
    recall: float = 0.96
    tokens: int = 16384
    held_out: int = 4096
    seq_len: int = 256
    seed: int = 0
    epochs: int = 8
    batch: int = 512
    lr: float = 2e-3
    bits: int = 8
    budget: float = 0.1
    label_share: float | None = None
    head_share: float = 0.5
    layers: Sequence[int] | None = None
    device: str = "cpu"
    sink_tokens: int = 4
    quality_windows: int = 2

    def __post_init__(self) -> None:
        if not self.targets or len(set(self.targets) & set(get_args(Target))) < len(self.targets):
            raise UsageError(f"targets are {', '.join(self.targets) or 'empty'}; choose from neurons, heads, each once")
        if self.kind not in get_args(Kind):
            raise UsageError(f"kind is {self.kind!r}; choose one of {', '.join(get_args(Kind))}")
        if self.layers is not None and not self.layers:
            raise UsageError("no layer is named; name some, or none for all")
        if self.lookahead not in (0, 1):
            raise UsageError(f"lookahead is {self.lookahead}; it is 0 (the layer's own input) or 1 (one layer ahead)")
        if self.bits not in _TYPES:
            raise UsageError(f"bits is {self.bits}; predictors are stored in 8 or 4")
        for name in ("recall", "budget", "label_share", "head_share", "lr"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 < float(value) < 1):
                raise UsageError(f"{name} must lie between 0 and 1, not {value!r:.60}")
        require_whole(self, tokens=1, held_out=1, epochs=1, batch=1, quality_windows=1)
        require_whole(self, seq_len=8, seed=0, sink_tokens=0)
        if self.seq_len < self.sink_tokens + 2:
            raise UsageError(f"windows of {self.seq_len} tokens hold nothing past {self.sink_tokens} sinks; use more")


def train_predictors(
    model: str | Path,
    out: str | Path,
    *,
    text: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train predictors of a model's neurons or heads and write them with thinfer.json into ``out``.

    Args:
        model: a .gguf file, a Hugging Face folder, a thinfer folder (its base model is taken), or a hub id.
        out: folder for the artifact; what else it holds for the same weights stays.
        text: a Path is read, a str is the text itself, None is the built-in excerpt. Learning and measuring share no
            token of it.
        progress: told what runs now.
        options: fields of PredictOptions and of EngineOptions; None means the default.

    Returns:
        "predictors", one entry for each layer and target: sizes, "threshold", "recall", "precision", "density",
        "true_density", "counts", "density_at_95" (with the threshold that would give a recall of 0.95 there),
        "parameters", "bytes", and "tried" with every size; "all_count" of these; "left_out", the "target", "layer" and
        "parameters" of the smallest predictors that the budget does not hold; "budget_for_all", that would hold them
        too; "parameters_share"; "bytes"; "quality" of those that count on held-out windows (None
        when none does); "options", "engine", "text".

    Raises:
        UsageError: PyTorch is missing, an impossible option, a text too short, windows too long for the model, a
            budget that holds no predictor, or a model without sparse neurons.
        UnsupportedError: a width of the model is no multiple of 32.
        CheckFailed: activations are NaN.
        ResourceError: the recording does not fit the scratch disk.

    Example:
        >>> train_predictors("relu-model", "predictors", tokens=16384)["all_count"]  # doctest: +SKIP
        True
    """
    given = {name: value for name, value in options.items() if value is not None}
    known = {field.name for field in fields(PredictOptions)}
    settings = PredictOptions(**{name: given.pop(name) for name in list(given) if name in known})
    tell = progress or (lambda line: None)
    require_training(settings.device)
    require_writable(out)
    with open_dense(model, settings.seq_len, given) as llm:
        windows = _windows(llm, text, settings)
        training = _Training(llm.engine, settings, windows, tell)
        trained = training.run()
        loaded = llm.engine.model
        engine = asdict(llm.options)
        del engine["sparsity"]
        quality = _quality(llm.engine, [p for p, _ in trained if p.counts], windows, settings, tell)
        parameters = sum(predictor.parameters for predictor, _ in trained)
        share = parameters / loaded.num_parameters
        report = {
            "predictors": [
                predictor.to_entry()[0]
                | {"parameters": predictor.parameters, "bytes": predictor.nbytes, "counts": predictor.counts}
                | facts
                for predictor, facts in trained
            ],
            "all_count": all(predictor.counts for predictor, _ in trained),
            "counts_means": f"recall of at least {COUNTS_RECALL} at {COUNTS_DENSITY} times the true density at most",
            "left_out": training.left_out,
            "budget_for_all": training.budget_for_all,
            "parameters_share": share,
            "bytes": sum(predictor.nbytes for predictor, _ in trained),
            "quality": quality,
            "options": asdict(settings),
            "engine": engine,
            "text": {"source": windows.source, "sha256": windows.sha256, "tokens": windows.tokens},
        }
        tensors: dict[str, Any] = {}
        for predictor, _ in trained:
            tensors |= predictor.to_entry()[1]
        entries = [predictor.to_entry()[0] for predictor, _ in trained]
        section = {"sink_tokens": settings.sink_tokens, "entries": entries, "report": report}
        checkpoint = loaded.checkpoint
        base = base_for(model, checkpoint.path, out)
        artifact = Artifact(base, checkpoint.fingerprint(), {PREDICTOR_SECTION: section}, tensors)
        artifact.merged(out).save(out)
    return report


class _Training:
    """One run: what was recorded, and a predictor for each task."""

    def __init__(self, engine: Engine, settings: PredictOptions, windows: TokenWindows, tell: Progress) -> None:
        self._engine = engine
        self._settings = settings
        self._windows = windows
        self._tell = tell
        heads = engine.config.num_attention_heads
        tasks = make_tasks(engine.graph, heads, settings.targets, settings.lookahead, settings.layers)
        for task in tasks:
            if task.inputs % BLOCK_VALUES:
                raise UnsupportedError(
                    f"predictors read blocks of {BLOCK_VALUES} channels, but {task.source} has {task.inputs}; "
                    "use a model whose hidden size is a multiple of that"
                )
        everything = len(settings.targets) * engine.config.num_hidden_layers
        parameters = engine.model.num_parameters
        self._budget = Budget(tasks, settings.budget * parameters, settings.budget * parameters / everything)
        # One step up, so that rounding takes nothing from it.
        self.budget_for_all = (math.floor(1000 * self._budget.needed / parameters) + 1) / 1000
        if not self._budget.held:
            share, all_of_them = min(map(least, tasks)) / parameters, self.budget_for_all
            remedy = (
                f"--budget {all_of_them:g} holds the smallest of every layer" if all_of_them < 1 else "name --layers"
            )
            raise UsageError(
                f"a budget of {settings.budget:.1%} of the model's parameters holds no predictor: the smallest takes "
                f"{share:.1%}; {remedy}"
            )

    @property
    def left_out(self) -> list[dict[str, Any]]:
        """What the budget does not hold, ready for JSON."""
        return [
            {"target": task.target, "layer": task.layer, "parameters": least(task)} for task in self._budget.left_out
        ]

    def run(self) -> list[tuple[Predictor, dict[str, Any]]]:
        """Record, then train layer by layer."""
        settings, tasks = self._settings, self._budget.held
        with Recording(
            self._engine,
            tasks,
            label_share=settings.label_share,
            head_share=settings.head_share,
            sink_tokens=settings.sink_tokens,
        ) as recording:
            recording.run((*self._windows.windows, *self._windows.held_out), self._tell)
            each = settings.seq_len - settings.sink_tokens
            held_out = slice(len(self._windows.windows) * each, None)
            checked = max(round(_CHECK_SHARE * len(self._windows.windows)), 1) * each
            check = slice(held_out.start - checked, held_out.start)
            learn = slice(0, check.start)
            trained = []
            for number, task in enumerate(tasks, 1):
                self._tell(f"training {task.target} of layer {task.layer}, {number} of {len(tasks)}")
                x, y = np.asarray(recording.inputs(task.source), np.float32), recording.labels(task)
                start = Start(x[learn], y[learn], self._made(task, recording, learn))
                data = Data(x[learn], y[learn], x[check], y[check])
                predictor, tried = self._size(task, data, start, self._budget.room(task))
                self._budget.spend(predictor.parameters)
                trained.append(_measured(predictor, x[held_out], y[held_out]) | {"tried": tried})
            return [(facts.pop("predictor"), facts) for facts in trained]

    def _made(self, task: Task, recording: Recording, rows: slice) -> tuple[Float32, Float32] | None:
        """Input and matrix of the gate when its sign decides what fires."""
        if task.target == "heads" or self._settings.label_share is not None:
            return None
        node = next(n for n in self._engine.graph.nodes if n.op == "linear" and n.attrs["site"] == task.own)
        weight = self._engine.model.weights.float32(node.weights[0])
        return np.asarray(recording.inputs(task.own)[rows], np.float32), weight

    def _size(self, task: Task, data: Data, start: Start, room: float) -> tuple[Predictor, list[dict[str, Any]]]:
        """The smallest predictor found that holds the target on the check split, else the best of those tried.

        PowerInfer: a start from the layer's sparsity and skewness, then larger or smaller until the target just holds.
        """
        most = rank_for(room, task.inputs, task.outputs)
        if self._settings.kind == "lowrank":
            # A higher rank than that of the full matrix adds nothing.
            most = min(most, -(-min(task.inputs, task.outputs) // BLOCK_VALUES) * BLOCK_VALUES)
        rates = data.y.mean(axis=0)
        skew = 1 - len(hot_set(rates, HOT_SHARE)) / (HOT_SHARE * len(rates))
        rank = _round(most * min(1.0, float(rates.mean()) / _DENSE) * (1 - skew / 2), most)
        tried: dict[int, tuple[Predictor, float]] = {}
        while rank not in tried and len(tried) < _MOST_TRIES:
            predictor = self._fit(task, data, start, rank)
            tried[rank] = predictor, predictor.density / max(predictor.true_density, 1e-9)
            holding = [r for r, (_, ratio) in tried.items() if ratio <= _AIM]
            failing = [r for r in tried if r not in holding]
            if not holding:
                rank = _round(max(failing) * _GROW, most)
            else:
                # Between the largest that fails and the smallest that holds, or below all.
                low = max((r for r in failing if r < min(holding)), default=0)
                rank = _round(max(min(holding) * _SHRINK, low + 1), most)
        facts = [{"rank": r, "density_ratio": ratio} for r, (_, ratio) in sorted(tried.items())]
        holding = [r for r, (_, ratio) in tried.items() if ratio <= _AIM]
        chosen = min(holding) if holding else min(tried, key=lambda r: tried[r][1])
        return tried[chosen][0], facts

    def _fit(self, task: Task, data: Data, start: Start, rank: int) -> Predictor:
        """Train, store, and set the threshold by what the stored one scores on the check split."""
        settings = self._settings
        seed = settings.seed * 1_000_003 + task.layer
        how = FitOptions(
            settings.kind, settings.recall, settings.epochs, settings.batch, settings.lr, settings.device, seed
        )
        predictor = _stored(task, fit(data, start, rank, how), settings.kind, _TYPES[settings.bits])
        scores = Scorer(predictor.scorer).scores(data.check_x)
        predictor = replace(predictor, threshold=threshold_for(scores, data.check_y, settings.recall))
        found: Predictor = _measured(predictor, data.check_x, data.check_y)["predictor"]
        return found


def _round(rank: float, most: int) -> int:
    return min(max(round(rank / BLOCK_VALUES), 1) * BLOCK_VALUES, most)


def _stored(task: Task, fitted: Fitted, kind: Kind, stored: StoredType) -> Predictor:
    return Predictor(
        target=task.target,
        layer=task.layer,
        aim=task.aim,
        source=task.source,
        kind=kind,
        type=stored,
        inputs=task.inputs,
        rank=len(fitted.first),
        outputs=task.outputs,
        threshold=0.0,
        recall=0.0,
        density=1.0,
        true_density=0.0,
        first=pack(fitted.first, stored),
        second=pack(fitted.second, stored),
        bias=fitted.bias,
    )


def _measured(predictor: Predictor, x: Float32, y: Bool) -> dict[str, Any]:
    """The predictor with its recall and density on these tokens, and the precision."""
    scorer = Scorer(predictor.scorer)
    named, scores = scorer.needed(x), scorer.scores(x)
    right, all_named, all_needed = int((named & y).sum()), int(named.sum()), int(y.sum())
    found = replace(
        predictor,
        recall=right / all_needed if all_needed else 1.0,
        density=all_named / named.size,
        true_density=all_needed / y.size,
    )
    return {
        "predictor": found,
        "precision": right / all_named if all_named else 1.0,
        "density_at_95": float((scores > threshold_for(scores, y, COUNTS_RECALL)).mean()),
    }


def _windows(llm: LLM, text: str | Path | None, settings: PredictOptions) -> TokenWindows:
    """Windows to learn from, two at least, and held-out ones."""
    return token_windows(
        lambda part: llm.tokenizer.encode(part, add_special=False),
        text,
        samples=max(-(-settings.tokens // settings.seq_len), 2),
        held_out=-(-settings.held_out // settings.seq_len),
        length=settings.seq_len,
        seed=settings.seed,
        bos_id=llm.tokenizer.bos_id if llm.tokenizer.adds_bos else None,
    )


def _quality(
    engine: Engine, predictors: Sequence[Predictor], windows: TokenWindows, settings: PredictOptions, tell: Progress
) -> dict[str, float] | None:
    """What leaving out all that these do not name costs on held-out windows, in float32; None without predictors."""
    if not predictors:
        return None
    runner = WindowRunner(engine.model, settings.seq_len, settings.sink_tokens)
    comparison = Comparison()
    chosen = windows.held_out[: settings.quality_windows]
    for number, window in enumerate(chosen, 1):
        tell(f"quality with the predictions: window {number} of {len(chosen)}")
        masked = runner.run(window, PredictedSets(selector_of(predictors), engine.graph))
        comparison.add(window, runner.run(window), masked, settings.sink_tokens)
    return comparison.result() | {"predictors": len(predictors)}
