import numpy as np
import pytest

from thinfer.core.selector import ThresholdSelector
from thinfer.errors import ArtifactError

X = np.array([[0.0, -0.5, 0.6, np.nan, np.inf, -0.0]], np.float32)


def test_teal_drops_at_the_threshold_and_keeps_nan():
    keep = ThresholdSelector("teal", {"s": 0.5}).keep("s", X)
    assert keep.tolist() == [[False, False, True, True, True, False]]


def test_threshold_zero_drops_only_zeros():
    keep = ThresholdSelector("teal", {"s": 0.0}).keep("s", X)
    assert keep.tolist() == [[False, True, True, True, True, False]]


def test_unnamed_site_stays_dense():
    assert ThresholdSelector("teal", {"s": 0.5}).keep("other", X) is None


def test_wina_weighs_channels():
    scale = np.array([1, 2, 0.5, 1, 1, 1], np.float32)
    selector = ThresholdSelector("wina", {"s": 0.5}, {"s": scale})
    assert selector.keep("s", X).tolist() == [[False, True, False, True, True, False]]
    assert selector.keep("s", X[:, :2], columns=(2, 1)).tolist() == [[False, True]]


@pytest.mark.parametrize("threshold", [-0.1, float("nan")])
def test_impossible_thresholds(threshold):
    with pytest.raises(ArtifactError, match="threshold of s"):
        ThresholdSelector("teal", {"s": threshold})


def test_section_round_trip():
    selector = ThresholdSelector(
        "wina", {"s": 0.1}, {"s": np.ones(3, np.float32)}, sink_tokens=2, prefill=True, rates={"s": 0.3}
    )
    section, tensors = selector.to_section()
    back = ThresholdSelector.from_section(section, tensors | {"other": np.zeros(1, np.float32)})
    assert (back.method, back.thresholds, back.sink_tokens, back.prefill) == ("wina", {"s": 0.1}, 2, True)
    assert back.rates == {"s": 0.3}
    np.testing.assert_array_equal(back.channel_scale["s"], selector.channel_scale["s"])


def test_artifacts_without_rates_still_load():
    section, tensors = ThresholdSelector("teal", {"s": 0.1}).to_section()
    del section["rates"]
    assert ThresholdSelector.from_section(section, tensors).rates == {}


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_impossible_rates(rate):
    with pytest.raises(ArtifactError, match="rate of s"):
        ThresholdSelector("teal", {"s": 0.1}, rates={"s": rate})


@pytest.mark.parametrize(
    "section",
    [{}, {"method": "x", "thresholds": {}, "sink_tokens": 0, "prefill": 0}, {"method": "teal", "thresholds": 3}],
)
def test_damaged_section(section):
    with pytest.raises(ArtifactError):
        ThresholdSelector.from_section(section, {})


@pytest.mark.parametrize("change", [{"thresholds": {"s": 10**400}}, {"sink_tokens": float("inf")}], ids=str)
def test_numbers_too_large_are_a_damaged_artifact(change):
    section, tensors = ThresholdSelector("teal", {"s": 0.1}).to_section()
    with pytest.raises(ArtifactError, match="damaged"):
        ThresholdSelector.from_section({**section, **change}, tensors)
