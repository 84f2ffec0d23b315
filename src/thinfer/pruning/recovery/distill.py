"""Distillation: a pruned model learns the predictions and the hidden states of the dense model.

Hinton et al. 2015 (arxiv.org/abs/1503.02531) for the logits; hidden states as in Kurtic et al. 2023, "Sparse
Fine-tuning for Inference Acceleration" (arxiv.org/abs/2310.06927), but relative to each token's own size: where one
token has a massive state, as the first of a text often has, it would drown all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from thinfer.errors import UsageError
from thinfer.pruning.recovery.language import next_token_loss


@dataclass(frozen=True, slots=True)
class DistillLoss:
    """Loss of a student on ids [batch, length]: kl · KL(teacher ‖ student) + hidden · state error + lm · text loss.

    Attributes:
        teacher: the dense model, on the student's device; it is run without gradients.
        kl: weight of the divergence (nats a token, times temperature²).
        hidden: weight of mean ‖h_student − h_teacher‖² / ‖h_teacher‖² over tokens and layers.
        lm: weight of the negative log-likelihood of the text itself.
        temperature: the logits of both are divided by it.

    Example: ``train(student, DistillLoss(teacher), batches, options)``.
    """

    teacher: Any
    kl: float = 1.0
    hidden: float = 1.0
    lm: float = 0.0
    temperature: float = 1.0

    def __call__(self, student: Any, ids: Tensor) -> Tensor:
        """The loss, a scalar; the last position of a window counts too, as the teacher predicts there."""
        states = self.hidden > 0
        with torch.no_grad():
            wanted = self.teacher(input_ids=ids, use_cache=False, output_hidden_states=states)
        given = student(input_ids=ids, use_cache=False, output_hidden_states=states)
        loss = self.kl * divergence(given.logits, wanted.logits, self.temperature)
        if states:
            # The first are embeddings, before any block.
            pairs = list(zip(given.hidden_states[1:], wanted.hidden_states[1:], strict=True))
            loss = loss + self.hidden * torch.stack([relative_error(*pair) for pair in pairs]).mean()
        if self.lm > 0:
            loss = loss + self.lm * next_token_loss(given.logits, ids)
        return loss


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """temperature² · mean over tokens of KL(teacher ‖ student), from logits [..., vocabulary], in float32."""
    p, q = (log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
    return kl_div(p, q, log_target=True, reduction="none").sum(-1).mean() * temperature**2


def relative_error(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over tokens of ‖student − teacher‖² / ‖teacher‖², of states [..., hidden], in float32."""
    student, teacher = student.float(), teacher.float()
    size = teacher.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((student - teacher).square().sum(-1) / size).mean()


def distill_loss(student: Any, teacher: Any, *, hidden: float | None = None, **weights: float) -> DistillLoss:
    """A loss that fits both models: without `hidden`, states are compared exactly where they have the same shape.

    Raises:
        UsageError: another vocabulary, or `hidden` is asked for and depths or widths differ.
    """
    vocabularies = [model.get_input_embeddings().weight.shape[0] for model in (student, teacher)]
    if vocabularies[0] != vocabularies[1]:
        raise UsageError(
            f"the teacher has {vocabularies[1]} tokens, the student {vocabularies[0]}; distil from the model that was "
            "pruned, or one with the same tokenizer"
        )
    if hidden:
        require_same_states(student, teacher, "--hidden-weight 0")
    if hidden is None:
        hidden = float(_states(student) == _states(teacher))
    teacher.eval().requires_grad_(False)
    return DistillLoss(teacher, hidden=hidden, **weights)


def require_same_states(student: Any, teacher: Any, remedy: str) -> None:
    """UsageError unless hidden states of both have the same shape; `remedy` is the option that does without them."""
    own, others = _states(student), _states(teacher)
    if own != others:
        raise UsageError(
            f"hidden states cannot be compared: the teacher has {others[0]} layers of {others[1]}, the student "
            f"{own[0]} of {own[1]}; use {remedy}"
        )


def _states(model: Any) -> tuple[int, int]:
    """Layers, and their width."""
    return model.config.num_hidden_layers, model.config.hidden_size
