"""Training of one predictor: a start by regression, then logistic loss, then a threshold for the recall wanted."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinfer.core.predictor import BLOCK_VALUES, Kind, StoredType
from thinfer.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

_GAIN = 2.0  # of scores in units of a target's deviation: where logistic loss begins to care
_RIDGE = 1e-3
_PATIENCE = 2  # epochs without gain


def require_training(device: str) -> None:
    """Raise UsageError unless PyTorch is there and finds the device: cpu, cuda or cuda:N."""
    if find_spec("torch") is None:
        raise UsageError("training predictors needs PyTorch and transformers: pip install 'thinfer[prune]'")
    import torch

    kind, _, number = device.partition(":")
    there = kind == "cuda" and (number or "0").isdecimal() and int(number or 0) < torch.cuda.device_count()
    if device != "cpu" and not there:
        raise UsageError(f"device {device}: PyTorch finds no such device here; use --device cpu")


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How one predictor is fitted.

    Attributes:
        kind: "lowrank" or "mlp".
        recall: share of what is needed that it shall find on the check split.
        epochs: most passes over the tokens.
        batch: tokens of a step.
        lr: highest learning rate of AdamW; it falls to 0 along a cosine.
        device: cpu, cuda or cuda:N.
        seed: of the order of the tokens.
    """

    kind: Kind
    recall: float
    epochs: int
    batch: int
    lr: float
    device: str
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A predictor before it is stored: first [rank, inputs], second [outputs, rank], bias [outputs]."""

    first: Float32
    second: Float32
    bias: Float32


class Start:
    """The best linear map from the inputs to a target, cut to any rank: where training begins.

    The target is the pre-activation ``W u`` where the neuron fires when it is positive (W the gate's matrix, u its
    input), else the 0/1 label. With x the predictor's input, S = E[x xᵀ] and M = E[z xᵀ] S⁻¹, the best rank-r map in
    the norm of S is ``B A`` with ``A = V_rᵀ S^-½`` and ``B = M S^½ V_r``, V_r the first right singular vectors of
    ``M S^½`` (reduced-rank regression). A's outputs are uncorrelated and of variance one.
    """

    def __init__(self, x: Float32, labels: Bool, made: tuple[Float32, Float32] | None = None) -> None:
        """Solve for all ranks.

        Args:
            x: inputs [tokens, inputs].
            labels: what was needed [tokens, outputs].
            made: u [tokens, width] and W [outputs, width] when the target is their product.
        """
        tokens, width = x.shape
        moment = (x.T @ x).astype(np.float64) / tokens
        moment += _RIDGE * np.trace(moment) / width * np.eye(width)
        values, vectors = np.linalg.eigh(moment)
        self.whiten: Float64 = (vectors / np.sqrt(values)) @ vectors.T
        mean = x.mean(axis=0, dtype=np.float64)
        rate = labels.mean(axis=0, dtype=np.float64)
        if made is None:
            cross = labels.astype(np.float32).T @ x / tokens - np.outer(rate, mean)
            deviation = np.sqrt(rate * (1 - rate)) + 1e-6
            centre = np.log((rate + 1e-3) / (1 - rate + 1e-3)) / _GAIN
        else:
            own, weight = made
            own_mean = own.mean(axis=0, dtype=np.float64)
            cross = weight @ ((own.T @ x).astype(np.float64) / tokens - np.outer(own_mean, mean))
            spread = (own.T @ own).astype(np.float64) / tokens - np.outer(own_mean, own_mean)
            deviation = np.sqrt(np.maximum(np.einsum("oi,oi->o", weight @ spread, weight), 1e-12))
            centre = (weight @ own_mean) / deviation
        target = (cross / deviation[:, None]) @ self.whiten
        _, self._directions = np.linalg.eigh(target.T @ target)
        self._target, self._mean, self._centre = target, mean @ self.whiten, centre

    def of_rank(self, rank: int, kind: Kind) -> tuple[Float32, Float32, Float32]:
        """First [rank, inputs] on whitened inputs ``whiten · x``, second [outputs, rank] and bias [outputs].

        An MLP needs two hidden units, ReLU(a) and ReLU(-a), for each direction: it gets half as many. Rows beyond the
        width of the input are zero.
        """
        pairs = kind == "mlp"
        count = rank // 2 if pairs else rank
        first = self._directions[:, ::-1][:, :count].T
        first = np.pad(first, ((0, count - len(first)), (0, 0)))
        second = _GAIN * self._target @ first.T
        bias = _GAIN * self._centre - second @ (first @ self._mean)
        if pairs:
            first, second = np.concatenate([first, -first]), np.concatenate([second, -second], axis=1)
        return first.astype(np.float32), second.astype(np.float32), bias.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Tokens to learn from, and others that decide epoch, threshold, size; x [tokens, inputs], y [tokens, outputs]."""

    x: Float32
    y: Bool
    check_x: Float32
    check_y: Bool


