"""Writes a ReLU model with random weights and a stated share of zeros as two GGUF files: a sparse one and a dense twin.

Both hold the same random Q4_0 tensors. One is a `thinfer-llama` with FATReLU, the other a `llama`, whose readers run
SiLU and every neuron. Rows of gate are independent, so after RMSNorm the pre-activations of a token are normal, with
the variance hidden · σ² where σ² is the mean square of a weight. The quantile of the stated share is the threshold, and
that share of neurons is exactly zero. No training is behind which ones those are. One matrix is held at a time.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from thinfer.errors import ResourceError, UsageError
from thinfer.models.gguf_config import SPARSE_LLAMA

_BLOCK, _BLOCK_BYTES = 32, 18
# Nibbles of 0 to 15 minus 8, all alike probable.
_MEAN_SQUARE = 21.5
_CONTEXT, _EPSILON = 4096, 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model, the share of neurons that do not fire, and the seed of its weights."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocab: int
    zeros: float
    seed: int

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.intermediate, self.heads) < 1 or self.seed < 0:
            raise UsageError("--layers, --hidden, --intermediate and --heads must be at least 1, --seed at least 0")
        head = self.hidden // self.heads
        if self.hidden % _BLOCK or self.intermediate % _BLOCK or head * self.heads != self.hidden or head % 2:
            raise UsageError(
                "--hidden and --intermediate must be multiples of 32, and heads of an even width fill hidden"
            )
        if self.vocab < len(_vocabulary(0)) or not 0.5 <= self.zeros < 1:
            raise UsageError(f"--vocab must be at least {len(_vocabulary(0))}, --zeros from 0.5 to below 1")

    @property
    def name(self) -> str:
        """Of the files, all sizes in it."""
        sizes = f"{self.layers}x{self.hidden}x{self.intermediate}-{self.heads}h-{self.vocab}v"
        return f"relu-{sizes}-{100 * self.zeros:g}-{self.seed}"

    @property
    def threshold(self) -> float:
        """FATReLU's, which the stated share of pre-activations stays below."""
        sigma = float(_scale(self.hidden)) * math.sqrt(_MEAN_SQUARE * self.hidden)
        return sigma * NormalDist().inv_cdf(self.zeros)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and inputs of every matrix, by its GGUF name."""
        hidden, neurons = self.hidden, self.intermediate
        found = {"token_embd": (self.vocab, hidden), "output": (self.vocab, hidden)}
        for layer in range(self.layers):
            parts = {f"attn_{part}": (hidden, hidden) for part in ("q", "k", "v", "output")}
            parts |= {"ffn_gate": (neurons, hidden), "ffn_up": (neurons, hidden), "ffn_down": (hidden, neurons)}
            found |= {f"blk.{layer}.{part}": sizes for part, sizes in parts.items()}
        return found


def _scale(inputs: int) -> np.float16:
    """So that a product has about the size of its inputs."""
    return np.float16(1 / math.sqrt(_MEAN_SQUARE * inputs))


def _vocabulary(size: int) -> list[tuple[str, int]]:
    """Tokens with their GGUF types: three special ones, the bytes, and names without meaning."""
    tokens = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    return tokens + [(f"▁w{number}", 1) for number in range(len(tokens), size)]


def write_files(shape: Shape, folder: Path) -> tuple[Path, Path]:
    """The sparse and the dense file in the folder, written unless they are there."""
    paths = (folder / f"{shape.name}.gguf", folder / f"{shape.name}.llama.gguf")
    if all(path.exists() for path in paths):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    size = 2 * sum(rows * inputs for rows, inputs in shape.matrices().values()) // _BLOCK * _BLOCK_BYTES
    if shutil.disk_usage(folder).free < 1.1 * size:
        raise ResourceError(f"{folder}: the two files take {size / 1e9:.1f} GB; free some space or choose another -o")
    parts = [path.with_suffix(f".{os.getpid()}.part") for path in paths]
    try:
        _write(shape, [GGUFWriter(part, arch) for part, arch in zip(parts, (SPARSE_LLAMA, "llama"), strict=True)])
        for part, path in zip(parts, paths, strict=True):
            part.replace(path)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)
    return paths


def _write(shape: Shape, writers: Sequence[GGUFWriter]) -> None:
    norms = [f"blk.{layer}.{part}_norm" for layer in range(shape.layers) for part in ("attn", "ffn")]
    ones = np.ones(shape.hidden, np.float32)
    for writer in writers:
        _add_keys(writer, shape)
        for name in ("output_norm", *norms):
            writer.add_tensor_info(f"{name}.weight", ones.shape, ones.dtype, ones.nbytes)
        for name, (rows, inputs) in shape.matrices().items():
            size, kind = rows * inputs // _BLOCK * _BLOCK_BYTES, GGMLQuantizationType.Q4_0
            # A float dtype, so that the package takes the shape for values and not for bytes.
            writer.add_tensor_info(f"{name}.weight", (rows, inputs), np.dtype(np.float32), size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _ in ("output_norm", *norms):
            writer.write_tensor_data(ones)
    rng = np.random.default_rng(shape.seed)
    for name, (rows, inputs) in shape.matrices().items():
        scale = np.float16(1 / math.sqrt(_MEAN_SQUARE)) if name == "token_embd" else _scale(inputs)
        raw = random_q4_0(rng, rows, inputs, scale)
        for writer in writers:
            writer.write_tensor_data(raw)
    for writer in writers:
        writer.close()


def _add_keys(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_layer_norm_rms_eps(_EPSILON)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(2)
    if writer.arch == SPARSE_LLAMA:
        writer.add_string(f"{SPARSE_LLAMA}.activation", "fatrelu")
        writer.add_float32(f"{SPARSE_LLAMA}.activation_threshold", shape.threshold)
    tokens, types = zip(*_vocabulary(shape.vocab), strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def random_q4_0(rng: np.random.Generator, rows: int, inputs: int, scale: np.float16) -> NDArray[np.uint8]:
    """Random Q4_0 rows, uint8 [rows, row_bytes]; weights have the mean 0 and the mean square 21.5 · scale²."""
    blocks = rows * inputs // _BLOCK
    raw = np.frombuffer(rng.bytes(blocks * _BLOCK_BYTES), np.uint8).reshape(blocks, _BLOCK_BYTES).copy()
    # Nibbles have the mean -0.5. Without signs that were one common direction, far larger than all others.
    signs = np.where(rng.integers(0, 2, blocks, np.uint8), scale, -scale).astype("<f2")
    raw[:, :2] = signs.view(np.uint8).reshape(blocks, 2)
    return raw.reshape(rows, -1)
