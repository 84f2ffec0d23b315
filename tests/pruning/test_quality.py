"""Perplexity in transformers is that of `thinfer eval perplexity`, and an independent sum."""

import math

import numpy as np
import pytest
import torch

from thinfer.calibration.text import cut_windows
from thinfer.engine.options import EngineOptions
from thinfer.engine.runtime import Engine
from thinfer.errors import CheckFailed, UsageError
from thinfer.evals.perplexity import perplexity
from thinfer.formats.checkpoint import open_checkpoint
from thinfer.models.loader import load_model
from thinfer.pruning.checkpoint import load_torch
from thinfer.pruning.quality import token_losses, torch_perplexity


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_torch(tiny_folder).model


@pytest.fixture(scope="module")
def windows():
    ids = np.random.default_rng(0).integers(0, 256, 300).tolist()
    return cut_windows(ids, 100, 3)


@pytest.mark.parametrize("bos_id", [None, 256])
def test_same_as_the_engine(model, tiny_folder, windows, bos_id):
    ours = torch_perplexity(model, windows, bos_id=bos_id)
    options = EngineOptions(executor="reference", activations="f32", kv_type="f32", max_model_len=128)
    with Engine(load_model(open_checkpoint(tiny_folder)), options) as engine:
        theirs = perplexity(engine, windows, bos_id=bos_id)
    assert ours.ppl == pytest.approx(theirs.ppl, rel=1e-4)
    assert ours.ppl_stderr == pytest.approx(theirs.ppl_stderr, rel=1e-3)
    assert (ours.tokens, ours.ctx, ours.windows, ours.bos) == (297, 100, 3, bos_id is not None)


def test_losses_are_those_of_a_plain_softmax(model, windows):
    with torch.no_grad():
        logits = model(torch.tensor([[256, *windows[0]]])).logits[0].double()
    expected = [float(logits[i].logsumexp(0) - logits[i, windows[0][i]]) for i in range(1, 100)]
    np.testing.assert_allclose(token_losses(model, windows[0], 256), expected, rtol=1e-4)


def test_a_model_without_any_preference_has_the_perplexity_of_its_vocabulary(model, windows):
    head = model.lm_head.weight.data.clone()
    model.lm_head.weight.data.zero_()
    try:
        assert torch_perplexity(model, windows).ppl == pytest.approx(model.config.vocab_size)
        model.lm_head.weight.data.fill_(math.nan)
        with pytest.raises(CheckFailed, match="NaN"):
            torch_perplexity(model, windows)
    finally:
        model.lm_head.weight.data.copy_(head)


def test_the_mode_of_the_model_is_left(model, windows):
    model.train()
    torch_perplexity(model, windows[:1])
    assert model.training
    model.eval()


@pytest.mark.parametrize("windows", [[], [[1]]])
def test_nothing_to_score_is_refused(model, windows):
    with pytest.raises(UsageError, match="at least one window"):
        torch_perplexity(model, windows)
