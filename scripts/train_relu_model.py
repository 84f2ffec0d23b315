"""Trains thinfer's own small ReLU model and its SiLU twin, from nothing, on Python source text.

    python scripts/train_relu_model.py -o runs/own       # again to continue; writes runs/own/relu and runs/own/silu

A llama decoder on bytes: 6 layers of 192, gated FFN of 768 neurons, 6 heads of 32 over 2 of keys and values, 256 bytes
and two special tokens, embedding and head tied: 3.3 million parameters. Both twins start from the same random weights,
see the same windows in the same order and have the same schedule; the ReLU model alone has an L1 penalty on its neurons
(ProSparse, arxiv 2402.13516), mean |neuron| / rms, whose strength grows along half a sine wave to `--l1`.

What it costs: a layer has 98,304 weights of attention and 442,368 of the FFN, so the blocks have 3.24 million and the
head 49,536. Forward and backward take 6 operations a weight and token, 19.8 million; attention over 256 tokens takes
12 · 192 · 256 a layer and token, 3.5 million in all where the half that is masked is computed too. That is 23.3 million
a token. 1200 steps of 8 windows of 256 tokens are 2.5 million tokens, a quarter of the text, and 5.7e13 operations: 24
minutes at the 40 GFLOP/s that two cores reach, for each twin; 39 and 36 minutes were measured on one core of a busy
machine (`--threads 1`). models/relu-bytes-3m is the ReLU model of that run.

Text: the standard library of the Python that runs this (without its tests), or the files of `--text`. One file in 20,
chosen by the hash of its name, is never trained on: bits per byte are measured there, on windows of 255 bytes behind
the begin token, as `thinfer eval perplexity --ctx 255` does (bits per byte are the logarithm of its perplexity to base
2).

Each twin is a Hugging Face folder in bfloat16 with its card, report.json (settings, text, curve, zeros of every layer)
and learning-curve.png. States are kept every `--checkpoint-minutes`; Ctrl-C keeps one too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from thinfer.activation.learning_curve import LearningCurve, can_plot, plot_curves
from thinfer.activation.relu_swap import Ffn, ZeroMeter, find_ffns
from thinfer.activation.relufy_loss import neuron_sizes
from thinfer.activation.relufy_options import half_sine
from thinfer.calibration.text import cut_windows
from thinfer.errors import ThinferError, UsageError
from thinfer.pruning.quality import torch_perplexity
from thinfer.pruning.recovery.language import TextBatches, lm_loss
from thinfer.pruning.recovery.trainer import TrainOptions, train
from thinfer.pruning.saving import round_weights, save_folder
from thinfer.pruning.writing import exclusive, writing

BOS, EOS = 256, 257
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT = 20
_STDLIB = "standard library"
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model."""

    hidden: int = 192
    neurons: int = 768
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2

    def make(self, activation: str, length: int, seed: int) -> LlamaForCausalLM:
        """A model with random weights: of one seed, the same for every activation."""
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=EOS + 1,
            hidden_size=self.hidden,
            intermediate_size=self.neurons,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            hidden_act=activation,
            max_position_embeddings=length,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            initializer_range=0.04,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
        return LlamaForCausalLM(config)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Windows of bytes behind a begin token to learn from, and windows of other files to measure on.

    Attributes:
        batches: of windows int16 [windows, length].
        held_out: windows of length - 1 bytes.
        facts: where the text comes from, its size and hash.
    """

    batches: TextBatches
    held_out: list[list[int]]
    facts: dict[str, Any]

    def __call__(self, number: int) -> Tensor:
        """Batch of that number, int64 [batch, length]."""
        return self.batches(number).long()


def documents(text: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Names and contents: the files of `text` in pieces, or else the standard library's modules."""
    for path in text:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"--text {path}: {error.strerror}") from error
        for first in range(0, len(content), _PIECE):
            yield f"{path.name}:{first}", content[first : first + _PIECE]
    if not text:
        root = Path(sysconfig.get_path("stdlib"))
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            # What describes this very machine is no text to learn.
            machine = name.name.startswith("_sysconfigdata") or name.parts[0].startswith("config-")
            if _LEFT_OUT.isdisjoint(name.parts) and not machine:
                yield name.as_posix(), path.read_bytes()


