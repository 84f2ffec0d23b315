"""A model opened to be observed: dense, on windows of one length."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from thinfer.calibration.text import require_context
from thinfer.engine.llm import LLM
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model


def open_dense(model: str | Path, length: int, engine: Mapping[str, Any]) -> LLM:
    """A model that runs windows of this many tokens, and none of what thinfer learned about it.

    Args:
        model: a .gguf file, a Hugging Face folder, a thinfer folder (its base model is taken), or a hub id.
        length: tokens of a window.
        engine: fields of EngineOptions.

    Raises:
        UsageError: the model was made for shorter texts, or an impossible option.

    Example:
        >>> open_dense("model.gguf", 512, {"threads": 2})  # doctest: +SKIP
    """
    with closing(open_checkpoint(model)) as checkpoint:
        require_context(length, load_model(checkpoint).config.max_position_embeddings)
    return LLM(model, sparsity=False, **({"max_model_len": length} | dict(engine)))
