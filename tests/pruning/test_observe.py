"""Inputs are seen in whatever way a module multiplies them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from thinfer.pruning.blocks import Matrix
from thinfer.pruning.observe import InputObserver

X = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
FLAT = X.flatten(0, 1)


def observed(matrices, run):
    seen = {}
    with torch.no_grad(), InputObserver(matrices, lambda matrix, x: seen.setdefault(matrix.name, []).append(x.clone())):
        result = run()
    return seen, result


@pytest.mark.parametrize(
    ("transposed", "product"),
    [
        (False, lambda w: functional.linear(X, w)),
        (False, lambda w: functional.linear(input=X, weight=w)),
        (False, lambda w: X @ w.T),
        (False, lambda w: torch.matmul(X, w.t())),
        (False, lambda w: FLAT.mm(w.T)),
        (False, lambda w: w @ X.mT),
        (True, lambda w: X @ w),
        (True, lambda w: X.matmul(other=w)),
        (True, lambda w: torch.addmm(torch.zeros(4), FLAT, w)),
        (True, lambda w: torch.addmm(torch.zeros(4), mat1=FLAT, mat2=w)),
        (True, lambda w: w.T @ X.mT),
    ],
)
def test_each_product_shows_its_input(transposed, product):
    weight = nn.Parameter(torch.randn(3, 4) if transposed else torch.randn(4, 3))
    with torch.no_grad():
        expected = product(weight)
    seen, result = observed([Matrix("w", weight, transposed=transposed)], lambda: product(weight))
    assert torch.equal(result, expected)
    (x,) = seen["w"]
    assert torch.equal(x.flatten(0, -2), FLAT)


def test_experts_are_seen_one_by_one_and_all_at_once():
    fused = nn.Parameter(torch.randn(2, 3, 4))
    experts = [Matrix(f"w[{index}]", fused, index, transposed=True) for index in range(2)]
    seen, _ = observed(experts, lambda: X[1] @ fused[torch.tensor(1)])
    assert list(seen) == ["w[1]"]
    seen, _ = observed(experts, lambda: torch.bmm(X, fused))
    assert all(torch.equal(seen[f"w[{index}]"][0], X[index]) for index in range(2))
    seen, _ = observed(experts[1:], lambda: torch.bmm(X, fused))
    assert list(seen) == ["w[1]"]


def test_other_weights_and_a_part_of_one_are_not_mistaken_for_it():
    weight = nn.Parameter(torch.randn(4, 3))
    matrices = [Matrix("w", weight)]
    assert observed(matrices, lambda: functional.linear(X, weight[:2]))[0] == {}
    assert observed(matrices, lambda: functional.linear(X, torch.randn(4, 3)))[0] == {}
    assert observed(matrices, lambda: weight * 2)[0] == {}


def test_what_is_seen_may_end_the_run():
    weight = nn.Parameter(torch.randn(4, 3))

    def stop(matrix, x):
        raise StopIteration

    with pytest.raises(StopIteration), InputObserver([Matrix("w", weight)], stop):
        functional.linear(X, weight)
