import pytest

from thinfer.core.sampling import SamplingParams
from thinfer.errors import UsageError


def test_defaults_are_neutral():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -3.0},
        {"stop": ("a", "")},
        {"stop": "word"},
        {"stop": (1,)},
        {"seed": -1},
        {"seed": 1.5},
        {"top_k": 1.5},
        {"repetition_penalty": 10**400},
        {"max_tokens": 0},
        {"max_tokens": 2.0},
        {"max_tokens": 3, "min_tokens": 4},
        {"temperature": "x"},
        {"top_p": None},
        {"min_p": [0.1]},
        {"stop": 5},
        {"seed": "1"},
        {"max_tokens": "x"},
        {"max_tokens": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": "5"},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1.5]},
        {"logit_bias": [1]},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {5: 101}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: "x"}},
        {"logprobs": -1},
        {"logprobs": True},
        {"logprobs": 101},
        {"prompt_logprobs": 1.5},
        {"allowed": 5},
    ],
    ids=str,
)
def test_values_out_of_range_are_named(given):
    with pytest.raises(UsageError, match=list(given)[-1]):
        SamplingParams(**given)


def test_stop_may_be_a_list():
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_a_constraint_needs_its_end_token():
    with pytest.raises(UsageError, match="ignore_eos excludes allowed"):
        SamplingParams(allowed=lambda: None, ignore_eos=True)


def test_parameters_hash_and_keep_their_own_bias():
    bias = {3: 1.5}
    params = SamplingParams(logit_bias=bias, stop_token_ids=[2])
    bias[4] = 1.0
    assert params.logit_bias == {3: 1.5}
    assert params == SamplingParams(logit_bias={3: 1.5}, stop_token_ids=(2,))
    assert hash(params) == hash(SamplingParams(logit_bias={3: 1.5}, stop_token_ids=(2,)))
    assert params != SamplingParams(stop_token_ids=(2,))
