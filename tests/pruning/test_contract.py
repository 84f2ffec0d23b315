"""What every file of pruning/ must do, whatever its formula: budgets, patterns, repeatability, odd calibration data.

Methods, refinements and allocations are found by their files: a new one is tested without an edit here.
"""

import dataclasses

import pytest
import torch

from pruning.tiny_decoders import tiny_model, tiny_windows
from thinfer.core.pattern import SparsityPattern
from thinfer.errors import CheckFailed, ThinferError, UsageError
from thinfer.pruning.base import Pruned, Target, make, names
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.masks import keep
from thinfer.pruning.pipeline import prune_model
from thinfer.pruning.statistics import InputStatistics
from thinfer.pruning.view import DenseView

METHODS, REFINEMENTS, ALLOCATIONS = names(), names("refine"), names("allocation")
ROWS, COLUMNS = 12, 32
PATTERNS = ["2:4", "4:8", "1:4", "3:4", "1:2", "5:16"]


@pytest.fixture(params=METHODS)
def method(request):
    return make(request.param)


@pytest.fixture(params=REFINEMENTS)
def refinement(request):
    return make(request.param, kind="refine")


@pytest.fixture(params=ALLOCATIONS)
def allocation(request):
    return make(request.param, kind="allocation")


def random_weight(seed=0):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def random_inputs(seed=1, rows=200):
    """Correlated inputs of different strengths around a mean that is not 0."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(COLUMNS, COLUMNS, generator=generator) * 0.3 + torch.eye(COLUMNS)
    strength = torch.rand(COLUMNS, generator=generator) + 0.5
    return torch.randn(rows, COLUMNS, generator=generator) @ mix * strength + 0.2


def statistics_of(x, needs):
    statistics = InputStatistics(COLUMNS, needs)
    statistics.add(x)
    return statistics


def error(weight, pruned, x):
    return float((x @ (weight - pruned.weight).T).square().sum())


def check(pruned, target):
    """The budget, the pattern, and that values and mask agree."""
    assert pruned.weight.shape == pruned.mask.shape == (ROWS, COLUMNS)
    assert pruned.weight.dtype == torch.float32
    assert pruned.mask.dtype == torch.bool
    assert torch.isfinite(pruned.weight).all()
    assert not pruned.weight[~pruned.mask].any()
    if target.pattern.structured:
        assert (pruned.mask.reshape(-1, target.pattern.m).sum(1) == target.pattern.n).all()
    else:
        assert int((~pruned.mask).sum()) == round(target.sparsity * pruned.mask.numel())


def start_for(weight, target):
    """A magnitude mask with the same number of zeros in each row."""
    mask = keep(weight.abs(), target)
    return Pruned(weight * mask, mask)


def n_of_m(text):
    pattern = SparsityPattern.parse(text)
    return Target(pattern.sparsity, pattern)


def test_options_are_fields_with_defaults():
    for kind, found in (("", METHODS), ("refine", REFINEMENTS), ("allocation", ALLOCATIONS)):
        assert found
        for name in found:
            item = make(name, kind=kind)
            assert dataclasses.is_dataclass(item)
            assert type(item).__dataclass_params__.frozen
            with pytest.raises(UsageError, match="has no option"):
                make(name, {"surely not an option": 1}, kind=kind)
            assert type(item).__doc__


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.1, 0.37, 0.5, 0.77, 0.999, 1.0])
def test_the_budget_is_exact(method, rate):
    weight = random_weight()
    before = weight.clone()
    target = Target(rate)
    pruned = method.prune(weight, statistics_of(random_inputs(), method.needs), target)
    check(pruned, target)
    assert torch.equal(weight, before)
    if rate == 0:
        assert torch.equal(pruned.weight, weight)
    if rate == 1:
        assert not pruned.weight.any()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_pattern_holds_in_every_group(method, pattern):
    target = n_of_m(pattern)
    check(method.prune(random_weight(), statistics_of(random_inputs(), method.needs), target), target)


@pytest.mark.parametrize("target", [Target(0.5), n_of_m("2:4")], ids=["half", "2:4"])
def test_the_same_input_gives_the_same_bits(method, target):
    one, two = (method.prune(random_weight(), statistics_of(random_inputs(), method.needs), target) for _ in range(2))
    assert torch.equal(one.mask, two.mask)
    assert torch.equal(one.weight, two.weight)
    assert one.notes == two.notes


@pytest.mark.parametrize("target", [Target(0.5), n_of_m("2:4")], ids=["half", "2:4"])
def test_it_beats_random(method, target):
    weight, x = random_weight(), random_inputs()
    pruned = method.prune(weight, statistics_of(x, method.needs), target)
    for seed in range(5):
        mask = keep(torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)), target)
        assert error(weight, pruned, x) < 0.8 * error(weight, Pruned(weight * mask, mask), x)


def odd_inputs():
    """Calibration data on which a formula might divide by 0 or a factorisation fail."""
    one = torch.randn(1, COLUMNS, generator=torch.Generator().manual_seed(3))
    dead = random_inputs()
    dead[:, ::3] = 0
    return {
        "rank 1": one.repeat(50, 1),
        "one token": one,
        "zero": torch.zeros(40, COLUMNS),
        "dead columns": dead,
        "tiny": random_inputs() * 1e-15,
        "huge": random_inputs() * 1e12,
        "one hot column": torch.eye(COLUMNS)[5].repeat(9, 1),
        "equal columns": one[:, :1].repeat(30, COLUMNS),
    }


@pytest.mark.parametrize("target", [Target(0.0), Target(0.55), n_of_m("2:4")], ids=["none", "part", "2:4"])
@pytest.mark.parametrize("case", odd_inputs())
def test_odd_calibration_gives_finite_weights_and_the_exact_budget(method, case, target):
    weight = random_weight()
    pruned = method.prune(weight, statistics_of(odd_inputs()[case], method.needs), target)
    check(pruned, target)
    assert target.sparsity == 0 or not torch.equal(pruned.weight, weight)


@pytest.mark.parametrize("target", [Target(0.5), n_of_m("2:4")], ids=["half", "2:4"])
def test_an_expert_that_saw_no_token_is_not_erased(method, target):
    pruned = method.prune(random_weight(), InputStatistics(COLUMNS, method.needs), target)
    check(pruned, target)
    assert torch.equal(pruned.weight != 0, pruned.mask)


@pytest.mark.parametrize("value", [0.0, 0.25])
@pytest.mark.parametrize("target", [Target(0.37), n_of_m("2:4")], ids=["part", "2:4"])
def test_ties_do_not_change_the_budget(method, target, value):
    weight = torch.full((ROWS, COLUMNS), value)
    check(method.prune(weight, statistics_of(torch.ones(7, COLUMNS), method.needs), target), target)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_an_error_and_never_a_result(method, bad):
    x, weight = random_inputs(), random_weight()
    x[3, 4] = bad
    with pytest.raises(CheckFailed):
        statistics_of(x, method.needs)
    weight[2, 5] = bad
    with pytest.raises(ThinferError):
        method.prune(weight, statistics_of(random_inputs(), method.needs), Target(0.5))


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_a_refinement_keeps_the_number_of_weights_in_each_row(refinement, rate):
    weight, target = random_weight(), Target(rate)
    start = start_for(weight, target)
    before = start.mask.clone()
    refined = refinement.refine(weight, start, statistics_of(random_inputs(), refinement.needs), target)
    check(refined, target)
    assert torch.equal(refined.mask.sum(1), before.sum(1))
    assert torch.equal(weight, random_weight())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_refinement_keeps_the_pattern(refinement, pattern):
    weight, target = random_weight(), n_of_m(pattern)
    inputs = statistics_of(random_inputs(), refinement.needs)
    check(refinement.refine(weight, start_for(weight, target), inputs, target), target)


def test_a_refinement_gives_the_same_bits_and_improves_a_random_mask(refinement):
    weight, x, target = random_weight(), random_inputs(), Target(0.5)
    mask = keep(torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(9)), target)
    start = Pruned(weight * mask, mask)
    one, two = (
        refinement.refine(weight, Pruned(weight * mask, mask.clone()), statistics_of(x, refinement.needs), target)
        for _ in range(2)
    )
    assert torch.equal(one.weight, two.weight)
    assert error(weight, one, x) < error(weight, start, x)


@pytest.mark.parametrize("target", [Target(0.55), n_of_m("2:4")], ids=["part", "2:4"])
@pytest.mark.parametrize("case", [*odd_inputs(), "no token"])
def test_a_refinement_survives_odd_calibration(refinement, case, target):
    weight = random_weight()
    inputs = InputStatistics(COLUMNS, refinement.needs)
    if case != "no token":
        inputs.add(odd_inputs()[case])
    check(refinement.refine(weight, start_for(weight, target), inputs, target), target)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("after", REFINEMENTS)
def test_every_refinement_follows_every_method_over_a_model(name, after):
    model = tiny_model("llama", num_hidden_layers=1)
    rates = dict.fromkeys(find_stack(model).matrices, 0.5)
    refinements = [make(after, kind="refine")]
    for pattern in (SparsityPattern(), SparsityPattern(2, 4)):
        prune_model(model, tiny_windows(), rates, method=make(name), refinements=refinements, pattern=pattern)


@pytest.fixture(scope="module")
def small_model():
    return tiny_model("qwen2", num_hidden_layers=2)


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.95, 1.0])
def test_an_allocation_spends_exactly_the_sparsity(allocation, small_model, sparsity):
    matrices = find_stack(small_model).matrices
    before = {name: value.clone() for name, value in small_model.state_dict().items()}
    view = DenseView(small_model, tiny_windows(), matrices, method=make("wanda"))
    rates = allocation.rates(view, sparsity)
    assert rates.keys() == matrices.keys()
    assert all(0 <= rate <= 1 for rate in rates.values())
    size = sum(matrix.size for matrix in matrices.values())
    zeros = sum(round(rates[name] * matrix.size) for name, matrix in matrices.items())
    assert abs(zeros - sparsity * size) <= 0.5 * len(matrices)
    assert all(torch.equal(before[name], value) for name, value in small_model.state_dict().items())
    again = DenseView(small_model, tiny_windows(), matrices, method=make("wanda"))
    assert type(allocation)().rates(again, sparsity) == rates


def test_an_allocation_survives_matrices_that_are_all_alike(allocation):
    model = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        for matrix in find_stack(model).matrices.values():
            matrix.write(torch.full(matrix.shape, 0.01))
    matrices = find_stack(model).matrices
    rates = allocation.rates(DenseView(model, tiny_windows(), matrices, method=make("wanda")), 0.5)
    assert sum(rates[name] * matrix.size for name, matrix in matrices.items()) == pytest.approx(
        0.5 * sum(matrix.size for matrix in matrices.values()), abs=0.5 * len(matrices)
    )


@pytest.mark.parametrize("name", names("structured"))
def test_a_structured_method_cuts_what_was_asked_for_and_leaves_a_working_model(name):
    results = []
    for _ in range(2):
        model = tiny_model("llama", num_hidden_layers=8, intermediate_size=96)
        size = sum(parameter.numel() for parameter in model.model.layers.parameters())
        result = make(name, kind="structured").prune(model, tiny_windows(), 0.3)
        left = sum(parameter.numel() for parameter in model.model.layers.parameters())
        assert result.sparsity == pytest.approx(1 - left / size, abs=1e-6)
        assert result.sparsity == pytest.approx(0.3, abs=0.1)
        with torch.no_grad():
            assert torch.isfinite(model(input_ids=tiny_windows()).logits).all()
        results.append(result)
    assert results[0].kept == results[1].kept
