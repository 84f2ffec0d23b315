"""Profile: which neurons and heads of a model are active on a text, seen by its own engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer.activation.observed import open_dense
from thinfer.activation.scores import Float32, Site, block_sites
from thinfer.calibration.text import TokenWindows, token_windows
from thinfer.core.artifact import Artifact, base_for, require_writable
from thinfer.core.profile import HOT_SHARE, OCTAVES, PROFILE_SECTION, UNION_SIZES, ActivationProfile, Float64
from thinfer.core.whole import require_whole
from thinfer.engine.batch import Batch
from thinfer.engine.finite import require_numbers
from thinfer.engine.llm import LLM
from thinfer.engine.runtime import Engine, Work
from thinfer.errors import UnsupportedError, UsageError
from thinfer.models.loader import Model

Progress = Callable[[str], None]
# Sets of firing neurons kept whole for the unions; counts need none.
_KEPT_TOKENS = 2048
_DRAWS = 64


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How much of a text is observed; invalid values raise UsageError.

    Attributes:
        tokens: tokens of all texts together, rounded up to whole windows.
        seq_len: tokens of a window.
        seed: chooses the windows and the tokens of the unions.
        sink_tokens: first positions of every window, which are left out: attention sinks are like no other token.
    """

    tokens: int = 8192
    seq_len: int = 512
    seed: int = 0
    sink_tokens: int = 4

    def __post_init__(self) -> None:
        require_whole(self, tokens=1, seq_len=2, seed=0, sink_tokens=0)
        if self.seq_len < self.sink_tokens + 2:
            raise UsageError(f"windows of {self.seq_len} tokens hold nothing past {self.sink_tokens} sinks; use more")


def profile(
    model: str | Path,
    out: str | Path,
    *,
    texts: Sequence[str | Path] = (),
    progress: Progress | None = None,
    **options: Any,
) -> tuple[ActivationProfile, dict[str, Any]]:
    """Observe a model on texts and write its profile with thinfer.json into ``out``; needs no PyTorch.

    Args:
        model: a .gguf file, a Hugging Face folder, a thinfer folder (its base model is taken), or a hub id.
        out: folder for the artifact; what else it holds for the same weights stays.
        texts: each a Path to read or the text itself; none: the built-in excerpt. One text is cut into two halves, so
            that there is something to compare.
        progress: told what runs now.
        options: fields of ProfileOptions and of EngineOptions; None means the default.

    Returns:
        The profile, and its figures ready for JSON (see `summary`) with "options", "engine" and "texts".

    Raises:
        UsageError: an unknown or impossible option, or a text too short, or windows too long for the model.
        CheckFailed: activations are NaN.

    Example:
        >>> found, report = profile("relu-model", "profile", tokens=4096)  # doctest: +SKIP
        >>> report["exact_zeros"]  # doctest: +SKIP
        0.67
    """
    given = {name: value for name, value in options.items() if value is not None}
    known = {field.name for field in fields(ProfileOptions)}
    settings = ProfileOptions(**{name: given.pop(name) for name in list(given) if name in known})
    tell = progress or (lambda line: None)
    require_writable(out)
    with open_dense(model, settings.seq_len, given) as llm:
        cut = _windows(llm, texts, settings)
        found = observe(llm.engine, cut, settings, tell)
        engine = asdict(llm.options)
        del engine["sparsity"]
        report = summary(found) | {
            "model": str(model),
            "act": llm.config.hidden_act,
            "options": asdict(settings),
            "engine": engine,
            "texts": [
                {"source": name, "sha256": windows.sha256, "tokens": len(windows.windows) * windows.length}
                for name, windows in cut.items()
            ],
        }
        section, tensors = found.to_section()
        checkpoint = llm.engine.model.checkpoint
        sections = {PROFILE_SECTION: section | {"report": report}}
        base = base_for(model, checkpoint.path, out)
        Artifact(base, checkpoint.fingerprint(), sections, tensors).merged(out).save(out)
    return found, report


def summary(found: ActivationProfile) -> dict[str, Any]:
    """The figures of a profile, ready for JSON.

    Returns:
        "exact_zeros" of all activations and "sparsity" by layer; "neurons_for_80" with the share of neurons that make
        80 % of the activations, by "count" and by "magnitude", each as mean over the layers ("layers") and over all
        neurons together ("model"); "power_law" (exponent of rate against rank); "firing_rates" (quantiles 0, 5 … 100 %
        over the neurons); "reuse" and "reuse_by_chance"; "union_sizes" with "union_random" and "union_window" (means
        over the layers; null where the text has too few tokens); "hot_overlap" of the texts by "count" and by
        "magnitude"; "head_norms" by layer.
    """
    neurons = {
        by: {"layers": float(found.neurons_for(by=by).mean()), "model": found.neurons_of_model_for(by=by)}
        for by in ("count", "magnitude")
    }
    return {
        "tokens": sum(found.tokens),
        "exact_zeros": float(found.sparsity().mean()),
        "sparsity": found.sparsity().tolist(),
        "neurons_for_80": neurons,
        "power_law": _numbers([found.power_law()])[0],
        "firing_rates": np.quantile(found.rates(), np.linspace(0, 1, 21)).tolist(),
        "reuse": float(found.reuse.mean()),
        "reuse_by_chance": float(found.expected_reuse().mean()),
        "union_sizes": list(UNION_SIZES),
        "union_random": _numbers(found.union_random.mean(axis=0)),
        "union_window": _numbers(found.union_window.mean(axis=0)),
        "hot_share": HOT_SHARE,
        "hot_overlap": {by: found.overlap(by=by).tolist() for by in ("count", "magnitude")},
        "head_norms": found.head_norms.tolist(),
    }


