"""Profile the FFNs of a real squared-ReLU model that is no decoder: metatronnanoguard, a text classifier.

    pip download --no-deps metatronnanoguard==0.1.0
    python examples/squared_relu_encoder.py metatronnanoguard-0.1.0-py3-none-any.whl -o nanoguard

Needs thinfer[prune] (PyTorch). The classifier (16.8M parameters, 4 layers of 512 x 2048, MIT licence) is read from the
wheel, which is neither installed nor run: the weights are loaded as tensors only, and the token table is listed from
its pickle without executing it. The forward pass is written out below. Windows of two texts go through it; what reaches
each down projection is counted as `thinfer profile` counts it, with its figures and pictures.
"""

import argparse
import io
import json
import pickletools
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, pre_tokenizers
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from thinfer.activation.profile import NeuronCounts, summary
from thinfer.activation.profile_plot import plot_profile
from thinfer.calibration.text import read_text
from thinfer.core.profile import OCTAVES, ActivationProfile
from thinfer.data import calibration_text

BEGIN = "<|reserved_0|>"


class Tokenizer:
    """Byte-pair encoding by rank, from the values that a pickled table lists."""

    def __init__(self, pickled: bytes) -> None:
        # The opcodes are read, never run: the table is keys and ranks by turns.
        values = [arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, bytes | str | int)]
        pairs = list(pairwise(values))
        self._ranks = {key: rank for key, rank in pairs if isinstance(key, bytes) and isinstance(rank, int)}
        self.begin = next(rank for key, rank in pairs if key == BEGIN)
        pattern = values[values.index("pat_str") + 1]
        self._split = pre_tokenizers.Split(Regex(pattern), "isolated")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [token for word, _ in self._split.pre_tokenize_str(text) for token in self._word(word.encode())]

    def _word(self, word: bytes) -> list[int]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while len(parts) > 1:
            ranks = [self._ranks.get(a + b, len(self._ranks)) for a, b in pairwise(parts)]
            best = int(np.argmin(ranks))
            if ranks[best] == len(self._ranks):
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return [self._ranks[part] for part in parts]


class Encoder:
    """The classifier without its head: gives the activations of every FFN."""

    def __init__(self, stored: bytes) -> None:
        checkpoint = torch.load(io.BytesIO(stored), weights_only=True, map_location="cpu")
        self._weights = {name: value.float() for name, value in checkpoint["model_state_dict"].items()}
        self.layers, self._heads = checkpoint["config"]["n_layer"], checkpoint["config"]["n_head"]
        self.neurons = self._weights["transformer.h.0.mlp.c_fc.weight"].shape[0]

    def activations(self, tokens: list[int]) -> Iterator[Tensor]:
        """relu(fc · norm(x))² of every layer, float32 [tokens, neurons]."""
        x = _norm(self._weights["transformer.wte.weight"][tokens])
        first = x
        for layer in range(self.layers):
            x = self._weights["resid_lambdas"][layer] * x + self._weights["x0_lambdas"][layer] * first
            x = x + self._attention(_norm(x), f"transformer.h.{layer}.attn")
            fired = (_norm(x) @ self._weights[f"transformer.h.{layer}.mlp.c_fc.weight"].T).relu().square()
            yield fired
            x = x + fired @ self._weights[f"transformer.h.{layer}.mlp.c_proj.weight"].T

    def _attention(self, x: Tensor, name: str) -> Tensor:
        q, k, v = (
            (x @ self._weights[f"{name}.c_{part}.weight"].T).view(len(x), self._heads, -1).transpose(0, 1)
            for part in "qkv"
        )
        y = scaled_dot_product_attention(_norm(_rotated(q)), _norm(_rotated(k)), v)
        return y.transpose(0, 1).reshape(len(x), -1) @ self._weights[f"{name}.c_proj.weight"].T


def _norm(x: Tensor) -> Tensor:
    return rms_norm(x, (x.shape[-1],))


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions of [heads, tokens, head_dim], halves of a head apart, base 10000."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(half) / half))
    # The model was trained with both rounded to bfloat16.
    cos, sin = angles.cos().bfloat16().float(), angles.sin().bfloat16().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


def profile(wheel: Path, texts: dict[str, str], windows: int, length: int) -> ActivationProfile:
    """The profile of the classifier's FFNs on windows of the texts."""
    with zipfile.ZipFile(wheel) as files:
        tokenizer = Tokenizer(files.read("nanoguard/assets/tokenizer.pkl"))
        encoder = Encoder(files.read("nanoguard/assets/model.pt"))
    counts = NeuronCounts(len(texts), encoder.layers, encoder.neurons)
    histograms = np.zeros((encoder.layers, OCTAVES), np.int64)
    for text in texts.values():
        counts.next_text()
        ids = tokenizer.encode(text[: 8 * windows * length])
        for start in range(0, min(windows * (length - 1), len(ids) - length), length - 1):
            with torch.inference_mode():
                for layer, fired in enumerate(encoder.activations([tokenizer.begin, *ids[start : start + length - 1]])):
                    x = fired.numpy()
                    counts.add(layer, x, np.zeros(len(x), np.int32))
                    histograms[layer] += np.bincount((x.view(np.uint32) >> 23).ravel(), minlength=OCTAVES)
    random, window = counts.unions(seed=0)
    return ActivationProfile(
        texts=tuple(texts),
        tokens=tuple(counts.tokens),
        counts=counts.counts,
        magnitudes=counts.magnitudes,
        head_norms=np.zeros((encoder.layers, 0), np.float32),
        reuse=counts.reuse(),
        union_random=random,
        union_window=window,
        sites=tuple(f"layers.{layer}.down" for layer in range(encoder.layers)),
        histograms=histograms,
    )


def main() -> None:
    """Profile, draw, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description="Profile the FFNs of metatronnanoguard.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--text", type=Path, help="a second text; default: this program's own source")
    parser.add_argument("--windows", type=int, default=8, help="windows of each text")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window, at most 512")
    given = parser.parse_args()
    second = given.text or Path(__file__)
    texts = {"shipped excerpt": calibration_text(), second.name: read_text(str(second))}
    found = profile(given.wheel, texts, given.windows, given.length)
    given.out.mkdir(parents=True, exist_ok=True)
    plot_profile(found, given.out, "metatronnanoguard, squared ReLU")
    print(json.dumps(summary(found), indent=2))


if __name__ == "__main__":
    main()
