"""Pruning and training in rounds: what is kept, what is put back, and from where training goes on."""

import pytest
import torch
from torch import nn

from thinfer.errors import UsageError
from thinfer.pruning.recovery.masked import require_zeros
from thinfer.pruning.recovery.trainer import TrainOptions
from thinfer.pruning.training.iterative import (
    FineTune,
    Fit,
    RewindRate,
    RewindWeights,
    prune_gradually,
    prune_rounds,
)
from thinfer.pruning.training.lottery import find_tickets
from thinfer.pruning.training.magnitude import prunable
from thinfer.pruning.training.penalty import regularised
from thinfer.pruning.training.schedule import CubicSchedule, rounds


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))


def batches(number):
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(number))


def loss(model, x):
    return (model(x)[:, 0] - x[:, 0] * x[:, 1]).square().mean()


def measure(model):
    with torch.no_grad():
        return -loss(model, batches(10_000)).item()


FIT = Fit(loss, batches, TrainOptions(steps=40, lr=0.02))


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_dense_training_remembers_the_step_to_rewind_to():
    model, watched = make(0), make(0)
    first, seen = flat(model), []
    early = FIT.dense(model, rewind_step=3)
    FIT.run(watched, after_step=lambda step: seen.append(flat(watched)))
    assert torch.equal(torch.cat([value.flatten() for value in early.values()]), seen[2])
    assert torch.equal(torch.cat([value.flatten() for value in FIT.dense(make(0)).values()]), first)
    assert torch.equal(flat(model), flat(watched))
    with pytest.raises(UsageError, match="the training has 40"):
        FIT.dense(make(0), rewind_step=41)


@pytest.mark.parametrize("way", ["finetune", "rate", "weights"])
def test_rounds_reach_their_sparsities_and_keep_them(way):
    model = make(0)
    early = FIT.dense(model, 2)
    slow = Fit(loss, batches, TrainOptions(steps=10, lr=0.002, schedule="constant"))
    retrain = {"finetune": FineTune(slow), "rate": RewindRate(FIT, 2), "weights": RewindWeights(FIT, early, 2)}[way]
    masks = None
    size = sum(dict(model.named_parameters())[name].numel() for name in prunable(model))
    for wanted, found in zip(rounds(0.8, 4), prune_rounds(model, rounds(0.8, 4), retrain, measure), strict=True):
        assert found.sparsity == round(wanted * size) / size
        assert found.score == measure(model)
        require_zeros(model, found.masks)
        zeros = sum(int((parameter == 0).sum()) for parameter in model.parameters() if parameter.ndim > 1)
        assert zeros == round(wanted * size)
        if masks is not None:
            assert all(not (found.masks[name] & ~masks[name]).any() for name in masks)
        masks = found.masks


def recorded(monkeypatch):
    """Which weights and which steps every retraining begins with."""
    began = []
    run = Fit.run

    def spy(self, model, masks=None, *, first=0, **more):
        began.append((flat(model), first))
        return run(self, model, masks, first=first, **more)

    monkeypatch.setattr(Fit, "run", spy)
    return began


def test_from_where_each_way_goes_on(monkeypatch):
    early, dense = make(0), make(0)
    weights = FIT.dense(dense, 5)
    early.load_state_dict(weights)
    for retrain, start, step in [
        (FineTune(FIT), dense, 0),
        (RewindRate(FIT, 5), dense, 5),
        (RewindWeights(FIT, weights, 5), early, 5),
    ]:
        model = make(0)
        model.load_state_dict(dense.state_dict())
        began = recorded(monkeypatch)
        found = next(prune_rounds(model, [0.5], retrain, measure))
        monkeypatch.undo()
        (at, first), *_ = began
        kept = torch.cat([found.masks.get(n, torch.ones_like(p) > 0).flatten() for n, p in model.named_parameters()])
        assert torch.equal(at[kept], flat(start)[kept])
        assert first == step
        assert not flat(model)[~kept].any()


def test_gradual_pruning_follows_its_schedule():
    model = make(0)
    schedule = CubicSchedule(0.75, begin=5, end=25, every=4)
    seen = []

    def counted(model, x):
        weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        seen.append(sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights))
        return loss(model, x)

    masks = prune_gradually(model, Fit(counted, batches, FIT.options), schedule)
    require_zeros(model, masks)
    due = [step for step in range(40) if schedule.due(step)]
    # A loss sees what the step before it pruned.
    assert seen[6] == pytest.approx(schedule.sparsity(5), abs=0.003)
    assert all(seen[step + 1] == pytest.approx(schedule.sparsity(step), abs=0.003) for step in due)
    assert seen[:6] == [0.0] * 6
    assert seen[-1] == pytest.approx(0.75, abs=0.003)
    with pytest.raises(UsageError, match="more than 40 steps"):
        prune_gradually(make(0), FIT, CubicSchedule(0.5, begin=0, end=40))


@pytest.mark.parametrize(("kind", "power"), [("l1", 1), ("l2", 2)])
def test_penalties(kind, power):
    model = make(0)
    names = ["0.weight", "4.weight"]
    extra = sum((dict(model.named_parameters())[name].detach().abs() ** power).sum().item() for name in names)
    x = batches(0)
    assert regularised(loss, kind, 0.3, names)(model, x).item() == pytest.approx(
        loss(model, x).item() + 0.3 * extra, rel=1e-5
    )
    with pytest.raises(UsageError):
        regularised(loss, kind, -1.0, names)


def test_tickets_have_controls_with_the_same_masks():
    tickets = list(find_tickets(make, FIT, rounds(0.6, 3), measure, seed=3, rewind_step=1, control_seed=8))
    assert [round(ticket.sparsity, 2) for ticket in tickets] == [round(value, 2) for value in rounds(0.6, 3)]
    for ticket in tickets:
        control = make(8)
        FIT.run(control, ticket.masks)
        assert ticket.control == measure(control) != ticket.score
    # The first ticket, written out: train, prune, put back, train.
    model = make(3)
    early = FIT.dense(model, 1)
    (first,) = prune_rounds(model, rounds(0.6, 3)[:1], RewindWeights(FIT, early, 1), measure)
    assert first.score == tickets[0].score
    assert [t.control for t in find_tickets(make, FIT, [0.3], measure)] == [None]
