"""Every architecture file against transformers: Hugging Face folder, GGUF F32 and GGUF Q8_0."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.sparse_kin import KIN
from models.tiny import GGUF_VARIANTS, NO_READER, TINY, variants
from models.tiny_hf import hf_logits, make_model, quantise, tokens, write_gguf
from thinfer.models.registry import architectures

TOLERANCE = 1e-3


def test_every_architecture_has_a_tiny_model():
    for name, module in architectures().items():
        for model_type in module.HF_TYPES:
            assert TINY.get(model_type) or model_type in KIN, (
                f"models/{name}.py: add a configuration of {model_type} to tests/models/tiny.py or sparse_kin.py"
            )
        types = set(module.HF_TYPES)
        assert not module.GGUF_ARCHS or any(t in types for t, _ in GGUF_VARIANTS), (
            f"models/{name}.py: add a GGUF variant to tests/models/tiny.py"
        )


@pytest.mark.parametrize(("model_type", "variant"), variants())
def test_hf_folder_gives_the_logits_of_transformers(model_type, variant, run_logits, tmp_path):
    model = make_model(model_type, variant)
    model.save_pretrained(tmp_path)
    expected = hf_logits(model, tokens())
    assert np.abs(expected).max() > 0.5
    assert np.abs(run_logits(tmp_path, tokens()) - expected).max() < TOLERANCE


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0], ids=lambda k: k.name)
@pytest.mark.parametrize(("model_type", "variant"), GGUF_VARIANTS)
def test_gguf_gives_the_logits_of_transformers_reader(model_type, variant, kind, run_logits, tmp_path):
    model = make_model(model_type, variant)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(quantise(parameter.numpy(), kind)))
    expected = hf_logits(model, tokens())
    assert np.abs(run_logits(path, tokens()) - expected).max() < TOLERANCE
    if (model_type, variant) not in NO_READER:
        assert np.abs(_transformers_gguf(path, model) - expected).max() < TOLERANCE


def _transformers_gguf(path: Path, model) -> np.ndarray:
    # transformers' reader does not know a head width of Qwen3 other than its default.
    given = {"head_dim": model.config.head_dim} if model.config.model_type == "qwen3" else {}
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager", **given
    )
    return hf_logits(loaded.eval(), tokens())
