"""Native softmax: the tokens of a running sum in float64, on every instruction set, or none at all."""

import numpy as np
import pytest

from thinfer import _core


def weights_of(scores, temperature, least=0.0):
    weights = np.exp((scores.astype(np.float64) - float(scores.max())) / temperature)
    return np.where(weights < least, 0, weights)


@pytest.mark.parametrize("size", [1, 15, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize(("temperature", "least"), [(1.0, 0.0), (0.5, 0.0), (1.0, 0.05)])
def test_draws_are_those_of_exact_sums(isa, size, temperature, least):
    softmax = _core.Softmax(isa)
    assert softmax.isa == isa
    rng = np.random.default_rng(size)
    scores = (rng.standard_normal(size) * 2).astype(np.float32)
    sums = np.cumsum(weights_of(scores, temperature, least))
    known = 0
    for uniform in (*rng.random(60), 0.0, np.nextafter(1, 0)):
        token = softmax.draw(scores, float(scores.max()), temperature, least, float(uniform))
        if token is not None:
            assert token == np.searchsorted(sums, uniform * sums[-1], side="right")
            known += 1
    assert known > 45
    total = softmax.total(scores, float(scores.max()), temperature)
    assert total == pytest.approx(weights_of(scores, temperature).sum(), rel=softmax.error)


def test_every_instruction_set_gives_the_same_total():
    scores = (np.random.default_rng(0).standard_normal(3000) * 3).astype(np.float32)
    assert len({_core.Softmax(isa).total(scores, float(scores.max()), 0.7) for isa in _core.isas()}) == 1


def test_what_is_not_certain_is_not_said():
    softmax = _core.Softmax()
    scores = np.zeros(4, np.float32)
    assert softmax.draw(scores, 0.0, 1.0, 0.0, 0.6) == 2
    assert softmax.draw(scores, 0.0, 1.0, 0.0, 0.5) is None, "on the border of two tokens"
    assert softmax.draw(scores, 0.0, 1.0, 0.0, 0.5 + 1e-6) is None
    scores[3] = -1.0
    assert softmax.draw(scores, 0.0, 1.0, float(np.exp(np.float32(-1.0))), 0.1) is None, "the last may count or not"
    assert softmax.draw(scores, 0.0, 1.0, 0.5, 0.9) == 2


@pytest.mark.parametrize(
    "given", [(np.nan, 1.0, 0.0, 0.5), (0.0, 0.0, 0.0, 0.5), (0.0, 1.0, -1.0, 0.5), (0.0, 1.0, 0.0, 1.0)]
)
def test_wrong_arguments(given):
    with pytest.raises(ValueError, match="must"):
        _core.Softmax().draw(np.zeros(3, np.float32), *given)
    with pytest.raises(TypeError):
        _core.Softmax().draw(np.zeros(3, np.float64), 0.0, 1.0, 0.0, 0.5)
