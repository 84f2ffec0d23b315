"""The simple ops give the same bits on every instruction set, and rows beside a row do not change it."""

import importlib

import numpy as np
import pytest

from thinfer.core.graph import OPS

_core = pytest.importorskip("thinfer._core")


def arguments(name, rng):
    rows = 23
    x = rng.standard_normal((rows, 37), np.float32)
    qkv = rng.standard_normal((rows, 8 * 10), np.float32)
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 10}
    norms = {"q_norm": qkv[0, :10].copy(), "k_norm": qkv[1, :10].copy()}
    return {
        "rms_norm": {"x": x, "weight": x[0].copy(), "eps": 1e-6},
        "layer_norm": {"x": x, "weight": x[0].copy(), "bias": x[1].copy(), "eps": 1e-6},
        "positions": {"x": x, "table": x[:20].copy(), "positions": np.arange(rows, dtype=np.int32) % 18, "offset": 2},
        "head_norm": {"qkv": qkv, **norms, "eps": 1e-6, **heads},
        "rope": {
            "qkv": qkv,
            "positions": np.arange(0, rows * 977, 977, dtype=np.int32),
            "inv_freq": list(np.geomspace(1, 1e-4, 5)),
            "attention_factor": 1.1,
            **heads,
        },
        "part_rope": {
            "qkv": qkv,
            "positions": np.arange(rows, dtype=np.int32),
            "inv_freq": [1.0, 0.1, 0.01],
            "attention_factor": 1.0,
            **heads,
        },
        "silu": {"gate_up": np.hstack([x, x]) * 8, "act": "silu"},
        "gelu": {"gate_up": np.hstack([x, x]) * 8, "act": "gelu"},
        "gelu_tanh": {"gate_up": np.hstack([x, x]) * 8, "act": "gelu_tanh"},
        "relu": {"gate_up": np.hstack([x, x]), "act": "relu"},
        "drelu": {"gate_up": np.hstack([x, -x]), "act": "drelu"},
        "act_relu2": {"x": x, "act": "relu2"},
        "act_fatrelu": {"x": x, "act": "fatrelu", "threshold": 0.3},
        "act_gelu": {"x": x * 8, "act": "gelu"},
        "add": {"a": x, "b": x[::-1].copy()},
    }[name]


FUNCTIONS = {"part_rope": "rope", "act_relu2": "act", "act_fatrelu": "act", "act_gelu": "act"}


@pytest.mark.parametrize(
    "name",
    [
        *("rms_norm", "layer_norm", "positions", "head_norm", "rope", "part_rope", "silu", "gelu", "gelu_tanh", "relu"),
        *("drelu", "act_relu2", "act_fatrelu", "act_gelu", "add"),
    ],
)
def test_same_bits_on_every_instruction_set_and_row_by_row(isa, name):
    function = getattr(_core, FUNCTIONS.get(name, name), _core.gated_act)
    args = arguments(name, np.random.default_rng(0))
    expected = function("scalar", **args)
    actual = function(isa, **args)
    assert actual.tobytes() == expected.tobytes()
    rows = len(expected)
    per_row = {key for key, value in args.items() if isinstance(value, np.ndarray) and len(value) == rows}
    for row in (0, 11, rows - 1):
        one = {key: value[row : row + 1] if key in per_row else value for key, value in args.items()}
        assert function(isa, **one).tobytes() == expected[row : row + 1].tobytes()


def test_exponential_over_its_whole_range(isa):
    """silu(x) = x / (1 + e^-x) reaches every branch of the exponential."""
    x = np.concatenate([np.linspace(-120, 120, 100001), [-np.inf, np.inf, np.nan, 0.0, -0.0]]).astype(np.float32)
    actual = _core.gated_act(isa, np.hstack([x, np.ones_like(x)])[None], "silu")[0]
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = wide / (1 + np.exp(-wide))
    normal = np.abs(expected) > 1e-36  # smaller results are flushed to 0
    finite = np.isfinite(expected) & normal
    assert (np.abs(actual[finite] - expected[finite]) <= 4e-7 * np.abs(expected[finite])).all()
    assert (np.abs(actual[~normal & ~np.isnan(expected)]) <= 1e-36).all()
    assert actual[x == np.inf] == np.inf
    assert np.isnan(actual[np.isnan(x)]).all()


def test_every_kernel_function_has_a_reference():
    for name in OPS:
        assert importlib.import_module(f"thinfer.kernels.{name}").native
