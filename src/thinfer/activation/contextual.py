"""Contextual sparsity, DejaVu's two-pass test: how few heads and neurons does a token need, if one knew which?

The first pass is dense and notes, token by token and layer by layer, the norm of what each head and each FFN neuron
adds to the residual stream: ``‖W_h x_h‖`` of the head's columns of the output projection, ``|a_i| · ‖W_i‖`` of the
neuron's column of the down projection. The second pass keeps only the largest and recomputes everything else from them.
Keys and values are written for all heads. arxiv.org/abs/2310.17157
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from thinfer.activation.masked_run import Bool, Comparison, Float32, RecordedSets, WindowRunner
from thinfer.activation.profile import head_grams, head_norms
from thinfer.activation.scores import block_sites, column_norms
from thinfer.calibration.text import cut_windows, read_text, require_context
from thinfer.data import evaluation_text
from thinfer.errors import UsageError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import Model, load_model
from thinfer.text.tokenizer import Tokenizer

What = Literal["heads", "neurons", "both"]
Progress = Callable[[str], None]
DEFAULT_KEEP = (0.75, 0.5, 0.35, 0.25, 0.15, 0.1)


@dataclass(frozen=True, slots=True)
class ContextualOptions:
    """What is left out, and on which text that is measured; invalid values raise UsageError.

    Attributes:
        what: kinds to leave out: "heads", "neurons", or "both" at the same share.
        keep: shares to keep of each, above 0 up to 1.
        ctx: tokens of a window.
        windows: how many windows, in a row from the start of the text.
        stride: take every so many of them.
        sink_tokens: first positions of a window, which stay dense.
    """

    what: Sequence[What] = get_args(What)
    keep: Sequence[float] = DEFAULT_KEEP
    ctx: int = 256
    windows: int = 4
    stride: int = 1
    sink_tokens: int = 4

    def __post_init__(self) -> None:
        unknown = [name for name in self.what if name not in get_args(What)]
        if unknown or not self.what:
            raise UsageError(f"what is {', '.join(unknown) or 'empty'}; choose from {', '.join(get_args(What))}")
        if not self.keep or not all(0 < share <= 1 for share in self.keep):
            raise UsageError(f"keep must be shares above 0 up to 1, such as 0.5, not {list(self.keep)}")
        if self.ctx <= self.sink_tokens + 1:
            raise UsageError(f"windows of {self.ctx} tokens hold nothing past {self.sink_tokens} sinks; use more")


def contextual(
    model: str | Path,
    *,
    text: Path | None = None,
    progress: Progress = lambda _: None,
    options: ContextualOptions | None = None,
) -> dict[str, Any]:
    """Measure quality against the share of heads and neurons that are kept, chosen with hindsight for every token.

    It is a bound: a predictor that looks ahead does worse.

    Args:
        model: a .gguf file, a Hugging Face folder, a thinfer folder (its base model is taken), or a hub id.
        text: UTF-8 text; None: the excerpt that ships with thinfer.
        progress: told what runs now.
        options: what and how much.

    Returns:
        "rows", one for each kind and share: "what", "kept", "ppl", "ppl_dense", "rise" and "rise_stderr" (nats a
        token), "kl_mean", "kl_p99", "top1_agreement", "tokens"; and the conditions: "model", "text", "ctx",
        "windows", "stride", "bos", "sink_tokens". Tokens after the sinks are scored.

    Raises:
        UsageError: the text is too short, or windows are too long for the model.
        CheckFailed: the model predicts NaN.

    Example:
        >>> contextual("model.gguf")["rows"][0]["kl_mean"]  # doctest: +SKIP
        0.012
    """
    settings = options or ContextualOptions()
    content = read_text(str(text)) if text is not None else evaluation_text()
    checkpoint = open_checkpoint(model)
    try:
        loaded = load_model(checkpoint)
        require_context(settings.ctx, loaded.config.max_position_embeddings, "-c")
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        bos = (tokenizer.bos_id,) if tokenizer.adds_bos and tokenizer.bos_id is not None else ()
        body = settings.ctx - len(bos)
        ids = tokenizer.encode(content, add_special=False)
        cut = cut_windows(ids, body, settings.windows, settings.stride)
        rows = measure(loaded, [[*bos, *window] for window in cut], settings, progress)
    finally:
        checkpoint.close()
    return {
        "model": str(model),
        "text": text.name if text is not None else "evaluation excerpt",
        "ctx": settings.ctx,
        "windows": len(cut),
        "stride": settings.stride,
        "bos": bool(bos),
        "sink_tokens": settings.sink_tokens,
        "rows": rows,
    }


def measure(
    model: Model, windows: Sequence[Sequence[int]], settings: ContextualOptions, progress: Progress = lambda _: None
) -> list[dict[str, Any]]:
    """The rows of `contextual` for windows of token ids of one length."""
    runner = WindowRunner(model, max(map(len, windows)), settings.sink_tokens)
    recorder = _Recorder(model)
    compared = {(what, share): Comparison() for what in settings.what for share in settings.keep}
    for number, window in enumerate(windows, 1):
        progress(f"window {number} of {len(windows)}: dense")
        dense = runner.run(window, observe=recorder.observe)
        for (what, share), comparison in compared.items():
            progress(f"window {number} of {len(windows)}: {what}, {share:.0%} kept")
            masked = runner.run(window, RecordedSets(recorder.largest(what, share)))
            comparison.add(window, dense, masked, settings.sink_tokens)
    return [{"what": what, "kept": share} | comparison.result() for (what, share), comparison in compared.items()]


class _Recorder:
    """Norms of what the heads and neurons of one window add; the next window's replace them."""

    def __init__(self, model: Model) -> None:
        sites = block_sites(model, model.graph)
        self._heads = model.config.num_attention_heads
        self._grams = {site.name: head_grams(model, site, self._heads) for site in sites if site.kind == "o"}
        self._columns = {site.name: column_norms(model, site) for site in sites if site.kind == "down"}
        self._norms: dict[str, Float32] = {}

    def observe(self, site: str, x: Float32) -> None:
        """Note the norms at one linear's input [T, channels]."""
        if site in self._grams:
            self._norms[site] = head_norms(x, self._grams[site])
        elif site in self._columns:
            self._norms[site] = np.abs(x) * self._columns[site]

    def largest(self, what: What, share: float) -> dict[str, Bool]:
        """For every site concerned, which channels [T, channels] belong to the largest heads or neurons."""
        masks: dict[str, Bool] = {}
        for site, norms in self._norms.items():
            heads = site in self._grams
            if what == ("neurons" if heads else "heads"):
                continue
            mask = top_share(norms, share)
            masks[site] = np.repeat(mask, self._grams[site].shape[1], axis=1) if heads else mask
        return masks


def top_share(values: Float32, share: float) -> Bool:
    """True for the largest entries of each row, ``share`` of them rounded up; values [rows, n].

    Example:
        >>> top_share(np.array([[1, 4, 2, 3]], np.float32), 0.5).tolist()
        [[False, True, False, True]]
    """
    width = values.shape[1]
    count = max(1, int(np.ceil(share * width - 1e-9)))
    mask = np.zeros(values.shape, bool)
    if count >= width:
        mask[:] = True
        return mask
    np.put_along_axis(mask, np.argpartition(values, width - count, axis=1)[:, width - count :], True, axis=1)
    return mask