def corpus(text: list[Path], length: int, batch: int, seed: int, eval_windows: int) -> Corpus:
    """Cut the text; one document in 20 is held out."""
    learnt: list[bytes] = []
    kept: list[bytes] = []
    digest = hashlib.sha256()
    for name, content in documents(text):
        drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        (learnt if drawn % _HELD_OUT else kept).append(content)
        digest.update(name.encode() + b"\0" + content)
    if not learnt or not kept:
        raise UsageError(f"the text has too few files, or pieces of {_PIECE} bytes, to hold one out; give more")
    stream = np.concatenate([np.append(BOS, np.frombuffer(part, np.uint8)).astype(np.int16) for part in learnt])
    body = length - 1
    if body < 2:
        raise UsageError(f"--length {length}: windows hold a begin token and two bytes at least; use 3 or more")
    count = len(stream) // body
    if count < batch:
        raise UsageError(f"the text has {len(stream)} bytes, less than one batch of {batch * body}; give a longer one")
    windows = np.full((count, length), BOS, np.int16)
    windows[:, 1:] = stream[: count * body].reshape(count, body)
    source = ", ".join(path.name for path in text) or f"{_STDLIB} of Python {platform.python_version()}"
    rest = list(b"".join(kept))
    size = sum(map(len, learnt))
    facts = {"source": source, "sha256": digest.hexdigest(), "bytes": size, "held_out_bytes": len(rest)}
    # Spread over all held-out files, so that no one of them decides.
    stride = max(1, len(rest) // body // eval_windows)
    held_out = cut_windows(rest, body, min(eval_windows, max(1, len(rest) // (body * stride))), stride)
    return Corpus(TextBatches(torch.from_numpy(windows), batch, seed, source, digest.hexdigest()), held_out, facts)


def tokenizer_files() -> dict[str, str | bytes]:
    """A tokenizer whose token ids are the bytes of the text in UTF-8."""
    # The printable names that byte-level tokenizers give to bytes: printable ones keep theirs, others count up.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    backend = Tokenizer(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": backend.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


@dataclass(frozen=True, slots=True)
class SparseLoss:
    """The text's likelihood and, for `l1` > 0, the penalty at the strength of the batch's step."""

    ffns: tuple[Ffn, ...]
    l1: float
    steps: int

    def __call__(self, model: Any, batch: tuple[int, Tensor]) -> Tensor:
        """The loss of (number, ids), in nats a byte."""
        number, ids = batch
        if not self.l1:
            return lm_loss(model, ids)
        with neuron_sizes(self.ffns) as sizes:
            loss = lm_loss(model, ids)
        return loss + self.l1 * half_sine(number, self.steps) * torch.stack(sizes).mean()


def measure(model: Any, ffns: tuple[Ffn, ...], windows: list[list[int]]) -> dict[str, Any]:
    """Bits per byte, and the share of neurons at zero of each layer."""
    meter = ZeroMeter(ffns)
    with meter.counting():
        quality = torch_perplexity(model, windows, bos_id=BOS)
    error = quality.ppl_stderr / quality.ppl / math.log(2)
    return {"bits_per_byte": math.log2(quality.ppl), "stderr": error, "sparsity": meter.shares()}


def train_twin(activation: str, data: Corpus, training: TrainOptions, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model and write its folder; a finished one with the same settings is only read."""
    folder, states = options.out / activation, options.out / f".{activation}.training"
    shape = Shape(options.hidden, options.neurons, options.layers, options.heads, options.kv_heads)
    l1 = options.l1 if activation == "relu" else 0.0
    settings = {"activation": activation, "l1": l1, **asdict(shape), **asdict(training), "text": data.facts["sha256"]}
    settings |= {"batch": options.batch, "length": options.length}
    del settings["checkpoint_minutes"]
    if (folder / "report.json").is_file():
        report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        if report["settings"] != json.loads(json.dumps(settings)):
            raise UsageError(f"{folder}: was trained with other settings or text; choose another -o, or delete it")
        shutil.rmtree(states, ignore_errors=True)
        return report
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    model: Any = shape.make(activation, options.length, options.seed)
    ffns = find_ffns(model)
    curve = LearningCurve(states / "curve.json", f"{key} {len(data.held_out)} {options.eval_points}")
    points = {round(training.steps * n / options.eval_points) - 1 for n in range(1, options.eval_points + 1)}
    # On the way a part is enough.
    few = data.held_out[:: max(1, len(data.held_out) // 64)]

    def look(step: int) -> None:
        if step in points:
            found = measure(model, ffns, few)
            curve.add(step + 1, {"tokens": (step + 1) * options.batch * options.length, **found})
            say(
                f"{activation}: step {step + 1}: {found['bits_per_byte']:.4f} bits per byte, {zeros(found):.1f} % zeros"
            )

    with exclusive(states):
        result = train(
            model,
            SparseLoss(ffns, l1, training.steps),
            lambda number: (number, data(number)),
            training,
            measure=look,
            folder=states,
            key=key,
            resume=True,
            progress=lambda line: (
                say(f"{activation}: {line}") if line.startswith("continuing") or options.verbose else None
            ),
        )
    round_weights(model, "bfloat16")
    tokens = training.steps * options.batch * options.length
    report = {
        "settings": settings,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "text": data.facts,
        "tokens": tokens,
        "seconds": result.seconds,
        "tokens_per_second": tokens / result.seconds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "after": measure(model, ffns, data.held_out),
        "held_out_windows": len(data.held_out),
        "curve": curve.points,
        "training": result.curve,
    }
    files = tokenizer_files() | {"report.json": json.dumps(report) + "\n"}
    save_folder(model, folder, files=files, dtype="bfloat16")
    shutil.rmtree(states, ignore_errors=True)
    return report


def zeros(found: dict[str, Any]) -> float:
    """Mean over the layers of the share of neurons at zero, in percent."""
    shares: list[float] = found["sparsity"]
    return 100 * sum(shares) / len(shares)


def card(report: dict[str, Any], twins: dict[str, dict[str, Any]]) -> str:
    """The model card of one of the twins."""
    text, settings = report["text"], report["settings"]
    rows = "\n".join(
        f"| {name} | {twin['after']['bits_per_byte']:.4f} ± {twin['after']['stderr']:.4f} "
        f"| {zeros(twin['after']):.1f} % | {twin['seconds'] / 60:.0f} min |"
        for name, twin in twins.items()
    )
    licence = "The text is under the licence of Python (PSF-2.0). " if text["source"].startswith(_STDLIB) else ""
    layers = " | ".join(f"{100 * share:.1f}" for share in report["after"]["sparsity"])
    return f"""---
tags: [thinfer, relu]
library_name: transformers
---

# A small byte-level decoder with {settings["activation"]} FFNs

{report["parameters"]:,} parameters, {settings["layers"]} layers of {settings["hidden"]} with {settings["neurons"]}
gated neurons each; trained from random weights by `scripts/train_relu_model.py` of thinfer on
{report["tokens"]:,} tokens of the {text["source"]} (SHA-256 {text["sha256"][:16]}…); threads: {report["threads"]}.
Tokens are bytes; contexts of up to {settings["length"]} were trained. It writes text that looks like Python and is good
for nothing else: it is here so that sparsity, predictors and their quality can be shown on a real model.

| | bits per byte, held out | neurons at zero | training |
| --- | ---: | ---: | ---: |
{rows}

Both started from the same weights and saw the same text. Held out: {report["held_out_windows"]} windows of
{settings["length"] - 1} bytes of files that were not trained on. Zeros of each layer, in percent: {layers}.

{licence}Settings and curves are in report.json.

![learning curve](learning-curve.png)
"""


def describe(twins: dict[str, dict[str, Any]], out: Path) -> None:
    """Write the cards and the picture, which show both twins, into both folders."""
    for activation, report in twins.items():
        folder = out / activation
        (folder / "README.md").write_text(card(report, twins), encoding="utf-8")
        if can_plot():
            plot_curves(
                {name: twin["curve"] for name, twin in twins.items()},
                folder / "learning-curve.png",
                quality="bits_per_byte",
                label="bits per byte, held out",
                title=f"{report['parameters']:,} parameters, {report['text']['source']}",
            )


def say(line: str) -> None:
    """Print with the time."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of both results and their states")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files instead of the standard library")
    parser.add_argument("--steps", type=positive, default=1200)
    parser.add_argument("--batch", type=positive, default=8, help="windows of one step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window, with the begin token")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps; at most a tenth of all")
    parser.add_argument("--l1", type=float, default=0.1, help="strength of the penalty on the ReLU model's neurons")
    shape = Shape()
    for name, value in asdict(shape).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=value)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-points", type=positive, default=12)
    parser.add_argument("--eval-windows", type=positive, default=512, help="held-out windows of the final figures")
    parser.add_argument("--checkpoint-minutes", type=float, default=3.0)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--verbose", action="store_true", help="say every step")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train both, then write cards, picture and the comparison."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    try:
        training = TrainOptions(
            steps=options.steps,
            lr=options.lr,
            warmup=min(options.warmup, options.steps // 10),
            final_lr=0.1,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            seed=options.seed,
            checkpoint_minutes=options.checkpoint_minutes,
        )
        data = corpus(options.text, options.length, options.batch, options.seed, options.eval_windows)
        say(f"{data.facts['source']}: {data.facts['bytes']:,} bytes, {data.facts['held_out_bytes']:,} held out")
        with writing(options.out):
            options.out.mkdir(parents=True, exist_ok=True)
        twins = {activation: train_twin(activation, data, training, options) for activation in ("relu", "silu")}
        with writing(options.out):
            describe(twins, options.out)
    except KeyboardInterrupt:
        say("interrupted; the same command continues")
        return 130
    except ThinferError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    bits = {name: twin["after"]["bits_per_byte"] for name, twin in twins.items()}
    more = 100 * (bits["relu"] / bits["silu"] - 1)
    say(
        f"bits per byte: relu {bits['relu']:.4f}, silu {bits['silu']:.4f}: {more:+.2f} %; relu has"
        f" {zeros(twins['relu']['after']):.1f} % of its neurons at zero"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
