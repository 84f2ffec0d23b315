"""Perplexity on an engine whose predictions are known."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from thinfer.core.distribution import divergence, log_softmax
from thinfer.evals.perplexity import perplexity


@dataclass
class TableEngine:
    """Predicts the next token from the last one, by a table of logits [vocab, vocab]."""

    table: np.ndarray
    works: list = field(default_factory=list)
    selector: object = None

    def new_sequence(self):
        return object()

    def free(self, sequence):
        pass

    def step(self, works):
        self.works += works
        return [self.table[list(work.tokens)].astype(np.float32) for work in works]


@pytest.fixture
def table():
    return np.random.default_rng(1).normal(size=(11, 11)) * 2


def windows_of(count, ctx, seed=2):
    return np.random.default_rng(seed).integers(0, 11, size=(count, ctx)).tolist()


def test_equals_the_definition(table):
    windows = windows_of(3, 300)
    log_p = table - np.log(np.exp(table).sum(1, keepdims=True))
    nll = np.array([-log_p[w[i], w[i + 1]] for w in windows for i in range(len(w) - 1)])
    result = perplexity(TableEngine(table), windows)
    assert result.ppl == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert result.ppl_stderr == pytest.approx(math.exp(nll.mean()) * nll.std(ddof=1) / math.sqrt(len(nll)), rel=1e-6)
    assert (result.tokens, result.ctx, result.windows, result.bos) == (3 * 299, 300, 3, False)
    assert set(result.to_dict()) == {"ppl", "ppl_stderr", "tokens", "ctx", "windows", "bos"}


def test_uniform_predictions_have_the_vocabulary_as_perplexity():
    assert perplexity(TableEngine(np.zeros((11, 11))), windows_of(1, 50)).ppl == pytest.approx(11)


def test_bos_goes_before_every_window_and_is_not_scored(table):
    engine = TableEngine(table)
    windows = windows_of(2, 10)
    result = perplexity(engine, windows, bos_id=7)
    assert [list(work.tokens) for work in engine.works] == [[7], windows[0][:9], [7], windows[1][:9]]
    assert result.bos
    assert result.tokens == 18
    assert result.ppl == perplexity(TableEngine(table), windows).ppl


@pytest.mark.parametrize("decode", [False, True])
def test_decode_lets_the_thresholds_act(table, decode):
    engine = TableEngine(table)
    perplexity(engine, windows_of(1, 10), decode=decode)
    assert [work.sparse for work in engine.works] == [decode]


def test_a_model_against_itself(table):
    result = perplexity(TableEngine(table), windows_of(2, 200), reference=TableEngine(table))
    assert result.kl_mean == pytest.approx(0, abs=1e-9)
    assert result.kl_p99 == pytest.approx(0, abs=1e-9)
    assert result.top1_agreement == 1.0


def test_kl_is_that_of_the_reference_relative_to_the_model(table):
    other = table + np.random.default_rng(3).normal(size=table.shape)
    windows = windows_of(1, 100)
    q, p = (np.exp(t) / np.exp(t).sum(1, keepdims=True) for t in (other, table))
    expected = np.mean([(q[t] * np.log(q[t] / p[t])).sum() for t in windows[0][:-1]])
    result = perplexity(TableEngine(table), windows, reference=TableEngine(other))
    assert result.kl_mean == pytest.approx(expected, rel=1e-5)
    assert 0 < result.top1_agreement < 1


def test_divergence_where_the_reference_excludes_a_token():
    q = log_softmax(np.array([[0.0, 0.0, -np.inf]], np.float32))
    p = log_softmax(np.array([[0.0, 0.0, 0.0]], np.float32))
    assert divergence(q, p) == pytest.approx(math.log(1.5))


def test_log_softmax_of_large_logits():
    assert log_softmax(np.array([[1e4, 1e4]], np.float32)) == pytest.approx(math.log(0.5))
