"""Distillation: the two distances against their formulas, and a student that comes nearer to its teacher."""

import copy

import numpy as np
import pytest
import torch

from pruning.tiny_decoders import tiny_model, tiny_windows
from thinfer.errors import UsageError
from thinfer.pruning.recovery.distill import distill_loss, divergence, relative_error
from thinfer.pruning.recovery.language import lm_loss
from thinfer.pruning.recovery.masked import hold, require_zeros, zero_masks
from thinfer.pruning.recovery.trainer import TrainOptions, train


def test_divergence_is_the_sum_over_the_vocabulary():
    student, teacher = torch.randn(2, 3, 7) * 3, torch.randn(2, 3, 7) * 3
    p, q = (np.exp(x.double().numpy() / 2) for x in (student, teacher))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    expected = 4 * (q * np.log(q / p)).sum(-1).mean()
    assert divergence(student, teacher, temperature=2.0).item() == pytest.approx(expected, rel=1e-5)
    assert divergence(teacher, teacher).item() == pytest.approx(0, abs=1e-6)


def test_a_token_with_a_massive_state_does_not_drown_the_others():
    teacher = torch.ones(1, 2, 4)
    teacher[0, 0] = 1e4
    student = teacher.clone()
    student[0, 1] = 0
    assert relative_error(student, teacher).item() == pytest.approx(0.5)


def test_the_loss_is_the_weighted_sum_and_its_gradient_reaches_the_student_only():
    teacher = tiny_model("llama", seed=1)
    student = tiny_model("llama", seed=2)
    ids = tiny_windows(2, 10)
    parts = [
        distill_loss(student, teacher, kl=1.0, hidden=0.0)(student, ids),
        distill_loss(student, teacher, kl=0.0, hidden=1.0)(student, ids),
        lm_loss(student, ids),
    ]
    whole = distill_loss(student, teacher, kl=0.5, hidden=2.0, lm=0.25)(student, ids)
    assert whole.item() == pytest.approx((0.5 * parts[0] + 2 * parts[1] + 0.25 * parts[2]).item(), rel=1e-5)
    whole.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert distill_loss(teacher, teacher)(copy.deepcopy(teacher), ids).item() == pytest.approx(0, abs=1e-5)


def test_a_pruned_student_comes_nearer_and_keeps_its_zeros():
    teacher = tiny_model("llama")
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for layer in student.model.layers:
            layer.mlp.up_proj.weight[:, ::2] = 0
    masks = zero_masks(student)
    loss = distill_loss(student, teacher)
    unseen = tiny_windows(32, 16, seed=1000)
    before = loss(student, unseen).item()
    with hold(student, masks) as after_step:
        options = TrainOptions(steps=60, lr=3e-3)
        train(student, loss, lambda number: tiny_windows(4, 16, seed=number), options, after_step=after_step)
    require_zeros(student, masks)
    assert loss(student, unseen).item() < 0.8 * before


def test_models_that_do_not_fit_are_refused_or_compared_by_their_predictions():
    teacher = tiny_model("llama")
    shallow = tiny_model("llama", num_hidden_layers=2)
    assert distill_loss(teacher, teacher).hidden == 1
    assert distill_loss(shallow, teacher).hidden == 0
    assert distill_loss(shallow, teacher)(shallow, tiny_windows(1, 8)).isfinite()
    with pytest.raises(UsageError, match="use --hidden-weight 0"):
        distill_loss(shallow, teacher, hidden=1.0)
    with pytest.raises(UsageError, match="teacher has 64 tokens, the student 32"):
        distill_loss(tiny_model("llama", vocab_size=32), teacher)
