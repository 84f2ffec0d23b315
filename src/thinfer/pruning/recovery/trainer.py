"""A small trainer for any module and any loss: AdamW, warm-up and cosine, resumable to the bit.

Batches are asked for by number, so that where a run continues depends on its step alone. Whatever a loss draws at
random must come from PyTorch's generators: their state is kept with the weights.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinfer.errors import CheckFailed, UsageError
from thinfer.pruning.recovery.state import STATE_NAME, load_state, save_state

Loss = Callable[[Any, Any], Tensor]
"""Of a module and a batch: the mean loss, a scalar."""

Batches = Callable[[int], Any]
"""The batch of that number, from 0; the same at every call."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a module is trained.

    Attributes:
        steps: updates of the weights.
        lr: highest learning rate.
        warmup: steps in which the rate rises linearly from 0.
        schedule: how the rate goes on: "cosine" falls to `final_lr` of `lr` at the last step.
        final_lr: fraction of `lr`.
        weight_decay: AdamW's, on matrices only.
        betas: AdamW's.
        clip: largest norm of all gradients together; 0: no limit.
        accumulate: batches whose mean gradient makes one update.
        precision: of the arithmetic; the weights that are trained are float32 in any case. There is no float16: its
            range is too small for the gradients.
        seed: of dropout and all else that is drawn at random.
        checkpoint_minutes: time between two saved states.

    Raises:
        UsageError: a number that makes no sense.

    Example: ``TrainOptions(steps=100, lr=1e-4, warmup=10)``.
    """

    steps: int
    lr: float = 1e-4
    warmup: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"
    final_lr: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    accumulate: int = 1
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    checkpoint_minutes: float = 10.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.accumulate < 1:
            raise UsageError(f"{self.steps} steps of {self.accumulate} batches: both must be at least 1")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise UsageError(f"learning rate {self.lr:g}: must be above 0")
        limits = (self.warmup, self.weight_decay, self.clip, self.checkpoint_minutes)
        if not all(math.isfinite(limit) and limit >= 0 for limit in limits):
            raise UsageError("warm-up, weight decay, clip and minutes between checkpoints must be numbers from 0")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(slots=True)
class TrainResult:
    """What a training reports: one entry of step, loss, lr and grad_norm for every step, and its seconds.

    They are those of steps and of keeping states; what `measure` of `train` takes is not among them.
    """

    curve: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {"curve": self.curve, "seconds": self.seconds}


def train(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    options: TrainOptions,
    *,
    first: int = 0,
    after_step: Callable[[int], None] = lambda _: None,
    measure: Callable[[int], None] = lambda _: None,
    folder: Path | None = None,
    key: str = "",
    resume: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> TrainResult:
    """Train the parameters that require gradients, in place; the module's mode and the random state are put back.

    Args:
        model: on one device; the batches must come on the same.
        loss: of the module and a batch.
        batches: step s uses the batches s·accumulate to (s+1)·accumulate - 1.
        options: how.
        first: step to begin at: the learning rate and the batches are those of that step.
        after_step: told the step after each update; may change weights in place, as masks do.
        measure: told the step after that; its time is not the training's.
        folder: where states are kept, every `checkpoint_minutes`, at the end, and at Ctrl-C (which finishes its step
            first; a second Ctrl-C does not). None: nowhere.
        key: names the run; a state of another run is refused.
        resume: continue from the state in `folder`, with the same result as an uninterrupted run; bit for bit on a CPU
            with the same number of threads. Begins anew when there is none.
        progress: told step, loss and the time left.

    Raises:
        UsageError: nothing is trainable, trainable weights are not float32, the folder has a state and `resume` is
            off, or the state is of another run.
        CheckFailed: the loss or a gradient is not finite. The weights are then those before that step.
    """
    run = _Run(model, loss, batches, options, after_step, measure, folder, key, progress)
    device = next(model.parameters()).device
    training = model.training
    model.train()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(options.seed)
            return run.go(run.begin(first, resume))
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)


class _Run:
    """One training: the optimizer, the curve so far, and where states go."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: Batches,
        options: TrainOptions,
        after_step: Callable[[int], None],
        measure: Callable[[int], None],
        folder: Path | None,
        key: str,
        progress: Callable[[str], None],
    ) -> None:
        self._model, self._loss, self._batches, self._options = model, loss, batches, options
        self._after_step, self._measure = after_step, measure
        self._folder, self._key, self._progress = folder, key, progress
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise UsageError("no parameter is trainable; set requires_grad, or attach adapters")
        if small := {str(p.dtype) for p in self._parameters if p.dtype not in (torch.float32, torch.float64)}:
            raise UsageError(
                f"trainable weights are {', '.join(sorted(small))}, in which small updates vanish; load the model in "
                'float32 (precision="bfloat16" still computes in bfloat16)'
            )
        groups = [
            {"params": [p for p in self._parameters if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in self._parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        filled = [group for group in groups if group["params"]]
        self._optimizer = torch.optim.AdamW(filled, lr=options.lr, betas=options.betas, fused=True)
        self._result = TrainResult()

    def begin(self, first: int, resume: bool) -> int:
        """The step to start at."""
        if self._folder is None or not (self._folder / STATE_NAME).exists():
            return first
        if not resume:
            raise UsageError(f"{self._folder}: has an unfinished run; resume it, or delete that folder")
        facts = load_state(self._folder, self._model, self._optimizer, self._key)
        self._result = TrainResult(facts["curve"], facts["seconds"])
        self._progress(f"continuing at step {facts['step'] + 1} of {self._options.steps}")
        return int(facts["step"])

    def go(self, first: int) -> TrainResult:
        """Train from that step to the last."""
        steps = self._options.steps
        before, began = self._result.seconds, time.monotonic()
        saved, measured = began, 0.0
        with _deferred_interrupt(self._folder is not None, self._progress) as interrupted:
            for step in range(first, steps):
                entry = self._step(step)
                self._after_step(step)
                trained = time.monotonic()
                self._measure(step)
                now = time.monotonic()
                measured += now - trained
                self._result.curve.append(entry)
                self._result.seconds = before + now - began - measured
                left = (now - began) / (step + 1 - first) * (steps - step - 1)
                self._progress(f"step {step + 1} of {steps}: loss {entry['loss']:.4f}, {_duration(left)} left")
                # Asked once: what is pressed after this waits for the next step, whose state will be kept.
                stop = interrupted()
                if stop or step + 1 == steps or now - saved >= 60 * self._options.checkpoint_minutes:
                    self._save(step + 1)
                    saved = time.monotonic()
                if stop:
                    raise KeyboardInterrupt
            if interrupted():
                raise KeyboardInterrupt  # while the last state was kept
        return self._result

    def _step(self, step: int) -> dict[str, float]:
        options, device = self._options, self._parameters[0].device
        total = 0.0
        for number in range(step * options.accumulate, (step + 1) * options.accumulate):
            with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bfloat16"):
                loss = self._loss(self._model, self._batches(number))
            value = float(loss.detach())
            self._require_finite(value, "loss", step)
            (loss / options.accumulate).backward()  # type: ignore[no-untyped-call]
            total += value / options.accumulate
        norm = nn.utils.clip_grad_norm_(self._parameters, options.clip or math.inf)
        self._require_finite(float(norm), "norm of the gradients", step)
        rate = options.rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {"step": step + 1, "loss": total, "lr": rate, "grad_norm": float(norm)}

    def _require_finite(self, value: float, what: str, step: int) -> None:
        if not math.isfinite(value):
            raise CheckFailed(
                f"the {what} is {value} at step {step + 1}; use a lower learning rate or a longer warm-up, "
                "and check the model (its perplexity) and the text"
            )

    def _save(self, step: int) -> None:
        if self._folder is not None:
            facts = {"step": step, "curve": self._result.curve, "seconds": self._result.seconds}
            save_state(self._folder, self._model, self._optimizer, self._key, facts)


@contextmanager
def _deferred_interrupt(wanted: bool, progress: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C wait until the step is done, so that its state can be kept; the second acts at once."""
    pressed = threading.Event()
    standard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # A program with a handler of its own keeps it, and only the main thread may set one.
    if not (wanted and standard and threading.current_thread() is threading.main_thread()):
        yield pressed.is_set
        return

    def handler(signum: int, frame: Any) -> None:
        if pressed.is_set():
            signal.default_int_handler(signum, frame)
        pressed.set()
        progress("interrupted: finishing this step and keeping its state; Ctrl-C again stops at once")

    signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"
