"""TEAL and WINA thresholds: observe a model with its own engine, choose, measure, and write the artifact."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

from thinfer.activation.allocation import HIGHEST_RATE
from thinfer.activation.measure import Loss, measure_decode, measure_loss
from thinfer.activation.observed import open_dense
from thinfer.activation.scores import BLOCK_KINDS, Float32, Method, Site, block_sites, column_norms, make_selector
from thinfer.activation.search import Rates, RateSearch, Trial
from thinfer.calibration.observer import ScoreHistogram, ScoreObserver
from thinfer.calibration.text import TokenWindows, token_windows
from thinfer.core.artifact import Artifact, base_for, require_writable
from thinfer.core.selector import SELECTOR_SECTION, ThresholdSelector
from thinfer.core.whole import require_whole
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import UsageError

Allocation = Literal["uniform", "greedy"]
Progress = Callable[[str], None]

CALIBRATION_SECTION = "calibration"


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What to calibrate and how; invalid values raise UsageError.

    Attributes:
        method: "teal" or "wina".
        sparsity: fraction of the block weights' bytes to leave out, 0 to 1; None with `max_ppl_increase`.
        max_ppl_increase: rise of perplexity allowed, such as 0.02; the rates of the kinds of input are then found by
            measurement, whatever the allocation.
        allocation: "uniform" gives every input the same rate, "greedy" measures what each kind of input costs and
            spends the sparsity where it costs least.
        depth_parts: with measured rates, each kind of input gets a rate of its own in so many parts of the depth.
        samples: windows observed.
        held_out: windows on which perplexity is measured.
        seq_len: tokens of a window.
        seed: chooses the windows.
        sink_tokens: first positions that stay dense.
        prefill: whether prompts are sparse too.
    """

    method: Method = "teal"
    sparsity: float | None = None
    max_ppl_increase: float | None = None
    allocation: Allocation = "uniform"
    depth_parts: int = 1
    samples: int = 16
    held_out: int = 8
    seq_len: int = 512
    seed: int = 0
    sink_tokens: int = 4
    prefill: bool = False

    def __post_init__(self) -> None:
        for name in ("sparsity", "max_ppl_increase"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Real):
                raise UsageError(f"{name} must be a number, not {value!r:.60}")
        if self.method not in get_args(Method):
            raise UsageError(f"method is {self.method!r}; choose one of {', '.join(get_args(Method))}")
        if self.allocation not in get_args(Allocation):
            raise UsageError(f"allocation is {self.allocation!r}; choose one of {', '.join(get_args(Allocation))}")
        if (self.sparsity is None) == (self.max_ppl_increase is None):
            raise UsageError("give either sparsity or max_ppl_increase")
        if self.sparsity is not None and not 0 <= self.sparsity <= 1:
            raise UsageError(f"sparsity must lie between 0 and 1, not {self.sparsity}")
        if self.allocation == "greedy" and self.sparsity is not None and self.sparsity > HIGHEST_RATE:
            raise UsageError(f"greedy allocation goes up to sparsity {HIGHEST_RATE}; use uniform for more")
        if self.max_ppl_increase is not None and not 0 < self.max_ppl_increase < 10:
            raise UsageError(f"max_ppl_increase must be above 0, such as 0.02 for 2 %, not {self.max_ppl_increase}")
        if self.depth_parts != 1 and self.allocation == "uniform" and self.max_ppl_increase is None:
            raise UsageError("depth_parts needs rates that are measured: allocation greedy, or max_ppl_increase")
        require_whole(self, depth_parts=1, samples=1, held_out=1, seq_len=2, sink_tokens=0, seed=0)


