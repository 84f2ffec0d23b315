"""SparseGPT against exact OBS elimination: at every input the Hessian of those left is inverted anew, in float64."""

import numpy as np
import pytest
import torch

from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.base import Target, make
from thinfer.pruning.magnitude import Magnitude
from thinfer.pruning.sparsegpt import SparseGpt
from thinfer.pruning.statistics import InputStatistics
from thinfer.pruning.wanda import Wanda

OUTPUTS, INPUTS = 6, 24
RANDOM = torch.Generator().manual_seed(11)
WEIGHT = torch.randn(OUTPUTS, INPUTS, generator=RANDOM)
TOKENS = torch.randn(80, 8, generator=RANDOM) @ torch.randn(8, INPUTS, generator=RANDOM) + 0.3 * torch.randn(
    80, INPUTS, generator=RANDOM
)


def observed(tokens=TOKENS):
    inputs = InputStatistics(tokens.shape[1], frozenset({"gram"}))
    for part in tokens.split(33):
        inputs.add(part)
    return inputs


def naive(weight, tokens, damping, block, choose, rounded=lambda value, row, column: value):
    """Prune column by column by the textbook update δw = −w_j / [H⁻¹]_jj · H⁻¹[:, j] on the columns from j on.

    `choose(scores, first)` gives the kept of a block of columns; the scores are those of its start.
    """
    w = weight.double().numpy().copy()
    x = tokens.double().numpy()
    h = x.T @ x
    h += damping * np.mean(np.diag(h)) * np.eye(len(h))
    kept = np.ones(w.shape, bool)
    inverse_diagonal = np.array([np.linalg.inv(h[j:, j:])[0, 0] for j in range(len(h))])
    for j in range(len(h)):
        if j % block == 0:
            scores = w[:, j : j + block] ** 2 / inverse_diagonal[j : j + block]
            kept[:, j : j + block] = choose(scores, j)
        inverse = np.linalg.inv(h[j:, j:])
        for row in range(len(w)):
            value = rounded(w[row, j], row, j) if kept[row, j] else 0.0
            w[row, j:] -= (w[row, j] - value) / inverse[0, 0] * inverse[:, 0]
            w[row, j] = value
    return w, kept


def lowest(sparsity):
    def choose(scores, first):
        rows, columns = scores.shape
        zeros = round(sparsity * rows * (first + columns)) - round(sparsity * rows * first)
        kept = np.ones(scores.size, bool)
        kept[np.argsort(scores, axis=None)[:zeros]] = False
        return kept.reshape(scores.shape)

    return choose


def highest_in_group(n):
    def choose(scores, first):
        kept = np.zeros(scores.shape, bool)
        np.put_along_axis(kept, np.argsort(scores, axis=1)[:, -n:], True, axis=1)
        return kept

    return choose


def layer_error(pruned, tokens=TOKENS):
    return float(((pruned.weight - WEIGHT) @ tokens.T).square().sum() / (WEIGHT @ tokens.T).square().sum())


@pytest.mark.parametrize("block", [1, 5, 8, 24, 128])
@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.77])
def test_unstructured_equals_exact_elimination(block, sparsity):
    pruned = SparseGpt(block=block).prune(WEIGHT, observed(), Target(sparsity))
    weight, kept = naive(WEIGHT, TOKENS, 0.01, block, lowest(sparsity))
    np.testing.assert_array_equal(pruned.mask.numpy(), kept)
    np.testing.assert_allclose(pruned.weight.numpy(), weight, atol=2e-5)
    assert int((pruned.weight == 0).sum()) == round(sparsity * WEIGHT.numel())
    assert pruned.notes == {"damping": 0.01}


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (2, 3), (5, 12)])
@pytest.mark.parametrize("block", [7, 128])
def test_n_of_m_is_chosen_on_compensated_weights(n, m, block):
    pruned = SparseGpt(block=block).prune(WEIGHT, observed(), Target(1 - n / m, SparsityPattern(n, m)))
    weight, kept = naive(WEIGHT, TOKENS, 0.01, m, highest_in_group(n))
    np.testing.assert_array_equal(pruned.mask.numpy(), kept)
    np.testing.assert_allclose(pruned.weight.numpy(), weight, atol=2e-5)


