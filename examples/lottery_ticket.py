"""Prune and train again, end to end: accuracy against sparsity on handwritten digits, in minutes on one core.

    python examples/lottery_ticket.py -o lottery          # needs thinfer[prune] and scikit-learn

A network of two hidden layers (64-300-100-10) learns the 8 x 8 digits of scikit-learn: 1000 to learn from, 797 to test.
All ways start from the same trained network of a seed, prune by magnitude over all matrices together, and meet at the
same sparsities; the mean and the standard error over the seeds are drawn.

one-shot      pruned in one step, then fine-tuned as long as the iterative way was altogether
iterative     pruned in rounds, fine-tuned after each
L1, L2        as iterative, the network trained with that penalty before and after
lr rewound    as iterative, but each round trains on with the original learning rates
rewound       as iterative, but each round puts the weights that are left back to their values at an early step
re-initialised  the masks of rewound, with fresh random weights, trained in full

Writes curves.json and curves.png.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from thinfer.pruning.recovery.trainer import TrainOptions
from thinfer.pruning.training.iterative import FineTune, Fit, RewindRate, prune_rounds, snapshot
from thinfer.pruning.training.lottery import find_tickets
from thinfer.pruning.training.magnitude import prunable
from thinfer.pruning.training.penalty import regularised
from thinfer.pruning.training.schedule import rounds

BATCH = 50
PENALTIES = {"L1": ("l1", 2e-5), "L2": ("l2", 1e-4)}
STYLES = {"one-shot": "k:", "iterative": "k-", "L1": "b--", "L2": "b-", "lr rewound": "g-", "rewound": "r-"}
STYLES |= {"re-initialised": "r:"}


def make(seed: int) -> nn.Module:
    """A fresh network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


class Digits:
    """The digits: batches to learn from by number, and accuracy on those never learnt from."""

    def __init__(self, seed: int) -> None:
        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self._x, self._y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
        self._train, self._seed = 1000, seed

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        """Batch of that number: images float32 [batch, 64], labels int64 [batch]."""
        each = self._train // BATCH
        shuffled = torch.randperm(
            self._train, generator=torch.Generator().manual_seed(1000 * self._seed + number // each)
        )
        chosen = shuffled[number % each * BATCH :][:BATCH]
        return self._x[chosen], self._y[chosen]

    def accuracy(self, model: nn.Module) -> float:
        """Fraction of the test images that are recognised."""
        with torch.no_grad():
            return (model(self._x[self._train :]).argmax(1) == self._y[self._train :]).double().mean().item()


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def curves(seed: int, sparsities: list[float], steps: int, rewind_step: int) -> Iterator[tuple[str, float, float]]:
    """Name, sparsity (counted) and accuracy of every point for one seed."""
    digits = Digits(seed)
    options = TrainOptions(steps=steps, lr=2e-3, clip=0, seed=seed)
    # Two thirds of the steps at a fifth of the rate; the rewound ways train in full each round.
    slow = replace(options, steps=steps * 2 // 3, lr=options.lr / 5)
    names = prunable(make(seed))

    for name, penalty in {"iterative": None, **PENALTIES}.items():
        loss = regularised(cross_entropy, *penalty, names) if penalty else cross_entropy
        model = make(seed)
        Fit(loss, digits, options).dense(model)
        trained = snapshot(model)
        yield name, 0.0, digits.accuracy(model)
        for found in prune_rounds(model, sparsities, FineTune(Fit(loss, digits, slow)), digits.accuracy):
            yield name, found.sparsity, found.score
        if penalty:
            continue
        yield "one-shot", 0.0, digits.accuracy(make_from(trained))
        for number, sparsity in enumerate(sparsities, 1):
            long = FineTune(Fit(loss, digits, replace(slow, steps=slow.steps * number)))
            for found in prune_rounds(make_from(trained), [sparsity], long, digits.accuracy):
                yield "one-shot", found.sparsity, found.score
        model = make_from(trained)
        yield "lr rewound", 0.0, digits.accuracy(model)
        for found in prune_rounds(model, sparsities, RewindRate(Fit(loss, digits, options)), digits.accuracy):
            yield "lr rewound", found.sparsity, found.score
        yield "rewound", 0.0, digits.accuracy(make_from(trained))

    fit = Fit(cross_entropy, digits, options)
    tickets = find_tickets(
        make, fit, sparsities, digits.accuracy, seed=seed, rewind_step=rewind_step, control_seed=seed + 1000
    )
    for ticket in tickets:
        yield "rewound", ticket.sparsity, ticket.score
        yield "re-initialised", ticket.sparsity, ticket.control


def make_from(weights: dict[str, Tensor]) -> nn.Module:
    """A network with these weights."""
    model = make(0)
    model.load_state_dict(weights)
    return model


def draw(summary: dict[str, list[dict[str, float]]], path: Path, title: str) -> None:
    """Accuracy against the fraction of weights that are left."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for name, points in summary.items():
        left = [100 * (1 - point["sparsity"]) for point in points]
        axes.errorbar(
            left,
            [100 * point["accuracy"] for point in points],
            [100 * point["stderr"] for point in points],
            fmt=STYLES[name],
            label=name,
            capsize=2,
        )
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xlabel("weights left, %")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    """Run all seeds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("lottery"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sparsity", type=float, default=0.99, help="of the last round")
    parser.add_argument("--steps", type=int, default=300, help="of the dense training")
    parser.add_argument("--rewind-step", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    sparsities = rounds(options.sparsity, options.rounds)
    scores: dict[tuple[str, float], list[float]] = defaultdict(list)
    for seed in range(options.seeds):
        for name, sparsity, accuracy in curves(seed, sparsities, options.steps, options.rewind_step):
            scores[name, sparsity].append(accuracy)
        print(f"seed {seed + 1} of {options.seeds}: {time.monotonic() - began:.0f} s")
    summary: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (name, sparsity), values in scores.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        summary[name].append({"sparsity": sparsity, "accuracy": statistics.mean(values), "stderr": error})
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    document = {"options": settings, "seconds": time.monotonic() - began, "curves": summary}
    (options.out / "curves.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draw(summary, options.out / "curves.png", f"Digits, 50,600 weights, {options.seeds} seeds")
    order = [name for name in STYLES if name in summary]
    print("sparsity  " + "  ".join(f"{name:>14}" for name in order))
    for sparsity in sparsities:
        cells = []
        for name in order:
            point = min(summary[name], key=lambda point: abs(point["sparsity"] - sparsity))
            cells.append(f"{100 * point['accuracy']:7.2f} ± {100 * point['stderr']:4.2f}")
        print(f"{sparsity:8.4f}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
