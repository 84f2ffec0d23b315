"""Log-probabilities against their definition."""

import numpy as np

from thinfer.engine.logprobs import token_logprob


def test_they_are_a_log_softmax_in_double():
    logits = (np.random.default_rng(0).standard_normal(5000) * 9).astype(np.float32)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
    got = token_logprob(logits, 17, 5)
    assert abs(got.logprob - expected[17]) < 1e-6
    order = np.argsort(-wide, kind="stable")[:5]
    assert [token for token, _ in got.top] == order.tolist()
    assert np.allclose([value for _, value in got.top], expected[order], atol=1e-6)


def test_ties_come_by_id_and_none_are_extra():
    got = token_logprob(np.zeros(8, np.float32), 7, 3)
    assert [token for token, _ in got.top] == [0, 1, 2]
    assert token_logprob(np.zeros(8, np.float32), 7, 0).top == ()
    assert len(token_logprob(np.zeros(8, np.float32), 7, 100).top) == 8


def test_large_logits_do_not_overflow():
    got = token_logprob(np.array([3e38, -3e38, -np.inf], np.float32), 0, 3)
    assert got.logprob == 0.0
    assert got.top[2] == (2, -np.inf)
