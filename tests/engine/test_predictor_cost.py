"""When a predictor is worth its bytes."""

import pytest

from thinfer.engine.predictor_cost import pays


@pytest.mark.parametrize(
    ("reads", "named", "needed", "zeros", "worth"),
    [
        (20, 0.1, 0.1, True, True),
        (20, 1.0, 1.0, True, False),  # nothing is saved
        (0, 1.0, 1.0, True, False),
        (20, 1.0, 0.1, True, False),  # it names all: what fires is known without it
        (60, 0.5, 0.5, True, False),  # the gate of half of the neurons is less than the predictor
        (40, 0.5, 0.5, True, True),
        (60, 0.5, 0.5, False, True),  # without zeros it saves half of everything
        (151, 0.5, 0.5, False, False),
    ],
)
def test_a_predictor_pays_when_it_saves_bytes(reads, named, needed, zeros, worth):
    assert pays(reads, named, needed, 100, 200, zeros=zeros) is worth
