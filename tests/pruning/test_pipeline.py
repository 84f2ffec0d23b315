"""The pruning run: resuming, refusing, exact budgets, and what it reports."""

import copy
import json
import weakref

import pytest
import torch

from pruning.tiny_decoders import tiny_model, tiny_windows
from thinfer.calibration.text import token_windows
from thinfer.core.pattern import SparsityPattern
from thinfer.errors import ArtifactError, CheckFailed, ResourceError, UsageError
from thinfer.pruning.base import Pruned, make
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.masks import keep
from thinfer.pruning.pipeline import observe_block, prune_model
from thinfer.pruning.resume import BlockStore
from thinfer.pruning.statistics import InputStatistics

UP = "model.layers.0.mlp.up_proj"


class ByGram:
    """Ranks by |w|·sqrt(G_jj) and adds a little of the Gram matrix, so that every bit of it matters."""

    needs = frozenset({"gram"})

    def __init__(self, stop_at=None):
        self.calls = 0
        self.stop_at = stop_at

    def prune(self, weight, inputs, target):
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        mask = keep(weight.abs() * inputs.gram.diagonal().sqrt(), target)
        return Pruned((weight + weight @ inputs.gram * 1e-5) * mask, mask, {"call": self.calls})


def rates_of(model, rate=0.5):
    return dict.fromkeys(find_stack(model).matrices, rate)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("true_sequential", [False, True])
def test_a_resumed_run_ends_with_the_bits_and_notes_of_an_uninterrupted_one(tmp_path, dtype, true_sequential):
    options = {"true_sequential": true_sequential, "workdir": tmp_path / "work"}
    whole, stopped, resumed = (tiny_model("qwen2").to(dtype) for _ in range(3))
    windows, rates = tiny_windows(130, 20), rates_of(whole)
    uninterrupted = prune_model(whole, windows, rates, method=ByGram(), true_sequential=true_sequential)
    with pytest.raises(KeyboardInterrupt):
        prune_model(stopped, windows, rates, method=ByGram(stop_at=17), **options)
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [
        "block-0000.safetensors",
        "block-0001.safetensors",
    ]
    method = ByGram()
    result = prune_model(resumed, windows, rates, method=method, **options)
    assert (method.calls, result.resumed) == (7, 2)
    assert same(weights(whole), weights(resumed))
    for name, notes in uninterrupted.matrices.items():
        other = result.matrices[name]
        assert {**notes, "seconds": 0, "call": 0} == {**other, "seconds": 0, "call": 0}
    again = tiny_model("qwen2").to(dtype)
    assert prune_model(again, windows, rates, method=ByGram(stop_at=1), **options).resumed == 3
    assert same(weights(whole), weights(again))


@pytest.mark.parametrize("changed", ["rates", "text", "model", "method", "order", "pattern"])
def test_work_of_another_run_is_refused(tmp_path, changed):
    def arguments(changed=""):
        model = tiny_model("llama", seed=int(changed == "model"))
        windows = tiny_windows(seed=int(changed == "text"))
        rates = rates_of(model) | ({UP: 0.25} if changed == "rates" else {})
        method = make("wanda", {"scope": "layer" if changed == "method" else "row"})
        pattern = SparsityPattern(2, 4) if changed == "pattern" else SparsityPattern()
        return (model, windows, rates), {
            "method": method,
            "pattern": pattern,
            "true_sequential": changed == "order",
            "workdir": tmp_path,
        }

    positional, options = arguments()
    prune_model(*positional, **options)
    positional, options = arguments(changed)
    before = weights(positional[0])
    with pytest.raises(ArtifactError, match="delete the folder"):
        prune_model(*positional, **options)
    assert same(before, weights(positional[0]))


def test_a_damaged_block_and_a_folder_that_cannot_be_are_clear_errors(tmp_path):
    (tmp_path / "block-0000.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(ArtifactError, match="damaged"):
        BlockStore(tmp_path, "key")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another folder"):
        BlockStore(tmp_path / "file", "key")
    store = BlockStore(tmp_path / "gone", "key")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ResourceError, match="cannot be written"):
        store.save(0, {"a": torch.zeros(1)}, {})


