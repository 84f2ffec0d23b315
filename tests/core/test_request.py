from thinfer.core.request import Timings


def test_speeds():
    timings = Timings(prompt_tokens=10, prompt_seconds=2.0, decode_tokens=3, decode_seconds=0.5)
    assert timings.to_dict()["prompt_tokens_per_second"] == 5.0
    assert timings.decode_tokens_per_second == 6.0


def test_nothing_measured_is_no_division_by_zero():
    assert Timings(0, 0.0, 0, 0.0).to_dict()["decode_tokens_per_second"] == 0.0


def test_cached_tokens_are_no_speed():
    timings = Timings(10, 2.0, 3, 0.5, cached_tokens=6, queue_seconds=0.25)
    assert timings.prompt_tokens_per_second == 2.0
    assert timings.to_dict()["cached_tokens"] == 6
    assert timings.to_dict()["queue_seconds"] == 0.25
