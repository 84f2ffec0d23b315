"""Models whose activation only thinfer knows: pruning and training say so, and what to take instead."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from models.tiny_gguf import MIXES, write_tiny_gguf
from pruning.test_checkpoint import engine_logits, torch_logits
from thinfer.cli.main import app
from thinfer.errors import UnsupportedError
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from thinfer.pruning.checkpoint import load_torch
from tiny_llama import write_tiny_llama

FATRELU, DRELU = (f"no activation '{name}'.*take the model it was made from" for name in ("fatrelu", "drelu"))
PRUNE = "prune --method magnitude --sparsity 0.5"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_act": "fatrelu", "hidden_act_param": 0.01},
            FATRELU,
        ),
        ({"hidden_act": "drelu"}, DRELU),
        ({"model_type": "bamboo", "hidden_act": "relu"}, DRELU),
        ({"model_type": "relufied_llama", "norm_act": "relu", "hidden_act": "relu"}, "prune its stage 1"),
    ],
)
@pytest.mark.parametrize("verb", [PRUNE, f"{PRUNE} --dry-run", "recover", "relufy"])
def test_a_model_that_only_thinfer_knows_names_a_way_and_leaves_nothing(tmp_path, change, message, verb):
    folder = write_tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    load_model(open_checkpoint(folder))  # thinfer's engine has no doubt about it
    result = CliRunner().invoke(app, [*verb.split(), "-m", str(folder), "-o", str(tmp_path / "out")])
    assert result.exit_code == UnsupportedError.exit_code
    assert re.search(message, result.stderr)
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"activation": "fatrelu", "activation_threshold": 0.01}, "no activation 'fatrelu'"),
        ({"activation": "relu", "norm_activation": "relu"}, "prune its stage 1"),
        ({"activation": "relu"}, None),
    ],
)
def test_a_gguf_file_of_a_relu_llama_is_loaded_where_transformers_has_the_activation(tmp_path, keys, message):
    write_tiny_gguf(tmp_path / "m.gguf", MIXES["Q8_0"], arch="thinfer-llama", keys=keys)
    if message is None:
        loaded = load_torch(tmp_path / "m.gguf").model
        assert loaded.config.hidden_act == "relu"
        expected = engine_logits(tmp_path / "m.gguf")
        np.testing.assert_allclose(torch_logits(loaded), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    else:
        with pytest.raises(UnsupportedError, match=message):
            load_torch(tmp_path / "m.gguf")