def fit(data: Data, start: Start, rank: int, options: FitOptions) -> Fitted:
    """Train one predictor of this rank; the epoch with the least density at the recall wanted is kept.

    The start counts as an epoch, so training never makes it worse on the check split.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    device = torch.device(options.device)
    whiten = torch.from_numpy(start.whiten.astype(np.float32)).to(device)
    x, check_x = (torch.from_numpy(part).to(device) @ whiten for part in (data.x, data.check_x))
    y = torch.from_numpy(data.y).to(device)
    parameters = [torch.from_numpy(part).to(device).requires_grad_() for part in start.of_rank(rank, options.kind)]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=1e-4)
    steps = -(-len(x) // options.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps * options.epochs, 1))
    order = torch.Generator().manual_seed(options.seed)

    def measure() -> float:
        with torch.no_grad():
            scores = _scores(check_x, parameters, options.kind).cpu().numpy()
        return float((scores > threshold_for(scores, data.check_y, options.recall)).mean())

    best, kept, stale = measure(), [part.detach().clone() for part in parameters], 0
    for _ in range(options.epochs):
        shuffled = torch.randperm(len(x), generator=order).to(device)
        for step in range(steps):
            rows = shuffled[step * options.batch : (step + 1) * options.batch]
            loss = binary_cross_entropy_with_logits(_scores(x[rows], parameters, options.kind), y[rows].float())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        density = measure()
        stale = 0 if density < best else stale + 1
        if density < best:
            best, kept = density, [part.detach().clone() for part in parameters]
        if stale >= _PATIENCE:
            break
    first, second, bias = (part.cpu().numpy() for part in kept)
    return Fitted((first @ start.whiten).astype(np.float32), second, bias)


def threshold_for(scores: Float32, labels: Bool, recall: float) -> float:
    """The highest threshold above which at least this share of the True labels score; any shape, both alike.

    Example:
        >>> threshold_for(np.array([1, 2, 3, 4], np.float32), np.array([True, True, True, True]), 0.75) < 2
        True
    """
    positive = scores[labels]
    if not len(positive):
        return float(scores.max(initial=0.0))
    missed = min(int((1 - recall) * len(positive)), len(positive) - 1)
    lowest = np.partition(positive, missed)[missed]
    return float(np.nextafter(lowest, np.float32(-np.inf)))


def pack(matrix: Float32, kind: StoredType) -> NDArray[np.uint8]:
    """A matrix [rows, columns] in blocks of 32 along the columns, uint8 [rows, row bytes]."""
    import gguf

    packed: NDArray[np.uint8] = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[kind])
    return packed


def rank_for(parameters: float, inputs: int, outputs: int) -> int:
    """The largest rank, a multiple of 32, whose matrices and bias have at most so many values; 0: not even 32 does."""
    rank = int((parameters - outputs) / (inputs + outputs))
    return max(rank // BLOCK_VALUES, 0) * BLOCK_VALUES


def _scores(x: Tensor, parameters: list[Tensor], kind: Kind) -> Tensor:
    first, second, bias = parameters
    hidden = x @ first.T
    return (hidden.relu() if kind == "mlp" else hidden) @ second.T + bias
