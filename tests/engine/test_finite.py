"""Which float weights may be re-quantised, against NumPy's own conversion to float16."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from thinfer.engine.finite import require_finite
from thinfer.errors import CheckpointError

EDGES = np.array([0, 1, 65504, 65519.996, 65520, 65536, 7e4, 3e38, np.inf, np.nan, 1e-42], np.float32)


def source(kind, raw):
    return SimpleNamespace(type=kind, raw=raw, stored_name="w", checkpoint=SimpleNamespace(path=Path("m.gguf")))


def stored(values, kind):
    if kind == "F32":
        return values.view(np.uint8)
    if kind == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint8)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def value_of(raw, kind):
    if kind == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float32 if kind == "F32" else np.float16).astype(np.float32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_values_that_float16_holds_pass_and_others_are_refused(kind):
    for value in (*EDGES, *-EDGES):
        raw = stored(np.array([[0.5, value]], np.float32), kind)
        with np.errstate(over="ignore"):
            fits = np.isfinite(value_of(raw, kind).astype(np.float16)).all()
        if fits:
            require_finite(source(kind, raw), "q8")
        else:
            with pytest.raises(CheckpointError, match=r"m\.gguf: tensor w has NaN"):
                require_finite(source(kind, raw), "q8")


def test_a_value_far_down_a_large_tensor_is_found():
    values = np.zeros((5000, 512), np.float32)
    values[4321, 100] = np.nan
    with pytest.raises(CheckpointError, match="row 4321"):
        require_finite(source("F32", values.view(np.uint8)), "q4")


def test_quantised_types_are_none_of_its_business():
    require_finite(source("Q8_0", np.full((2, 34), 255, np.uint8)), "q8")
