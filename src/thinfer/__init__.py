"""thinfer runs large language models on the weights that matter for each token.

Example:
    >>> from thinfer import LLM, SamplingParams  # doctest: +SKIP
    >>> LLM("model.gguf").generate("Once upon a time", SamplingParams(max_tokens=32)).text  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinfer.core.request import RequestOutput, StreamChunk
    from thinfer.core.sampling import SamplingParams
    from thinfer.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StreamChunk", "__version__"]

_HOMES = {
    "LLM": "thinfer.engine.llm",
    "RequestOutput": "thinfer.core.request",
    "SamplingParams": "thinfer.core.sampling",
    "StreamChunk": "thinfer.core.request",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that ``import thinfer`` and ``thinfer --help`` stay quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'thinfer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
