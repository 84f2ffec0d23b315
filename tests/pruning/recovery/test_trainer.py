"""The trainer: the right updates, bits that survive an interruption, and a stop where numbers are not finite."""

import dataclasses
import math
import signal

import pytest
import torch
from torch import nn

from thinfer.errors import ArtifactError, CheckFailed, UsageError
from thinfer.pruning.recovery import trainer
from thinfer.pruning.recovery.state import STATE_NAME, save_state
from thinfer.pruning.recovery.trainer import TrainOptions, train

OPTIONS = TrainOptions(steps=12, lr=0.01, warmup=3, accumulate=2, weight_decay=0.1, seed=5)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))


def batches(number):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    return x, x[:, :2].sin()


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def weights(model):
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


def test_updates_are_those_of_a_loop_written_out():
    model, twin = network(), network()
    result = train(model, loss, batches, OPTIONS)
    torch.manual_seed(OPTIONS.seed)
    twin.train()
    decayed = [p for p in twin.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in twin.parameters() if p.ndim == 1]}],
        weight_decay=0,
    )
    for step in range(12):
        rate = 0.01 * ((step + 1) / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 9)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        sum(loss(twin, batches(2 * step + part)) / 2 for part in range(2)).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert result.curve[step]["lr"] == pytest.approx(rate)
    assert torch.allclose(weights(model), weights(twin), atol=1e-6)
    assert result.curve[-1]["loss"] < result.curve[0]["loss"]


def interrupted_at(step):
    def after_step(done):
        if done == step:
            signal.raise_signal(signal.SIGINT)

    return after_step


@pytest.mark.parametrize("stops", [[0], [4, 8]])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path, stops):
    whole, parts = network(), network()
    curve = train(whole, loss, batches, OPTIONS).curve
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            train(parts, loss, batches, OPTIONS, folder=tmp_path, resume=True, after_step=interrupted_at(stop))
        parts = network()  # a fresh process starts with the weights of the folder
        torch.manual_seed(999)
    said = []
    resumed = train(parts, loss, batches, OPTIONS, folder=tmp_path, resume=True, progress=said.append)
    assert torch.equal(weights(parts), weights(whole))
    assert resumed.curve == curve
    assert said[0] == f"continuing at step {stops[-1] + 2} of 12"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [path.name for path in tmp_path.iterdir()] == [STATE_NAME]


def test_a_finished_run_resumes_to_its_result(tmp_path):
    model, again = network(), network()
    train(model, loss, batches, OPTIONS, folder=tmp_path)
    train(again, loss, batches, OPTIONS, folder=tmp_path, resume=True)
    assert torch.equal(weights(model), weights(again))


def test_an_interruption_in_the_last_step_is_one_and_the_next_run_has_nothing_to_train(tmp_path):
    whole, parts = network(), network()
    train(whole, loss, batches, OPTIONS)
    with pytest.raises(KeyboardInterrupt):
        train(parts, loss, batches, OPTIONS, folder=tmp_path, after_step=interrupted_at(11))
    again = network()
    train(again, None, None, OPTIONS, folder=tmp_path, resume=True)
    assert torch.equal(weights(again), weights(whole))


def test_ctrl_c_while_a_state_is_written_loses_no_step(tmp_path, monkeypatch):
    def pressed(*args):
        signal.raise_signal(signal.SIGINT)
        save_state(*args)

    options = dataclasses.replace(OPTIONS, checkpoint_minutes=0)
    whole, parts = network(), network()
    train(whole, loss, batches, options)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "save_state", pressed)
        with pytest.raises(KeyboardInterrupt):
            train(parts, loss, batches, options, folder=tmp_path)
    again = network()
    assert [entry["step"] for entry in train(again, loss, batches, options, folder=tmp_path, resume=True).curve] == [
        *range(1, 13)
    ]
    assert torch.equal(weights(again), weights(whole))


def test_states_are_kept_in_between(tmp_path):
    calls = []

    def failing(model, batch):
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("power cut")
        return loss(model, batch)

    options = TrainOptions(steps=12, lr=0.01, accumulate=2, checkpoint_minutes=0, seed=5)
    whole, model = network(), network()
    train(whole, loss, batches, options)
    with pytest.raises(RuntimeError, match="power cut"):
        train(model, failing, batches, options, folder=tmp_path)
    again = network()
    train(again, loss, batches, options, folder=tmp_path, resume=True)
    assert torch.equal(weights(again), weights(whole))


def test_another_run_or_a_damaged_state_is_refused(tmp_path):
    train(network(), loss, batches, OPTIONS, folder=tmp_path, key="a")
    with pytest.raises(UsageError, match="unfinished run; resume it"):
        train(network(), loss, batches, OPTIONS, folder=tmp_path, key="a")
    with pytest.raises(UsageError, match="other options, text or weights"):
        train(network(), loss, batches, OPTIONS, folder=tmp_path, key="b", resume=True)
    path = tmp_path / STATE_NAME
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ArtifactError, match="start again"):
        train(network(), loss, batches, OPTIONS, folder=tmp_path, key="a", resume=True)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_stops_before_the_weights_change(tmp_path, kind, value):
    """Failure row 18."""
    model, good = network(), network()
    train(good, loss, batches, TrainOptions(steps=2, seed=5), folder=tmp_path / "good")

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * value

    def poisoned(model, batch):
        poison = batch is bad
        result = loss(model, batch)
        if poison:
            result = result * value if kind == "loss" else Poison.apply(result)
        return result

    bad = batches(2)
    with pytest.raises(CheckFailed, match=r"at step 3; use a lower learning rate"):
        train(model, poisoned, lambda n: bad if n == 2 else batches(n), TrainOptions(steps=5, seed=5))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_there_is_no_float16_and_no_training_of_half_weights():
    with pytest.raises(UsageError, match="load the model in float32"):
        train(network().bfloat16(), loss, batches, OPTIONS)
    with pytest.raises(UsageError, match="no parameter is trainable"):
        train(network().requires_grad_(False), loss, batches, OPTIONS)


def test_bfloat16_arithmetic_trains_float32_weights():
    model = network()
    result = train(model, loss, batches, TrainOptions(steps=30, lr=0.02, precision="bfloat16"))
    assert result.curve[-1]["loss"] < 0.7 * result.curve[0]["loss"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_it_leaves_random_numbers_and_mode_as_they_were():
    model = network().eval()
    state = torch.get_rng_state()
    train(model, loss, batches, OPTIONS)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training


def test_first_begins_inside_the_schedule():
    seen = []

    def watched(number):
        seen.append(number)
        return batches(number)

    result = train(network(), loss, watched, OPTIONS, first=10)
    assert [entry["step"] for entry in result.curve] == [11, 12]
    assert result.curve[0]["lr"] == pytest.approx(OPTIONS.rate(10))
    assert seen == [20, 21, 22, 23]


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 1, "lr": math.nan}, {"steps": 1, "clip": -1}])
def test_senseless_options_are_refused(wrong):
    with pytest.raises(UsageError):
        TrainOptions(**wrong)
