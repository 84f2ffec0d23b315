"""How transformers is made to keep quiet, and what it need not know of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' bars and hints; what matters is an exception or a note."""
    import transformers.utils

    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def forget_storage(config: Any) -> None:
    """Take out what a configuration says on compressed weights: in memory, and as saved, they are plain and dense."""
    for name in ("quantization_config", "compression_config", "sparsity_config"):
        if hasattr(config, name):
            delattr(config, name)
