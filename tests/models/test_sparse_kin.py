"""Sparse llamas against transformers' modules with their activations changed."""

import json

import numpy as np
import pytest

from models.sparse_kin import KIN, make_kin
from models.tiny_hf import hf_logits, tokens
from thinfer.errors import CheckpointError, UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model


@pytest.mark.parametrize("name", KIN)
def test_logits(name, run_logits, tmp_path):
    expected = hf_logits(make_kin(name, tmp_path), tokens())
    assert np.abs(expected).max() > 0.5
    assert np.abs(run_logits(tmp_path, tokens()) - expected).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "fields", "error", "message"),
    [
        ("fatrelu", {"hidden_act_param": None}, CheckpointError, "hidden_act_param must be fatrelu's threshold"),
        ("fatrelu", {"hidden_act_param": -1.0}, CheckpointError, "hidden_act_param"),
        ("fatrelu", {"hidden_act_param": "0.1"}, CheckpointError, "hidden_act_param"),
        ("bamboo", {"mamba_d_state": 16}, UnsupportedError, "mamba"),
        ("bamboo", {"hidden_act": "silu"}, UnsupportedError, "silu"),
        ("relufied_llama", {"norm_act": None}, UnsupportedError, "norm_act ''"),
        ("relufied_llama", {"model_type": "llama"}, UnsupportedError, "relufied_"),
    ],
)
def test_what_a_configuration_must_say(tmp_path, name, fields, error, message):
    make_kin(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(error, match=message):
        load_model(open_checkpoint(tmp_path))
