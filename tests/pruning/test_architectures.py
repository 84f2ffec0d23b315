"""Every decoder of transformers is found structurally, replayed exactly and pruned; what cannot be says why."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from pruning.tiny_decoders import ARCHITECTURES, tiny_model, tiny_windows
from thinfer.core.pattern import SparsityPattern
from thinfer.errors import UnsupportedError
from thinfer.pruning.base import Pruned
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.pipeline import batches_of, inference_state, prune_model
from thinfer.pruning.replay import capture, head_logits, trace_blocks


class Record:
    """Prunes the last half of each row and keeps the statistics."""

    def __init__(self, needs=frozenset({"gram"})):
        self.needs = needs
        self.inputs = []

    def prune(self, weight, inputs, target):
        self.inputs.append(inputs)
        mask = torch.ones_like(weight, dtype=torch.bool)
        mask.view(-1)[: round(target.sparsity * weight.numel())] = False
        return Pruned(weight * mask, mask)


@pytest.fixture(params=ARCHITECTURES)
def model(request):
    return tiny_model(request.param)


@torch.no_grad()
def test_replayed_blocks_give_the_hidden_states_and_logits_of_the_model(model):
    windows = tiny_windows()
    stack = find_stack(model)
    with inference_state(model):
        states = []
        hooks = [
            block.module.register_forward_hook(
                lambda module, args, output: states.append(output if torch.is_tensor(output) else output[0])
            )
            for block in stack.blocks
        ]
        expected = model(input_ids=windows, use_cache=False)
        for hook in hooks:
            hook.remove()
        traces = trace_blocks(model, stack, windows[:1, :16])
        captured = capture(model, stack, traces, [windows[:3], windows[3:]])
        for block in stack.blocks:
            captured.hidden = [captured.run(block, batch, "cpu") for batch in range(2)]
            torch.testing.assert_close(torch.cat(captured.hidden), states[block.index])
        hidden = torch.cat(captured.hidden)
        torch.testing.assert_close(head_logits(model, stack, traces[-1].outputs, windows, hidden), expected.logits)


@torch.no_grad()
def test_prunable_are_exactly_the_matrices_of_the_blocks(model):
    stack = find_stack(model)
    inside = [
        parameter
        for name, parameter in model.named_parameters()
        if name.startswith(stack.name + ".")
        and parameter.ndim > 1
        and not name.endswith(("_bias", "gate.weight", "router.weight", "A_log", "conv1d.weight"))
    ]
    assert sum(matrix.size for matrix in stack.matrices.values()) == sum(parameter.numel() for parameter in inside)
    assert not stack.skipped
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for matrix in stack.matrices.values():
        assert matrix.read().shape == matrix.shape
        matrix.write(matrix.read())
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


@torch.no_grad()
@pytest.mark.parametrize("true_sequential", [False, True])
def test_statistics_are_those_of_the_pruned_model_and_budgets_are_exact(model, true_sequential):
    windows = tiny_windows()
    method = Record()
    rates = dict.fromkeys(find_stack(model).matrices, 0.3)
    result = prune_model(model, windows, rates, method=method, true_sequential=true_sequential)
    assert list(result.matrices) == list(rates) or true_sequential
    for name, notes in result.matrices.items():
        size = notes["shape"][0] * notes["shape"][1]
        assert round(notes["sparsity"] * size) == round(0.3 * size), name
    # The first matrices of the last block saw what the finished model feeds them.
    seen = dict(zip(result.matrices, method.inputs, strict=True))
    last = find_stack(model).blocks[-1]
    first = next(
        module for module in last.module.modules() if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    )
    inputs = []
    hook = first.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    model.eval()(input_ids=windows, use_cache=False)
    hook.remove()
    name = next(name for name, module in model.named_modules() if module is first)
    x = torch.cat(inputs).flatten(0, -2)
    torch.testing.assert_close(seen[name].gram, x.T @ x, rtol=1e-3, atol=1e-3)
    assert seen[name].rows == windows.numel()


@torch.no_grad()
def test_experts_see_only_their_tokens_and_matrices_of_one_input_share_it():
    model = tiny_model("mixtral")
    windows = tiny_windows()
    method = Record()
    matrices = find_stack(model).blocks[0].matrices
    names = prune_model(model, windows, {matrix.name: 0.0 for matrix in matrices}, method=method).matrices
    seen = dict(zip(names, method.inputs, strict=True))
    prefix = "model.layers.0."
    assert seen[f"{prefix}self_attn.q_proj"] is seen[f"{prefix}self_attn.v_proj"]
    rows = [seen[f"{prefix}mlp.experts.gate_up_proj[{index}]"].rows for index in range(4)]
    assert sum(rows) == 2 * windows.numel()
    # The router of the dense model says which.
    chosen = []
    gate = model.model.layers[0].mlp.gate
    hook = gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    model(input_ids=windows, use_cache=False)
    hook.remove()
    assert rows == torch.cat(chosen).flatten().bincount(minlength=4).tolist()


def test_shared_parameters_are_pruned_once_and_those_used_outside_not_at_all():
    model = tiny_model("llama")
    layers = model.model.layers
    layers[2].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    model.model.extra = nn.Linear(32, 64, bias=False)
    model.model.extra.weight = layers[1].mlp.gate_proj.weight
    stack = find_stack(model)
    assert "model.layers.0.mlp.up_proj" in stack.matrices
    assert set(stack.skipped) == {"model.layers.2.mlp.up_proj", "model.layers.1.mlp.gate_proj"}
    assert "lm_head" not in stack.matrices
    rates = dict.fromkeys(stack.matrices, 0.5)
    result = prune_model(model, tiny_windows(), rates, method=Record())
    assert result.skipped == stack.skipped
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_what_is_not_supported_says_why():
    config = AutoConfig.for_model("t5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=16)
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        find_stack(AutoModelForSeq2SeqLM.from_config(config))
    with pytest.raises(UnsupportedError, match="no list of blocks"):
        find_stack(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedError, match="no weight matrices"):
        find_stack(nn.ModuleDict({"blocks": nn.ModuleList([nn.LayerNorm(3)])}))
    block = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="one and the same"):
        find_stack(nn.ModuleDict({"blocks": nn.ModuleList([block, block])}))


def test_blocks_that_pass_more_than_hidden_states_are_refused():
    model = tiny_model("llama")
    memory = []

    def leak(module, args, output):
        before = memory.pop() if memory else 0
        memory.append(output)
        return output + before

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(leak)
    with pytest.raises(UnsupportedError, match=r"model\.layers\.2: run alone"):
        prune_model(model, tiny_windows(), {"model.layers.0.mlp.up_proj": 0.5}, method=Record())


def test_a_model_that_changes_hidden_states_between_blocks_is_refused():
    model = tiny_model("llama")
    second = model.model.layers[1]
    second.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    with pytest.raises(UnsupportedError):
        prune_model(model, tiny_windows(), {"model.layers.0.mlp.up_proj": 0.5}, method=Record())


def test_a_matrix_that_is_never_applied_is_an_error():
    model = tiny_model("llama")
    model.model.layers[0].mlp.spare = nn.Linear(32, 32)
    with pytest.raises(UnsupportedError, match="not seen"):
        prune_model(model, tiny_windows(), {"model.layers.0.mlp.spare": 0.5}, method=Record())
    prune_model(model, None, {"model.layers.0.mlp.spare": 0.5}, method=Record(frozenset()))
    assert int(model.model.layers[0].mlp.spare.weight.count_nonzero()) == 512


def test_the_stack_is_found_without_weights():
    with torch.device("meta"):
        model = tiny_model("llama")
    assert len(find_stack(model).matrices) == 21
    assert find_stack(model).blocks[0].matrices[0].shape == (32, 32)


def test_batches_are_of_one_length_and_bounded():
    assert [len(batch) for batch in batches_of(torch.zeros(9, 512))] == [4, 4, 1]
    assert [len(batch) for batch in batches_of(torch.zeros(2, 5000))] == [1, 1]
    assert SparsityPattern.parse("2:4").sparsity == 0.5
