"""Adapters start as nothing, are trained alone, and merge into what was trained, zeros kept."""

import pytest
import torch

from pruning.tiny_decoders import tiny_model, tiny_windows
from thinfer.errors import UsageError
from thinfer.pruning.blocks import find_stack
from thinfer.pruning.recovery.language import lm_loss
from thinfer.pruning.recovery.lora import Adapters, LoraOptions
from thinfer.pruning.recovery.masked import require_zeros, zero_masks
from thinfer.pruning.recovery.trainer import TrainOptions, train

ARCHITECTURES = ["llama", "gpt2", "mixtral", "falcon", "gpt_oss"]
OPTIONS = TrainOptions(steps=4, lr=0.02)


def pruned_model(architecture):
    model = tiny_model(architecture).eval()
    for matrix in find_stack(model).matrices.values():
        values = matrix.read()
        values[values.abs() < values.abs().median()] = 0
        matrix.write(values)
    return model


def batches(number):
    return tiny_windows(2, 12, seed=number)


def logits(model):
    with torch.no_grad():
        return model(input_ids=tiny_windows(2, 12, seed=77), use_cache=False).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_masklora_merges_into_exactly_what_was_trained(architecture):
    """Failure row 10."""
    model = pruned_model(architecture)
    masks, dense = zero_masks(model), logits(model)
    names = [name for name, _ in model.named_parameters()]
    types = [type(module) for module in model.modules()]
    adapters = Adapters(model, LoraOptions(masked=True))
    assert torch.allclose(logits(model), dense, atol=1e-5)
    curve = train(model, adapters.cached(lm_loss), batches, OPTIONS).curve
    trained = logits(model)
    adapters.merge()
    assert torch.allclose(logits(model), trained, atol=1e-5)
    assert (trained - dense).abs().max() > 0.05
    assert curve[-1]["grad_norm"] > 0
    require_zeros(model, masks)
    assert zero_masks(model).keys() == masks.keys()
    assert all(torch.equal(mask, masks[name]) for name, mask in zero_masks(model).items())
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert types == [type(module) for module in model.modules()]
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_lora_on_a_model_without_zeros_merges_into_what_was_trained(architecture):
    model = tiny_model(architecture)
    adapters = Adapters(model, LoraOptions(dropout=0.0))
    train(model, adapters.cached(lm_loss), batches, OPTIONS)
    model.eval()
    trained = logits(model)
    adapters.merge()
    assert torch.allclose(logits(model), trained, atol=1e-4)


def test_the_masked_product_is_the_formula():
    model = pruned_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    before, mask = layer.weight.detach().clone(), layer.weight.detach() != 0
    adapters = Adapters(model, LoraOptions(rank=4, alpha=12, masked=True))
    low_rank = layer.parametrizations.weight[0]
    with torch.no_grad():
        low_rank.left.normal_()
    product = torch.einsum("or,ri->oi", low_rank.left.detach(), low_rank.right.detach())
    adapters.merge()
    assert torch.allclose(layer.weight, before + 3 * product * mask, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_only_adapters_are_trained_and_taking_them_away_restores_the_model(masked):
    model = pruned_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapters = Adapters(model, LoraOptions(rank=2, masked=masked))
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert (
        adapters.parameters
        == trainable
        == sum(2 * sum(m.shape) for m in find_stack(tiny_model("llama")).matrices.values())
    )
    train(model, adapters.cached(lm_loss), batches, OPTIONS)
    adapters.remove()
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_lora_on_a_pruned_model_keeps_the_zeros_too():
    model = pruned_model("llama")
    masks = zero_masks(model)
    adapters = Adapters(model, LoraOptions())
    train(model, lm_loss, batches, OPTIONS)
    adapters.merge()
    require_zeros(model, masks)


def test_half_weights_are_adapted_in_float32():
    model = pruned_model("llama").bfloat16()
    adapters = Adapters(model, LoraOptions(masked=True))
    train(model, lm_loss, batches, OPTIONS)
    trained = logits(model)
    adapters.merge()
    assert torch.equal(logits(model), trained)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_resumed_run_has_the_same_bits(tmp_path):
    def run(stop):
        model = pruned_model("llama")
        adapters = Adapters(model, LoraOptions(dropout=0.2))

        def after_step(step):
            if step == stop:
                raise RuntimeError("power cut")

        options = TrainOptions(steps=4, lr=0.02, checkpoint_minutes=0)
        try:
            train(model, lm_loss, batches, options, folder=folder, resume=True, after_step=after_step)
        except RuntimeError:
            return None
        adapters.merge()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    folder = tmp_path / "whole"
    whole = run(None)
    folder = tmp_path / "parts"
    assert run(2) is None
    assert torch.equal(run(None), whole)


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"dropout": 1.0}])
def test_senseless_options_are_refused(wrong):
    with pytest.raises(UsageError):
        LoraOptions(**wrong)
