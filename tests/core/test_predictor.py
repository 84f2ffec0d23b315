"""Predictor: what may be stored, and refusal of damage."""

from dataclasses import replace

import numpy as np
import pytest

from thinfer.core.predictor import Predictor
from thinfer.errors import ArtifactError


def make(**changes):
    fields = {
        "target": "neurons",
        "layer": 3,
        "aim": "layers.3.down",
        "source": "layers.3.gate_up",
        "kind": "lowrank",
        "type": "Q8_0",
        "inputs": 64,
        "rank": 32,
        "outputs": 5,
        "threshold": 0.25,
        "recall": 0.96,
        "density": 0.3,
        "true_density": 0.25,
        "first": np.zeros((32, 68), np.uint8),
        "second": np.zeros((5, 34), np.uint8),
        "bias": np.zeros(5, np.float32),
    }
    return Predictor(**(fields | changes))


def test_entries_return_what_was_stored():
    predictor = make()
    entry, tensors = predictor.to_entry()
    assert set(tensors) == {f"predictors.neurons.3.{part}" for part in ("first", "second", "bias")}
    again = Predictor.from_entry(entry, tensors)
    assert again.to_entry()[0] == entry
    assert (predictor.parameters, predictor.nbytes) == (32 * 69 + 5, 32 * 68 + 5 * 34 + 20)


def test_it_counts_with_recall_and_density_together():
    assert make().counts
    assert not replace(make(), recall=0.949).counts
    assert not replace(make(), density=0.376).counts
    assert replace(make(), density=0.375).counts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "toes"}, "unknown target"),
        ({"type": "Q5_K"}, "unknown target, kind or type"),
        ({"rank": 33}, "multiples of 32"),
        ({"outputs": 6}, "second has shape"),
        ({"first": np.zeros((32, 36), np.uint8)}, "first has shape"),
    ],
)
def test_impossible_predictors_are_refused(changes, message):
    with pytest.raises(ArtifactError, match=message):
        make(**changes)


def test_damaged_entries_are_refused():
    entry, tensors = make().to_entry()
    with pytest.raises(ArtifactError, match="damaged"):
        Predictor.from_entry({**entry, "layer": None}, tensors)
    with pytest.raises(ArtifactError, match="train the predictors again"):
        Predictor.from_entry(entry, {})
