"""The view of the dense model: norms as hooks see them, and losses as a whole pruned model gives them."""

import copy

import pytest
import torch
from torch.nn import functional

from pruning.tiny_decoders import tiny_model, tiny_windows
from thinfer.errors import UsageError
from thinfer.pruning.base import Pruned, Target
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.masks import keep
from thinfer.pruning.view import DenseView
from thinfer.pruning.wanda import Wanda


class ByGram:
    """Ranks weights by |w|·sqrt(G_jj), as Wanda does, from the Gram matrix."""

    needs = frozenset({"gram"})

    def prune(self, weight, inputs, target):
        mask = keep(weight.abs() * inputs.gram.diagonal().sqrt(), target)
        return Pruned(weight * mask, mask)


@torch.no_grad()
def model_loss(model, windows):
    logits = model(input_ids=windows, use_cache=False).logits[:, :-1]
    return float(functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


@torch.no_grad()
def dense_inputs(model, windows, names):
    seen = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda module, args, name=name: seen[name].append(args[0]))
        for name in names
    ]
    model(input_ids=windows, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts).flatten(0, -2) for name, parts in seen.items()}


def make_view(method, names=None, architecture="qwen2"):
    model, windows = tiny_model(architecture).eval(), tiny_windows(6, 40)
    return model, windows, DenseView(model, windows, names or list(find_stack(model).matrices), method=method)


def test_norms_and_means_are_those_of_the_dense_model():
    model, windows, view = make_view(Wanda())
    names = [name for block in view.blocks for name in block]
    for name, x in dense_inputs(model, windows, names).items():
        torch.testing.assert_close(view.inputs(name).norm, x.norm(dim=0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(view.inputs(name).mean, x.mean(0), rtol=1e-4, atol=1e-5)
        assert torch.equal(view.weight(name), model.get_submodule(name).weight)


@pytest.mark.parametrize("method", [Wanda(), ByGram()])
@pytest.mark.parametrize("architecture", ["llama", "opt", "gemma3_text"])
def test_loss_is_that_of_the_model_with_these_matrices_pruned(method, architecture):
    model, windows, view = make_view(method, architecture=architecture)
    before = copy.deepcopy(model.state_dict())
    assert view.loss({}) == pytest.approx(model_loss(model, windows), rel=1e-5)
    names = [view.blocks[1][0], view.blocks[2][-1], view.blocks[1][-1]]
    inputs = dense_inputs(model, windows, names)
    loss = view.loss(dict.fromkeys(names, 0.6))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name in names:
        weight = model.get_submodule(name).weight.data
        weight.mul_(keep(weight.abs() * inputs[name].norm(dim=0), Target(0.6)))
    assert loss == pytest.approx(model_loss(model, windows), rel=1e-5)
    assert loss != pytest.approx(view.loss({}), rel=1e-3)


def test_only_the_chosen_matrices_are_shown():
    model, _, view = make_view(Wanda(), ["model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"])
    assert view.blocks == [["model.layers.0.mlp.up_proj"], ["model.layers.2.mlp.up_proj"]]
    with pytest.raises(UsageError, match="none of the matrices"):
        view.loss({"model.layers.1.mlp.up_proj": 0.5})
    assert len(find_stack(model).matrices) == 21


def test_without_text_weights_are_seen_and_nothing_else():
    model = tiny_model("llama")
    name = "model.layers.0.mlp.up_proj"
    view = DenseView(model, None, [name], method=Wanda())
    assert view.weight(name).shape == (64, 32)
    with pytest.raises(UsageError, match="calibration text"):
        view.inputs(name)
    with pytest.raises(UsageError, match="calibration text"):
        view.loss({})
