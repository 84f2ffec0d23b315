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
    ],
    ids=str,
)
def test_values_out_of_range_are_named(given):
    with pytest.raises(UsageError, match=list(given)[-1]):
        SamplingParams(**given)


def test_stop_may_be_a_list():
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
