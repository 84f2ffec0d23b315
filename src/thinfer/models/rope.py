"""Rotary frequencies with every static scaling that checkpoints name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinfer.core.config import MAX_HEAD_DIM, Rope
from thinfer.errors import CheckpointError, UnsupportedError

Float32 = NDArray[np.float32]

SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")

# Inside these no formula below overflows or divides by zero, and every real model is far inside.
_LEAST, _MOST = 1e-6, 1e12
_MOST_THETA = float(np.finfo(np.float32).max)


def make_rope(head_dim: int, theta: float, scaling: Mapping[str, Any], max_positions: int) -> Rope:
    """Frequencies of a head of width `head_dim`, in the words of Hugging Face's rope_scaling / rope_parameters.

    `dynamic` rescales only beyond the model's own context, which the engine does not pass, so it equals `default`.
    Raises UnsupportedError for another kind of scaling, CheckpointError for a missing or impossible value.

    Example: `make_rope(64, 10000.0, {"rope_type": "linear", "factor": 2.0}, 4096)`.
    """
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in SCALINGS:
        raise UnsupportedError(f"rope scaling {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise CheckpointError(f"rope needs an even head width of at most {MAX_HEAD_DIM}, not {head_dim}")
    if not 1 < theta <= _MOST_THETA:
        raise CheckpointError(f"rope needs a theta above 1 that fits a float32, not {theta}")
    inv_freq = default_frequencies(head_dim, theta)
    factor = 1.0
    if kind == "linear":
        inv_freq = inv_freq / np.float32(_positive(scaling, "factor"))
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling, max_positions)
    elif kind == "yarn":
        inv_freq, factor = _yarn(inv_freq, theta, scaling, max_positions)
    return Rope(tuple(float(f) for f in inv_freq), factor)


def default_frequencies(head_dim: int, theta: float) -> Float32:
    """Unscaled frequencies theta^(-2i/d), float32 [head_dim/2]."""
    exponent = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    frequencies: Float32 = np.reciprocal(np.power(np.float32(theta), exponent), dtype=np.float32)
    return frequencies


def _positive(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST <= value <= _MOST:
        raise CheckpointError(f"rope scaling: {key} must be a positive number of usual size, not {value!r}")
    return float(value)


def _llama3(inv_freq: Float32, scaling: Mapping[str, Any], max_positions: int) -> Float32:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    factor = _positive(scaling, "factor")
    low = _positive(scaling, "low_freq_factor")
    high = _positive(scaling, "high_freq_factor")
    context = _positive(scaling, "original_max_position_embeddings", max_positions)
    if high <= low:
        raise CheckpointError(f"rope scaling: high_freq_factor {high} must be above low_freq_factor {low}")
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    blended: Float32 = ((1 - smooth) * inv_freq / factor + smooth * inv_freq).astype(np.float32)
    return blended


def _yarn(inv_freq: Float32, theta: float, scaling: Mapping[str, Any], max_positions: int) -> tuple[Float32, float]:
    """Frequencies that turn often inside the trained context are kept, the others interpolated; arxiv 2309.00071."""
    context = _positive(scaling, "original_max_position_embeddings", max_positions)
    factor = _positive(scaling, "factor", max_positions / context)
    attention_factor = _magnitude(factor)
    if scaling.get("attention_factor") is not None:
        attention_factor = _positive(scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        mscale, all_dim = _positive(scaling, "mscale"), _positive(scaling, "mscale_all_dim")
        attention_factor = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    width = 2 * len(inv_freq)
    low = _dimension(_positive(scaling, "beta_fast", 32.0), width, theta, context)
    high = _dimension(_positive(scaling, "beta_slow", 1.0), width, theta, context)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # Equal ends would divide by zero; transformers widens them by the same amount.
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(len(inv_freq), dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
    blended = inv_freq / np.float32(factor) * ramp + inv_freq * (1 - ramp)
    return blended.astype(np.float32), attention_factor


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _dimension(rotations: float, width: int, theta: float, context: float) -> float:
    """Which frequency turns this often inside the trained context."""
    return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))
