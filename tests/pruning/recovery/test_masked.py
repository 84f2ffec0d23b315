"""Zeros hold while weights are trained, exactly and for every optimizer state."""

import pytest
import torch
from torch import nn

from thinfer.errors import CheckFailed
from thinfer.pruning.recovery.masked import hold, require_zeros, sparsity, zero_masks
from thinfer.pruning.recovery.trainer import TrainOptions, train


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        # Every unit keeps a way to the loss, so that every kept weight has a gradient.
        places = torch.arange(8)[:, None] + torch.arange(8)
        model[0].weight[places[:, :5] % 2 == 0] = 0
        model[2].weight[places % 3 != 0] = 0
        model[2].bias[0] = 0
    return model


def loss(model, batch):
    return (model(batch) - 3).square().mean()


def batches(number):
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(number))


def test_zeros_hold_and_the_rest_moves():
    model = network()
    masks, before = zero_masks(model), network()
    assert set(masks) == {"0.weight", "2.weight"}
    with hold(model, masks) as after_step:
        train(model, loss, batches, TrainOptions(steps=20, lr=0.05, weight_decay=0.1), after_step=after_step)
    require_zeros(model, masks)
    assert {name: mask.tolist() for name, mask in zero_masks(model).items()} == {
        n: m.tolist() for n, m in masks.items()
    }
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        moved = new != old
        assert bool(moved[old != 0].all())
    assert model[2].bias[0] != 0  # vectors are no matrices: they are trained whole
    assert 0.5 < sparsity(masks) < 0.7


def test_kept_weights_move_as_if_the_pruned_ones_did_not_exist():
    """Against a model whose weight is a product with the mask, so that pruned weights get no gradient at all."""
    model, twin = network(), network()
    masks = zero_masks(model)

    def product(twin, batch):
        weights = {n: p * masks[n] if n in masks else p for n, p in twin.named_parameters()}
        return (torch.func.functional_call(twin, weights, batch) - 3).square().mean()

    options = TrainOptions(steps=10, lr=0.03, clip=0.2)
    with hold(model, masks) as after_step:
        train(model, loss, batches, options, after_step=after_step)
    train(twin, product, batches, options)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_without_masks_the_zeros_fill_and_are_found():
    """Failure row 10."""
    model = network()
    masks = zero_masks(model)
    train(model, loss, batches, TrainOptions(steps=1, lr=0.05))
    with pytest.raises(CheckFailed, match=r"0\.weight: \d+ pruned weights are no longer zero"):
        require_zeros(model, masks)


def test_masks_end_with_the_context():
    model = network()
    with hold(model, zero_masks(model)):
        pass
    train(model, loss, batches, TrainOptions(steps=1, lr=0.05))
    assert not zero_masks(model)
