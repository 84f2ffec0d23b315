"""Predictors of the tiny llama: made from its weights, and written as a folder."""

from contextlib import closing

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

import tiny_llama
from thinfer.core.artifact import Artifact
from thinfer.core.predictor import PREDICTOR_SECTION, Predictor
from thinfer.formats.checkpoint import open_checkpoint


def make_predictor(model, target, layer, *, source=None, threshold=0.0, **fields):
    """Neurons: the gate of low rank, so nearly perfect where it reads its own layer; heads: random."""
    rng = np.random.default_rng(layer + 10)
    if target == "neurons":
        gate = model.weights.float32(f"model.layers.{layer}.mlp.gate_proj.weight")
        left, values, right = np.linalg.svd(gate, full_matrices=False)
        first, second = right[:32], left[:, :32] * values[:32]
        aim, kind = "down", "gate_up"
    else:
        first = rng.standard_normal((32, tiny_llama.HIDDEN))
        second = rng.standard_normal((tiny_llama.HEADS, 32)) / 8
        aim, kind = "o", "qkv"
    stored = {"recall": 0.97, "density": 0.5, "true_density": 0.45} | fields
    return Predictor(
        target=target,
        layer=layer,
        aim=f"layers.{layer}.{aim}",
        source=f"layers.{layer if source is None else source}.{kind}",
        kind="lowrank",
        type="Q8_0",
        inputs=tiny_llama.HIDDEN,
        rank=32,
        outputs=len(second),
        threshold=threshold,
        first=quantize(first.astype(np.float32), GGMLQuantizationType.Q8_0),
        second=quantize(second.astype(np.float32), GGMLQuantizationType.Q8_0),
        bias=np.zeros(len(second), np.float32),
        **stored,
    )


def write_predictors(folder, base, predictors):
    with closing(open_checkpoint(base)) as checkpoint:
        fingerprint = checkpoint.fingerprint()
    tensors = {}
    for predictor in predictors:
        tensors |= predictor.to_entry()[1]
    section = {"sink_tokens": 6, "entries": [predictor.to_entry()[0] for predictor in predictors]}
    Artifact(str(base), fingerprint, {PREDICTOR_SECTION: section}, tensors).save(folder)
    return folder