def _numbers(values: Iterable[float]) -> list[float | None]:
    """JSON has no NaN: what the text was too short to measure is null."""
    return [None if np.isnan(value) else float(value) for value in values]


def observe(
    engine: Engine, texts: Mapping[str, TokenWindows], settings: ProfileOptions, tell: Progress = lambda _: None
) -> ActivationProfile:
    """Run the windows of every text densely and gather what the linears' inputs show."""
    watcher = _Watcher(engine.model, block_sites(engine.model, engine.graph), settings, len(texts))
    total = sum(len(windows.windows) for windows in texts.values())
    done = 0
    for windows in texts.values():
        watcher.neurons.next_text()
        for window in windows.windows:
            done += 1
            tell(f"observing window {done} of {total}")
            sequence = engine.new_sequence()
            try:
                engine.step([Work(sequence, window, "none")], observe=watcher.observe)
            finally:
                engine.free(sequence)
    return watcher.result(tuple(texts))


class NeuronCounts:
    """Counts what the FFN neurons of L layers do on T texts; arrays are as in ActivationProfile.

    Example: `counts.next_text()`, then `counts.add(0, activations, sequence)` for every layer and batch of rows.
    """

    def __init__(self, texts: int, layers: int, neurons: int) -> None:
        self.counts = np.zeros((texts, layers, neurons), np.int64)
        self.magnitudes = np.zeros((texts, layers, neurons), np.float64)
        self.tokens = [0] * texts
        self._text = -1
        self._again = np.zeros((layers, 2), np.int64)
        self._none = np.zeros((0, neurons), np.bool_)
        self._last = [self._none] * layers
        self._quota = -(-_KEPT_TOKENS // texts)
        self._kept: list[list[NDArray[np.uint8]]] = [[] for _ in range(layers)]
        self._kept_rows = [0] * layers
        self._runs: list[int] = []

    def next_text(self) -> None:
        """What comes now belongs to the next text."""
        self._text += 1
        self._kept_rows = [0] * len(self._kept_rows)
        self._last = [self._none] * len(self._last)

    def add(self, layer: int, activations: Float32, sequence: NDArray[np.int32], *, continues: bool = False) -> None:
        """Count one layer's activations [M, N]; rows of one sequence are neighbours, in order and without gaps.

        Long windows come in pieces: with ``continues`` the first row follows the last one of the layer's call before.
        """
        if not len(activations):
            return
        fired = activations != 0
        before = self._last[layer] if continues else self._none
        # A copy, so that the other rows need not be kept.
        self._last[layer] = fired[-1:].copy()
        self.counts[self._text, layer] += fired.sum(axis=0)
        self.magnitudes[self._text, layer] += np.abs(activations).sum(axis=0, dtype=np.float64)
        if layer == 0:
            self.tokens[self._text] += len(activations)
        pairs = sequence[1:] == sequence[:-1]
        now, then = fired[1:][pairs], fired[:-1][pairs]
        self._again[layer] += (int((now & then).sum()), int(now.sum()))
        if len(before):
            self._again[layer] += (int((fired[:1] & before).sum()), int(fired[:1].sum()))
        room = self._quota - self._kept_rows[layer]
        if room > 0:
            kept = fired[:room]
            self._kept[layer].append(np.packbits(kept, axis=1))
            self._kept_rows[layer] += len(kept)
            if layer == 0 and len(before):
                self._runs[-1] += len(kept)
            elif layer == 0:
                self._runs.append(len(kept))

    def reuse(self) -> Float64:
        """`ActivationProfile.reuse`."""
        return np.asarray(self._again[:, 0] / np.maximum(self._again[:, 1], 1), np.float64)

    def unions(self, seed: int) -> tuple[Float64, Float64]:
        """`ActivationProfile.union_random` and `union_window`; the seed chooses the tokens. NaN: too few tokens."""
        layers, neurons = self.counts.shape[1:]
        rng = np.random.Generator(np.random.Philox(seed))
        draws = (self._random_draws(rng), self._window_draws(rng))
        result = np.full((2, layers, len(UNION_SIZES)), np.nan)
        for layer, parts in enumerate(self._kept):
            fired = np.unpackbits(np.concatenate(parts), axis=1, count=neurons).astype(bool)
            for which, sizes in enumerate(draws):
                for column, rows in enumerate(sizes):
                    if rows:
                        result[which, layer, column] = np.mean([fired[chosen].any(axis=0).mean() for chosen in rows])
        return result[0], result[1]

    def _random_draws(self, rng: np.random.Generator) -> list[list[NDArray[np.int64]]]:
        total = sum(self._runs)
        return [
            [rng.choice(total, size, replace=False) for _ in range(_DRAWS)] if size <= total else []
            for size in UNION_SIZES
        ]

    def _window_draws(self, rng: np.random.Generator) -> list[list[NDArray[np.int64]]]:
        """Rows in a row, never over the end of a window."""
        ends = np.cumsum(self._runs)
        draws = []
        for size in UNION_SIZES:
            starts = np.concatenate(
                [np.arange(end - run, end - size + 1) for end, run in zip(ends, self._runs, strict=True)]
            )
            chosen = rng.choice(starts, min(_DRAWS, len(starts)), replace=False)
            draws.append([np.arange(start, start + size) for start in chosen])
        return draws


class _Watcher:
    """Counts at the inputs of a model's linears as batches go by."""

    def __init__(self, model: Model, sites: Sequence[Site], settings: ProfileOptions, texts: int) -> None:
        self._sites = {site.name: (index, site) for index, site in enumerate(sites)}
        down = [site for site in sites if site.kind == "down"]
        if len({site.channels for site in down}) != 1:
            raise UnsupportedError("profile needs FFNs of one width in all layers; give a model that has them")
        self._settings = settings
        heads = model.config.num_attention_heads
        self._grams = {site.name: head_grams(model, site, heads) for site in sites if site.kind == "o"}
        self.neurons = NeuronCounts(texts, len(down), down[0].channels)
        self._norms = np.zeros((len(down), heads), np.float64)
        self._histograms = np.zeros((len(sites), OCTAVES), np.int64)

    def observe(self, batch: Batch, site: str, x: Float32) -> None:
        """Count one linear's input [M, channels]."""
        if site not in self._sites:
            return
        index, about = self._sites[site]
        sinks = self._settings.sink_tokens
        rows = batch.positions >= sinks
        x = x[rows]
        require_numbers(x, f"the input of {site}")
        exponents = (np.ascontiguousarray(x).view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)
        self._histograms[index] += np.bincount(exponents.ravel(), minlength=OCTAVES)
        if about.kind == "o":
            self._norms[about.layer] += head_norms(x, self._grams[site]).sum(axis=0)
        elif about.kind == "down":
            # A window of more tokens than a batch holds goes on in the next.
            continues = bool((batch.positions[rows][:1] > sinks).any())
            self.neurons.add(about.layer, x, batch.sequence[rows], continues=continues)

    def result(self, texts: tuple[str, ...]) -> ActivationProfile:
        """The profile of all that went by."""
        neurons = self.neurons
        union_random, union_window = neurons.unions(self._settings.seed)
        return ActivationProfile(
            texts=texts,
            tokens=tuple(neurons.tokens),
            counts=neurons.counts,
            magnitudes=neurons.magnitudes,
            head_norms=(self._norms / sum(neurons.tokens)).astype(np.float32),
            reuse=neurons.reuse(),
            union_random=union_random,
            union_window=union_window,
            sites=tuple(self._sites),
            histograms=self._histograms,
        )


def head_grams(model: Model, site: Site, heads: int) -> Float32:
    """W_hᵀ W_h of every head's columns W_h of the output projection, float32 [heads, head_dim, head_dim]."""
    (name,) = site.weights
    weight = model.weights.float32(name)
    parts = weight.reshape(len(weight), heads, -1).transpose(1, 2, 0)
    grams: Float32 = parts @ parts.swapaxes(1, 2)
    return grams


def head_norms(x: Float32, grams: Float32) -> Float32:
    """‖W_h x_h‖₂ for every row and head, float32 [M, heads]; x [M, heads · head_dim] is the input of `o`."""
    heads, dim, _ = grams.shape
    parts = x.reshape(len(x), heads, dim).swapaxes(0, 1)
    squares = ((parts @ grams) * parts).sum(axis=2).T
    norms: Float32 = np.sqrt(np.maximum(squares, 0))
    return norms


def _windows(llm: LLM, texts: Sequence[str | Path], settings: ProfileOptions) -> dict[str, TokenWindows]:
    """The windows of every text by name; those of a single text in two halves."""
    given: Sequence[str | Path | None] = texts or (None,)
    each = max(-(-settings.tokens // (len(given) * settings.seq_len)), 2 if len(given) == 1 else 1)
    cut: dict[str, TokenWindows] = {}
    for number, text in enumerate(given, 1):
        held_out = each // 2 if len(given) == 1 else 0
        windows = token_windows(
            lambda part: llm.tokenizer.encode(part, add_special=False),
            text,
            samples=each - held_out,
            held_out=held_out,
            length=settings.seq_len,
            seed=settings.seed,
            bos_id=llm.tokenizer.bos_id if llm.tokenizer.adds_bos else None,
        )
        if held_out:
            other = TokenWindows(windows.held_out, (), windows.source, windows.sha256, windows.length, windows.seed)
            return {f"{windows.source}, part 1": windows, f"{windows.source}, part 2": other}
        cut[windows.source if windows.source not in cut else f"{windows.source} ({number})"] = windows
    return cut