def levels_of(w, bits, symmetric, group):
    """Round as the definition says: per row and group, in Python floats."""

    def rounded(value, row, column):
        part = w[row, column // group * group : (column // group + 1) * group]
        if symmetric:
            high = 2 ** (bits - 1) - 1
            scale = max(abs(part)) / high
            return min(max(round(value / scale), -high), high) * scale
        scale = (max(part.max(), 0) - min(part.min(), 0)) / (2**bits - 1)
        zero = round(-min(part.min(), 0) / scale)
        return (min(max(round(value / scale) + zero, 0), 2**bits - 1) - zero) * scale

    return rounded


@pytest.mark.parametrize(("bits", "symmetric", "group"), [(8, False, 0), (4, False, 0), (4, True, 8), (4, False, 12)])
def test_joint_quantisation_equals_exact_elimination_with_rounding(bits, symmetric, group):
    method = SparseGpt(bits=bits, symmetric=symmetric, group=group)
    pruned = method.prune(WEIGHT, observed(), Target(0.5, SparsityPattern(2, 4)))
    sparse, kept = naive(WEIGHT, TOKENS, 0.01, 4, highest_in_group(2))
    rounded = levels_of(sparse, bits, symmetric, group or INPUTS)
    weight, _ = naive(WEIGHT, TOKENS, 0.01, 4, lambda _, first: kept[:, first : first + 4], rounded)
    np.testing.assert_array_equal(pruned.mask.numpy(), kept)
    np.testing.assert_allclose(pruned.weight.numpy(), weight, atol=2e-5)
    assert pruned.notes["bits"] == bits
    assert pruned.notes["kept_but_rounded_to_zero"] == int(((weight == 0) & kept).sum())


def test_2_of_4_in_int4_keeps_the_mask_and_the_outputs():
    """Failure 22: 2:4 with int4 gave zeros and garbage."""
    target = Target(0.5, SparsityPattern(2, 4))
    sparse = SparseGpt().prune(WEIGHT, observed(), target)
    both = SparseGpt(bits=4, group=8).prune(WEIGHT, observed(), target)
    assert torch.equal(both.mask, sparse.mask)
    assert not both.weight[~both.mask].any()
    assert (both.mask.reshape(-1, 4).sum(1) == 2).all()
    assert len(both.weight[0, :8].unique()) <= 16
    of_sparse, of_both = ((TOKENS @ p.weight.T / 8).log_softmax(1) for p in (sparse, both))
    divergence = float((of_sparse.exp() * (of_sparse - of_both)).sum(1).mean())
    assert divergence < 0.005
    assert layer_error(both) < layer_error(sparse) + 0.05


def test_quantisation_alone():
    dense = SparseGpt(bits=8).prune(WEIGHT, observed(), Target(0.0))
    assert dense.mask.all()
    assert not torch.equal(dense.weight, WEIGHT)
    assert layer_error(dense) < 1e-3


def test_it_beats_wanda_and_is_no_better_than_least_squares_on_its_mask():
    pruned = SparseGpt(damping=1e-4).prune(WEIGHT, observed(), Target(0.5))
    best = torch.zeros_like(WEIGHT)
    for row, (mask, dense) in enumerate(zip(pruned.mask, WEIGHT, strict=True)):
        best[row, mask] = torch.linalg.lstsq(TOKENS[:, mask].double(), (TOKENS @ dense).double()).solution.float()
    bound = float(((best - WEIGHT) @ TOKENS.T).square().sum() / (WEIGHT @ TOKENS.T).square().sum())
    assert bound <= layer_error(pruned) < 0.75 * layer_error(Wanda().prune(WEIGHT, observed(), Target(0.5)))


def test_no_sparsity_changes_nothing_and_full_sparsity_leaves_nothing():
    assert torch.equal(SparseGpt().prune(WEIGHT, observed(), Target(0.0)).weight, WEIGHT)
    assert not SparseGpt().prune(WEIGHT, observed(), Target(1.0)).weight.any()


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
def test_inputs_of_one_direction_only(scale):
    """Failure 1: a Gram matrix of rank 1 is not positive definite; more damping helps, and the report says how much."""
    tokens = scale * torch.ones(40, 1) * torch.linspace(0.5, 2, INPUTS)
    usual = SparseGpt().prune(WEIGHT, observed(tokens), Target(0.5))
    without = SparseGpt(damping=0.0).prune(WEIGHT, observed(tokens), Target(0.5))
    assert usual.notes["damping"] == 0.01
    assert without.notes["damping"] > 0
    for pruned in (usual, without):
        assert torch.isfinite(pruned.weight).all()
        assert int((pruned.weight == 0).sum()) == WEIGHT.numel() // 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named(bad):
    """Failure 1, too: NaN was reported as a Cholesky factor that does not exist."""
    weight = WEIGHT.clone()
    weight[2, 3] = bad
    with pytest.raises(CheckFailed, match="a weight, or the score of a weight, is NaN or infinite"):
        SparseGpt().prune(weight, observed(), Target(0.5))
    with pytest.raises(CheckFailed, match="an input of a layer is NaN or infinite"):
        observed(TOKENS.where(TOKENS < 2, bad))


@pytest.mark.parametrize("tokens", [torch.zeros(0, INPUTS), torch.zeros(9, INPUTS)])
def test_an_expert_that_no_token_reached_is_not_erased(tokens):
    """Failure 26: H = 0 made every input a dead one, so that the whole matrix was set to zero."""
    pruned = SparseGpt().prune(WEIGHT, observed(tokens), Target(0.5))
    assert "magnitude" in pruned.notes["fallback"]
    assert int((pruned.weight == 0).sum()) == WEIGHT.numel() // 2
    assert WEIGHT.abs()[pruned.mask].min() > WEIGHT.abs()[~pruned.mask].max()


def test_an_expert_that_saw_three_tokens():
    pruned = SparseGpt().prune(WEIGHT, observed(TOKENS[:3]), Target(0.5))
    assert torch.isfinite(pruned.weight).all()
    assert layer_error(pruned, TOKENS[:3]) < 0.1 * layer_error(
        Magnitude().prune(WEIGHT, observed(), Target(0.5)), TOKENS[:3]
    )


def test_inputs_that_were_always_zero_lose_their_weights_first_and_the_rest_of_them_stays():
    tokens = TOKENS.clone()
    tokens[:, [4, 17]] = 0
    pruned = SparseGpt().prune(WEIGHT, observed(tokens), Target(2 / INPUTS))
    assert not pruned.mask[:, [4, 17]].any()
    assert torch.equal(pruned.weight[pruned.mask], WEIGHT[pruned.mask])
    fewer = SparseGpt().prune(WEIGHT, observed(tokens), Target(1 / INPUTS))
    dead = fewer.mask[:, [4, 17]]
    assert int((~dead).sum()) == OUTPUTS
    assert torch.equal(fewer.weight, WEIGHT * fewer.mask)
    assert WEIGHT[:, [4, 17]][dead].abs().min() > WEIGHT[:, [4, 17]][~dead].abs().max()


def test_matrices_of_one_input_share_the_factor(monkeypatch):
    calls = []
    cholesky = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *a: calls.append(1) or cholesky(*a))
    inputs = observed()
    first = SparseGpt().prune(WEIGHT, inputs, Target(0.5))
    gram = inputs.gram.clone()
    second = SparseGpt().prune(WEIGHT, inputs, Target(0.5))
    assert len(calls) == 1
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(inputs.gram, gram)
    inputs.add(TOKENS)
    SparseGpt().prune(WEIGHT, inputs, Target(0.5))
    assert len(calls) == 2


def test_zeros_have_no_sign():
    pruned = SparseGpt().prune(WEIGHT, observed(), Target(0.5))
    assert not pruned.weight[~pruned.mask].signbit().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block must be at least 1"),
        ({"damping": -1}, "damping must lie between"),
        ({"bits": 16}, "bits must be 0"),
        ({"bits": 4, "group": -1}, "group must be 0 or more"),
        ({"group": 8}, "give bits as well"),
        ({"symmetric": True}, "give bits as well"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(UsageError, match=message):
        make("sparsegpt", options)


def test_groups_and_patterns_that_do_not_fit():
    with pytest.raises(UsageError, match="group 7: a matrix has 24 inputs"):
        SparseGpt(bits=4, group=7).prune(WEIGHT, observed(), Target(0.5))
    with pytest.raises(UsageError, match="2:7: a matrix has 24 inputs"):
        SparseGpt().prune(WEIGHT, observed(), Target(0.5, SparsityPattern(2, 7)))
