import numpy as np
import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.models.rope import SCALINGS, make_rope

SCALED = [
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 20},
]


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("scaling", SCALED, ids=lambda s: "-".join(map(str, s.values())))
def test_frequencies_equal_transformers(scaling, theta):
    config = AutoConfig.for_model(
        "llama",
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rope = make_rope(128, theta, scaling, 131072)
    np.testing.assert_allclose(rope.inv_freq, expected.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-9)


def test_old_key_for_the_kind():
    assert make_rope(64, 1e4, {"type": "linear", "factor": 2.0}, 128) == make_rope(
        64, 1e4, {"rope_type": "linear", "factor": 2.0}, 128
    )


@pytest.mark.parametrize("kind", ["longrope", "proportional", "su"])
def test_unknown_scaling_is_named_with_the_alternatives(kind):
    with pytest.raises(UnsupportedError, match=kind) as error:
        make_rope(64, 1e4, {"rope_type": kind}, 128)
    assert all(known in str(error.value) for known in SCALINGS)


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "linear"}, {"rope_type": "yarn", "factor": -1}, {"rope_type": "llama3"}]
)
def test_missing_or_impossible_values(scaling):
    with pytest.raises(CheckpointError, match="factor"):
        make_rope(64, 1e4, scaling, 128)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["factor", "original_max_position_embeddings", "beta_fast", "attention_factor"])
@pytest.mark.parametrize("value", [0, -1, 5e-324, 1e308, 10**400, float("nan"), True, "x", []])
def test_absurd_scalings_are_named(name, value):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, name: value}
    with pytest.raises(CheckpointError, match=name):
        make_rope(64, 10000.0, scaling, 4096)
