"""The sampler against the definitions, step by step."""

import numpy as np
import pytest

from thinfer.core.sampling import SamplingParams
from thinfer.engine.sampler import Sampler, Scratch, _pick, largest
from thinfer.errors import CheckFailed


def draw(logits, count=4000, seed=0, **params):
    """Frequencies of `count` first tokens, each from its own request."""
    picked = [Sampler(SamplingParams(seed=seed + i, **params)).sample(logits) for i in range(count)]
    return np.bincount(picked, minlength=len(logits)) / count


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.array([0.0, 3.0, 3.0, -1.0], np.float32)
    assert Sampler(SamplingParams(temperature=0.0)).sample(logits) == 1


def test_temperature_follows_softmax():
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    expected = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
    assert np.abs(draw(logits, temperature=0.5) - expected).max() < 0.03


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("cut", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_extreme_temperatures_are_greedy_or_uniform(cut):
    logits = np.array([0.0, 3.0, -np.inf, 2.0], np.float32)
    assert set(np.flatnonzero(draw(logits, 50, temperature=1e-300, **cut))) == {1}
    assert 2 not in np.flatnonzero(draw(logits, 50, temperature=1e300, **cut))


def test_top_k_keeps_the_largest_and_ties_at_the_border():
    logits = np.array([1.0, 5.0, 4.0, 4.0, 0.0], np.float32)
    assert set(np.flatnonzero(draw(logits, 500, top_k=2))) == {1, 2, 3}
    assert set(np.flatnonzero(draw(logits, 500, top_k=1))) == {1}


def test_top_p_keeps_the_token_that_crosses_the_border():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert set(np.flatnonzero(draw(logits, 800, top_p=0.6))) == {0, 1}
    assert set(np.flatnonzero(draw(logits, 800, top_p=0.01))) == {0}


def test_top_p_is_relative_to_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # After top-k 2 the first token has 0.571 of the rest, so 0.5 is reached at once.
    assert set(np.flatnonzero(draw(logits, 500, top_k=2, top_p=0.5))) == {0}


def test_min_p_is_relative_to_the_largest():
    logits = np.log(np.array([0.6, 0.3, 0.07, 0.03], np.float32))
    assert set(np.flatnonzero(draw(logits, 800, min_p=0.2))) == {0, 1}
    assert set(np.flatnonzero(draw(logits, 800, min_p=0.2, top_k=3))) == {0, 1}


def test_wide_nucleus_over_a_large_vocabulary():
    logits = np.zeros(5000, np.float32)
    picked = draw(logits, 2000, top_p=0.5)
    assert np.flatnonzero(picked).max() < 2600


def test_repetition_penalty_as_hugging_face():
    sampler = Sampler(SamplingParams(temperature=0.0, repetition_penalty=2.0), prompt=[0, 3, 3])
    scores = sampler._penalised(np.array([4.0, 1.0, -1.0, -2.0], np.float32))
    assert scores.tolist() == [2.0, 1.0, -1.0, -4.0]


def test_presence_and_frequency_count_generated_tokens_only():
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler = Sampler(params, prompt=[1])
    logits = np.array([4.0, 1.0, 0.0], np.float32)
    assert [sampler.sample(logits) for _ in range(2)] == [0, 0]
    assert sampler._penalised(logits).tolist() == [3.0, 1.0, 0.0]
    assert logits.tolist() == [4.0, 1.0, 0.0]


def test_end_tokens_are_barred_until_min_tokens():
    sampler = Sampler(SamplingParams(temperature=0.0, min_tokens=2, max_tokens=8), eos_ids=[0])
    logits = np.array([9.0, 1.0], np.float32)
    assert [sampler.sample(logits) for _ in range(3)] == [1, 1, 0]


def test_seed_decides_and_is_reported():
    logits = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    first = Sampler(SamplingParams())
    second = Sampler(SamplingParams(seed=first.seed))
    assert [first.sample(logits) for _ in range(20)] == [second.sample(logits) for _ in range(20)]
    assert Sampler(SamplingParams()).seed != first.seed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unusable_logits_are_an_error(temperature, bad):
    logits = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(CheckFailed, match="logits"):
        Sampler(SamplingParams(temperature=temperature)).sample(logits)
    with pytest.raises(CheckFailed, match="logits"):
        Sampler(SamplingParams(temperature=temperature)).sample(np.full(3, -np.inf, np.float32))


@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 4000, 50_000])
@pytest.mark.parametrize("count", [1, 3, 40, 300, 1500, 4000])
def test_largest_equals_a_full_sort(size, count):
    scores = np.round(np.random.default_rng(size).standard_normal(size), 1).astype(np.float32)
    ids = largest(scores, count)
    order = np.lexsort((np.arange(size), -scores))
    last = scores[order[min(count, size) - 1]]
    assert ids.tolist() == [i for i in order if scores[i] >= last]


