"""Attention with linear biases: a score loses what its key's distance is times the head's slope (arxiv 2108.12409)."""

from __future__ import annotations

import math

import numpy as np

from thinfer.core.config import ModelConfig


def alibi_slopes(config: ModelConfig) -> tuple[float, ...]:
    """The slopes of all heads, as float32 values.

    Powers of 2^(-8/n) for n heads, n a power of two; further heads get every other power for 2n. Falcon scales the bias
    like the scores.

    Example: with 8 heads `(0.5, 0.25, 0.125, ...)`.
    """
    heads = config.num_attention_heads
    whole = 1 << (heads.bit_length() - 1)
    slopes = [_power(whole, i + 1) for i in range(whole)]
    slopes += [_power(2 * whole, 2 * i + 1) for i in range(heads - whole)]
    scale = config.head_dim**-0.5 if config.model_type == "falcon" else 1.0
    return tuple(float(np.float32(slope * scale)) for slope in slopes)


def _power(heads: int, exponent: int) -> float:
    return math.pow(2.0, -8.0 * exponent / heads)
