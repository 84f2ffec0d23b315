"""ActivationProfile: figures of hand-made counts, and refusal of damaged sections."""

import numpy as np
import pytest

from thinfer.core.profile import OCTAVES, ActivationProfile, hot_set
from thinfer.errors import ArtifactError


def make(counts, tokens=(10,), **changes):
    counts = np.array(counts, np.int64)
    _, layers, _ = counts.shape
    fields = {
        "texts": tuple("ab"[: len(tokens)]),
        "tokens": tokens,
        "counts": counts,
        "magnitudes": counts.astype(np.float64),
        "head_norms": np.ones((layers, 2), np.float32),
        "reuse": np.zeros(layers),
        "union_random": np.zeros((layers, 7)),
        "union_window": np.zeros((layers, 7)),
        "sites": ("layers.0.down",),
        "histograms": np.zeros((1, OCTAVES), np.int64),
    }
    return ActivationProfile(**(fields | changes))


def test_figures_of_known_counts():
    found = make([[[10, 0, 5, 5], [8, 2, 0, 0]]])
    assert found.sparsity() == pytest.approx([0.5, 0.75])
    assert found.neurons_for(0.8).tolist() == [0.75, 0.25]
    # 30 firings: 24 are reached by 10 + 8 + 5 + 5.
    assert found.neurons_of_model_for(0.8) == 4 / 8
    assert found.curve(points=9) == pytest.approx(np.array([0, 10, 18, 23, 28, 30, 30, 30, 30]) / 30)
    assert found.expected_reuse() == pytest.approx([(1 + 0.25 + 0.25) / 2, (0.64 + 0.04) / 1])


def test_overlap_compares_the_hot_sets_of_texts():
    found = make([[[9, 9, 0, 0]], [[9, 0, 9, 0]]], tokens=(10, 10))
    assert found.overlap().tolist() == [[1.0, 0.5], [0.5, 1.0]]


def test_the_power_law_of_counts_that_follow_one():
    ranks = np.arange(1, 101)
    assert make([[np.round(10**6 * ranks**-0.7)]], tokens=(10**6,)).power_law() == pytest.approx(0.7, abs=0.01)
    assert np.isnan(make([[[0, 0]]]).power_law())


def test_hot_sets_are_the_fewest_and_ascending():
    assert hot_set(np.array([1, 6, 0, 3]), 0.8).tolist() == [1, 3]
    assert hot_set(np.array([2, 2, 2, 2]), 0.5).tolist() == [0, 1]
    assert hot_set(np.zeros(3), 0.8).tolist() == []
    assert hot_set(np.array([5, 5]), 1.0).tolist() == [0, 1]


def test_sections_return_what_was_stored_and_refuse_damage():
    found = make([[[1, 2]]])
    section, tensors = found.to_section()
    again = ActivationProfile.from_section(section, tensors)
    assert (again.counts == found.counts).all()
    with pytest.raises(ArtifactError, match="profile again"):
        ActivationProfile.from_section(section, {**tensors, "profile.reuse": np.zeros(5)})
    with pytest.raises(ArtifactError, match="damaged"):
        ActivationProfile.from_section({}, tensors)
    with pytest.raises(ArtifactError, match="number of tokens"):
        make([[[1, 2]]], tokens=(0,))