def test_largest_takes_both_zeros_for_equal_and_bears_infinities():
    scores = np.array([-np.inf, 0.0, -0.0, 1.0, -0.0, -1.0, np.inf, 0.0], np.float32)
    assert largest(scores, 2).tolist() == [6, 3]
    assert largest(scores, 3).tolist() == [6, 3, 1, 2, 4, 7]
    assert largest(scores, 8).tolist() == [6, 3, 1, 2, 4, 7, 5, 0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 3.0},
        {"min_p": 0.02},
        {"temperature": 0.8, "min_p": 0.1},
        {"top_p": 0.9},
        {"temperature": 1.7, "top_p": 0.99},
        {"top_p": 0.9, "min_p": 0.05},
        {"top_p": 0.8, "top_k": 50},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    ],
)
def test_native_softmax_changes_no_token(params):
    """Against NumPy alone, which is the definition; flat and peaked rows, some with tokens that cannot come."""
    if Scratch().softmax is None:
        pytest.skip("no instruction set with which it is used")
    rng = np.random.default_rng(3)
    numpy_alone = Scratch()
    numpy_alone.softmax = None
    counted = Scratch()
    softmax = counted.softmax
    calls = []

    class Counting:
        error = softmax.error

        def draw(self, *given):
            calls.append(softmax.draw(*given))
            return calls[-1]

        def total(self, *given):
            calls.append(softmax.total(*given))
            return calls[-1]

    counted.softmax = Counting()
    settings = SamplingParams(seed=11, max_tokens=10_000, **params)
    ours, theirs = (Sampler(settings, prompt=range(50), scratch=scratch) for scratch in (counted, numpy_alone))
    for turn in range(400):
        logits = (rng.standard_normal(5000 + turn % 3) * rng.choice([0.3, 2.0, 4.0])).astype(np.float32)
        if turn % 4 == 0:
            logits[rng.integers(0, 5000, 1000)] = -np.inf
        assert ours.sample(logits) == theirs.sample(logits)
    if "top_k" not in params:
        assert sum(call is not None for call in calls) > 200, "it is used"


def test_pick_covers_the_line_in_proportion():
    weights = np.zeros(300, np.float32)
    weights[[0, 130, 299]] = [1, 2, 3]
    picked = [_pick(weights, u) for u in np.linspace(0, 1, 600, endpoint=False)]
    counts = np.bincount(picked, minlength=300)
    assert np.abs(counts[[0, 130, 299]] - [100, 200, 300]).max() <= 1
    assert _pick(weights, np.nextafter(1, 0)) == 299


class Only:
    """A constraint that allows given ids and remembers what it was told."""

    def __init__(self, ids, size=4):
        self.told = []
        self._mask = np.zeros(size, bool)
        self._mask[ids] = True

    def mask(self):
        return self._mask

    def accept(self, token):
        self.told.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_comes_before_all_else(temperature):
    constraint = Only([1, 2])
    params = SamplingParams(temperature=temperature, seed=0, logit_bias={0: 100.0}, top_k=1, allowed=lambda: constraint)
    sampler = Sampler(params)
    logits = np.array([9.0, 1.0, 2.0, 0.0], np.float32)
    assert [sampler.sample(logits) for _ in range(3)] == [2, 2, 2]
    assert constraint.told == [2, 2, 2]
    assert logits.tolist() == [9.0, 1.0, 2.0, 0.0]


def test_a_mask_may_be_narrower_or_wider_than_the_logits():
    logits = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    for size, expected in ((3, 1), (9, 1)):
        assert (
            Sampler(SamplingParams(temperature=0.0, allowed=lambda n=size: Only([0, 1], n))).sample(logits) == expected
        )


def test_a_constraint_that_allows_only_the_end_beats_min_tokens():
    params = SamplingParams(temperature=0.0, min_tokens=4, allowed=lambda: Only([0]))
    assert Sampler(params, eos_ids=[0]).sample(np.array([1.0, 2.0, 3.0, 4.0], np.float32)) == 0
    both = SamplingParams(temperature=0.0, min_tokens=4, allowed=lambda: Only([0, 1]))
    assert Sampler(both, eos_ids=[0]).sample(np.array([3.0, 2.0, 3.0, 4.0], np.float32)) == 1


def test_a_constraint_without_any_token_and_nan_behind_one_are_errors():
    logits = np.array([0.0, 1.0, 2.0, np.nan], np.float32)
    with pytest.raises(CheckFailed, match="constraint allows no token"):
        Sampler(SamplingParams(allowed=lambda: Only([]))).sample(np.zeros(4, np.float32))
    with pytest.raises(CheckFailed, match="logits hold nan"):
        Sampler(SamplingParams(allowed=lambda: Only([1]))).sample(logits)


def test_each_sampler_makes_its_own_constraint():
    made = []
    params = SamplingParams(temperature=0.0, allowed=lambda: made.append(Only([1])) or made[-1])
    for _ in range(2):
        Sampler(params).sample(np.zeros(4, np.float32))
    assert [constraint.told for constraint in made] == [[1], [1]]


def test_logit_bias_adds_and_bans():
    logits = np.array([0.0, 3.0, 2.0], np.float32)
    assert Sampler(SamplingParams(temperature=0.0, logit_bias={0: 4, 1: -2.5})).sample(logits) == 0
    assert 1 not in np.flatnonzero(draw(logits, 200, logit_bias={1: -100}))


def test_stop_tokens_are_barred_until_min_tokens_too():
    sampler = Sampler(SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=[1]), eos_ids=[0])
    logits = np.array([2.0, 3.0, 1.0], np.float32)
    assert [sampler.sample(logits) for _ in range(2)] == [2, 1]