def calibrate(
    model: str | Path,
    out: str | Path,
    *,
    text: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Find thresholds for a model and write them with thinfer.json into ``out``; the model is not copied.

    Args:
        model: a .gguf file, a Hugging Face folder, a thinfer folder (its base model is taken), or a hub id.
        out: folder for the artifact.
        text: calibration text: a Path is read (.jsonl: one object with a "text" a line), a str is the text itself,
            None is the built-in excerpt.
        progress: told what runs now.
        options: fields of CalibrationOptions and of EngineOptions; None means the default.

    Returns:
        What was chosen and measured, ready for JSON, as it stands in thinfer.json: "sparsity" (share of the block
        weights' bytes that the rates leave out), "rates" by kind of input (with depth parts such as "down/1"),
        "ppl_dense", "ppl", "rise_stderr" (nats), "density", "bytes_per_token_dense" and "bytes_per_token" of decode
        steps that skip all that is dropped (at start an engine may choose to read some of it, where that is faster),
        "curve" (every measured point), "options", "engine" and "text".

    Raises:
        UsageError: an unknown or impossible option, or a text too short, or windows too long for the model.

    Example:
        >>> calibrate("model.gguf", "sparse", sparsity=0.4)["ppl"]  # doctest: +SKIP
    """
    given = {name: value for name, value in options.items() if value is not None}
    known = {field.name for field in fields(CalibrationOptions)}
    settings = CalibrationOptions(**{name: given.pop(name) for name in list(given) if name in known})
    tell = progress or (lambda line: None)
    require_writable(out)
    with open_dense(model, settings.seq_len, given) as llm:
        windows = token_windows(
            lambda part: llm.tokenizer.encode(part, add_special=False),
            text,
            samples=settings.samples,
            held_out=settings.held_out,
            length=settings.seq_len,
            seed=settings.seed,
            bos_id=llm.tokenizer.bos_id if llm.tokenizer.adds_bos else None,
        )
        run = _Calibration(llm.engine, settings, windows, tell)
        chosen, search = run.choose()
        selector = run.selector(chosen.rates)
        tell("counting the bytes of decode steps")
        dense_use = measure_decode(llm.engine, windows.held_out[0], None)
        llm.engine.close()
        # Only an engine made with the thresholds packs its weights for skipping, so only there bytes are saved. What
        # is faster differs from machine to machine; an artifact must not, so here all that is dropped is skipped.
        counting = replace(llm.options, layout="columns") if llm.options.layout == "auto" else llm.options
        with Engine(llm.engine.model, counting, selector=selector) as sparse:
            sparse_use = measure_decode(sparse, windows.held_out[0], selector)
        engine = asdict(llm.options)
        del engine["sparsity"]
        report = {
            "sparsity": chosen.saved,
            "rates": dict(chosen.rates),
            "ppl_dense": search.dense.ppl,
            "ppl": chosen.ppl,
            "rise_stderr": chosen.rise_stderr,
            "density": sparse_use.density,
            "bytes_per_token_dense": dense_use.bytes_per_token,
            "bytes_per_token": sparse_use.bytes_per_token,
            "curve": [trial.to_dict() for trial in search.trials],
            "options": asdict(settings),
            "engine": engine,
            "text": {"source": windows.source, "sha256": windows.sha256, "tokens": windows.tokens},
        }
        checkpoint = llm.engine.model.checkpoint
        section, tensors = selector.to_section()
        sections = {SELECTOR_SECTION: section, CALIBRATION_SECTION: report}
        base = base_for(model, checkpoint.path, out)
        Artifact(base, checkpoint.fingerprint(), sections, tensors).merged(out).save(out)
    return report


class _Calibration:
    """One run: the observed scores, and losses measured on demand."""

    def __init__(self, engine: Engine, settings: CalibrationOptions, windows: TokenWindows, tell: Progress) -> None:
        self._engine = engine
        self._settings = settings
        self._windows = windows
        self._tell = tell
        self._sites = block_sites(engine.model, engine.graph)
        self._layers = engine.config.num_hidden_layers
        self._scales: dict[str, Float32] = {}
        if settings.method == "wina":
            self._scales = {site.name: column_norms(engine.model, site) for site in self._sites}
        self._histograms = self._observe()

    def choose(self) -> tuple[Trial, RateSearch]:
        """The rates to use, and all that was measured on the way."""
        settings = self._settings
        self._tell("measuring dense perplexity")
        dense = measure_loss(self._engine, self._windows.held_out, None)
        search = RateSearch(
            self._group_bytes(),
            dense,
            self._loss,
            {kind: list(dict.fromkeys(self._group(s) for s in self._sites if s.kind == kind)) for kind in BLOCK_KINDS},
            lambda count: self._tell(f"measured {count} allocations"),
        )
        if settings.max_ppl_increase is not None:
            return search.within(settings.max_ppl_increase), search
        sparsity = settings.sparsity or 0.0
        if settings.allocation == "greedy":
            return search.greedy(sparsity), search
        return search.uniform(sparsity), search

    def selector(self, rates: Rates) -> ThresholdSelector:
        """Thresholds of these rates by group."""
        by_site = {site.name: rates[self._group(site)] for site in self._sites}
        settings = self._settings
        return make_selector(
            settings.method,
            self._histograms,
            self._scales,
            by_site,
            sink_tokens=settings.sink_tokens,
            prefill=settings.prefill,
        )

    def _observe(self) -> Mapping[str, ScoreHistogram]:
        observer = ScoreObserver(self._scales, self._settings.sink_tokens, frozenset(s.name for s in self._sites))
        total = len(self._windows.windows)
        for done, window in enumerate(self._windows.windows):
            self._tell(f"observing window {done + 1} of {total}")
            sequence = self._engine.new_sequence()
            self._engine.step([Work(sequence, window, "none")], observe=observer.observe)
            self._engine.free(sequence)
        return observer.histograms

    def _loss(self, rates: Rates) -> Loss:
        return measure_loss(self._engine, self._windows.held_out, self.selector(rates))

    def _group(self, site: Site) -> str:
        """The group of inputs that share a rate: a kind, or a kind in a part of the depth, counted from 1."""
        parts = min(self._settings.depth_parts, self._layers)
        return site.kind if parts == 1 else f"{site.kind}/{site.layer * parts // self._layers + 1}"

    def _group_bytes(self) -> dict[str, int]:
        nbytes: dict[str, int] = {}
        for site in sorted(self._sites, key=lambda site: BLOCK_KINDS.index(site.kind)):
            nbytes[self._group(site)] = nbytes.get(self._group(site), 0) + site.nbytes
        return nbytes
