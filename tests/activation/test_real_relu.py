"""The ReLU-fied SmolLM2, where a folder of it is named: its zeros, and what half of its neurons cost."""

import os
from pathlib import Path

import pytest

from thinfer.activation.contextual import ContextualOptions, contextual
from thinfer.activation.profile import profile

pytest.importorskip("thinfer._core")
pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder():
    name = os.environ.get("THINFER_RELU_MODEL")
    if not name:
        pytest.skip("THINFER_RELU_MODEL names no folder of a ReLU-fied SmolLM2-135M")
    return Path(name)


def test_two_thirds_of_the_activations_are_zero(folder, tmp_path):
    found, report = profile(folder, tmp_path, tokens=512, seq_len=256, threads=1)
    assert report["exact_zeros"] == pytest.approx(0.68, abs=0.04)
    assert found.sparsity().argmin() == 0
    assert report["reuse"] > report["reuse_by_chance"] + 0.05


def test_half_of_the_neurons_is_nearly_everything(folder):
    options = ContextualOptions(what=("neurons",), keep=(0.5,), ctx=64, windows=1)
    (row,) = contextual(folder, options=options)["rows"]
    assert row["kl_mean"] < 0.02
    assert row["top1_agreement"] > 0.9