def test_only_the_named_matrices_change_and_the_model_is_left_as_it_was():
    model = tiny_model("mixtral").train()
    before = weights(model)
    seen = []
    tell = lambda *line: seen.append(line)  # noqa: E731
    prune_model(
        model, tiny_windows(), {UP.replace("mlp.up_proj", "self_attn.o_proj"): 0.5}, method=ByGram(), progress=tell
    )
    after = weights(model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == [
        "model.layers.0.self_attn.o_proj.weight"
    ]
    assert model.training
    assert model.get_experts_implementation() == tiny_model("mixtral").get_experts_implementation()
    assert seen[0][:2] == (0, 1)
    assert seen[-1] == (1, 1, "model.layers.0 is done")


def test_rate_0_changes_nothing_and_rate_1_leaves_nothing():
    model = tiny_model("gpt_neox")
    before = weights(model)
    prune_model(model, tiny_windows(), rates_of(model, 0.0), method=make("wanda"))
    assert same(before, weights(model))
    result = prune_model(model, tiny_windows(), rates_of(model, 1.0), method=make("wanda"))
    assert {notes["sparsity"] for notes in result.matrices.values()} == {1.0}


def test_the_layer_error_is_that_of_the_outputs():
    model = tiny_model("llama")
    dense = copy.deepcopy(model)
    windows = tiny_windows()
    inputs = []
    layer = dense.model.layers[0].mlp
    hook = layer.up_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    dense(input_ids=windows, use_cache=False)
    hook.remove()
    x = inputs[0].detach().flatten(0, 1).double()
    result = prune_model(model, windows, {UP: 0.5}, method=ByGram())
    before, after = (
        weight.detach().double() for weight in (layer.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    )
    expected = (x @ (before - after).T).square().sum() / (x @ before.T).square().sum()
    assert result.matrices[UP]["layer_error"] == pytest.approx(float(expected), rel=1e-3)
    approximate = prune_model(dense, windows, {UP: 0.5}, method=make("wanda")).matrices[UP]
    assert 0 < approximate["layer_error_diagonal"] < 1
    assert "layer_error" not in approximate


def test_seconds_and_memory_are_told_by_phase_and_the_result_is_ready_for_json():
    model = tiny_model("llama")
    result = prune_model(model, tiny_windows(), rates_of(model), method=ByGram())
    assert set(result.phases) == {"capture", "statistics", "prune", "replay"}
    assert all(phase["seconds"] > 0 and phase["peak_bytes"] > 1e6 for phase in result.phases.values())
    json.dumps([result.matrices, result.phases, result.skipped])
    magnitude = prune_model(tiny_model("llama"), None, rates_of(model), method=make("magnitude"))
    assert set(magnitude.phases) == {"prune"}


class Faulty:
    """Returns what a fault in a method might."""

    needs = frozenset()

    def __init__(self, fault):
        self.fault = fault

    def prune(self, weight, inputs, target):
        mask = keep(weight.abs(), target)
        result = weight * mask
        if self.fault == "nan":
            result[0, 0] = torch.nan
        if self.fault == "count":
            mask = torch.ones_like(mask)
        if self.fault == "not masked":
            result = weight.clone()
        return Pruned(result, mask)


@pytest.mark.parametrize("fault", ["nan", "count", "not masked"])
@pytest.mark.parametrize("pattern", [SparsityPattern(), SparsityPattern(2, 4)])
def test_a_result_that_is_not_what_was_asked_for_never_enters_the_model(fault, pattern):
    model = tiny_model("llama")
    before = weights(model)
    with pytest.raises(CheckFailed, match=UP):
        prune_model(model, None, {UP: 0.5}, method=Faulty(fault), pattern=pattern)
    assert same(before, weights(model))


@pytest.mark.parametrize(
    ("rates", "pattern", "message"),
    [
        ({"model.layers.9.mlp.up_proj": 0.5}, "unstructured", "no such matrix"),
        ({UP: 1.5}, "unstructured", "between 0 and 1"),
        ({UP: 0.6}, "2:4", "means sparsity 0.5"),
        ({UP: 0.4}, "3:5", "no multiple of 5"),
    ],
)
def test_impossible_requests_are_refused_before_any_work(rates, pattern, message):
    with pytest.raises(UsageError, match=message):
        prune_model(tiny_model("llama"), None, rates, method=make("magnitude"), pattern=SparsityPattern.parse(pattern))


def test_a_method_that_observes_needs_a_text():
    for windows in (None, [], torch.zeros(0, 4)):
        with pytest.raises(UsageError, match="calibration text"):
            prune_model(tiny_model("llama"), windows, {UP: 0.5}, method=make("wanda"))


def test_a_model_whose_states_are_not_finite_says_so():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    with pytest.raises(CheckFailed, match=r"q_proj: .* NaN or infinite"):
        prune_model(model, torch.full((2, 8), 7), rates_of(model), method=make("wanda"))


def test_short_documents_are_packed_and_more_than_128_windows_work(tmp_path):
    file = tmp_path / "short.jsonl"
    file.write_text("".join(json.dumps({"text": f"a short one {index}"}) + "\n" for index in range(400)))
    windows = token_windows(
        lambda text: [3 + ord(letter) % 60 for letter in text], file, samples=129, held_out=0, length=32
    )
    model = tiny_model("qwen2", max_position_embeddings=131072)
    result = prune_model(model, windows.windows, rates_of(model), method=make("wanda"))
    assert len(result.matrices) == 21


def test_the_run_over_a_block_ends_at_the_last_input_that_matters():
    """The matrix that is used last is not multiplied while inputs are observed."""
    from thinfer.pruning.replay import capture, trace_blocks

    model = tiny_model("llama").eval()
    stack = find_stack(model)
    traces = trace_blocks(model, stack, tiny_windows()[:1])
    captured = capture(model, stack, traces, [tiny_windows()])
    calls = []
    block = stack.blocks[0]
    block.module.mlp.down_proj.register_forward_hook(lambda *args: calls.append(1))
    statistics = observe_block(block, traces[0], block.matrices, captured, frozenset({"norm"}), "cpu")
    assert not calls
    assert statistics["model.layers.0.mlp.down_proj"].rows == 120
    assert isinstance(statistics[UP], InputStatistics)


@pytest.mark.parametrize(("true_sequential", "most"), [(False, 4), (True, 1)])
def test_gram_matrices_of_one_block_at_most_are_in_memory(true_sequential, most):
    """Four inputs in a block of llama: q, k, v; o; gate, up; down. Each is forgotten once its matrices are pruned."""
    alive = weakref.WeakSet()
    counts = []

    class Counting(ByGram):
        def prune(self, weight, inputs, target):
            alive.add(inputs)
            counts.append(len(alive))
            return super().prune(weight, inputs, target)

    model = tiny_model("llama")
    prune_model(model, tiny_windows(), rates_of(model), method=Counting(), true_sequential=true_sequential)
    assert len(counts) == 21
    assert max(counts) <= most
    # In the order q, k, v, o, gate, up, down each sum goes with its last matrix.
    assert counts[:7] == [1, 1, 1, 1, 1, 1, 1]
