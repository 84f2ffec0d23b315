import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinfer.engine.batch import Batch
from thinfer.engine.kv_cache import KvLayout
from thinfer.engine.options import EngineOptions
from thinfer.engine.reference import ReferenceExecutor
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model

LAYOUT = KvLayout(num_blocks=4, type="f32")


def _make(name: str, model: Any) -> Any:
    if name == "reference":
        return ReferenceExecutor(model, LAYOUT)
    from thinfer.engine.cpu import CpuExecutor

    options = EngineOptions(executor="cpu", threads=2, activations="f32", kv_type="f32")
    return CpuExecutor(model, LAYOUT, options, graph=model.graph)


@pytest.fixture(params=["reference", "cpu"])
def run_logits(request: pytest.FixtureRequest) -> Callable[[Path, np.ndarray], np.ndarray]:
    """Logits of all positions of a prompt, computed in two chunks by one executor in float mode."""
    if request.param == "cpu" and not all(
        importlib.util.find_spec(name) for name in ("thinfer._core", "thinfer.engine.cpu")
    ):
        pytest.skip("the native executor is not built")

    def run(path: Path, ids: np.ndarray) -> np.ndarray:
        checkpoint = open_checkpoint(path)
        executor = _make(request.param, load_model(checkpoint))
        # Out of order, so that an executor that takes positions for slots is found out.
        table = np.array([[2, 0]], np.int32)
        parts = []
        for first, last in ((0, 13), (13, len(ids))):
            rows = last - first
            batch = Batch(
                tokens=ids[first:last],
                positions=np.arange(first, last, dtype=np.int32),
                sequence=np.zeros(rows, np.int32),
                sparse=np.zeros(rows, np.uint8),
                out_rows=np.arange(rows, dtype=np.int32),
                block_table=table,
            )
            parts.append(np.array(executor.run(batch)))
        executor.close()
        checkpoint.close()
        return np.concatenate(parts)

    return run
