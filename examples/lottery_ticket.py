"""Prune and train again, end to end: accuracy against sparsity on handwritten digits, in minutes on two cores.

    python examples/lottery_ticket.py -o lottery          # needs thinfer[prune] and scikit-learn

A network of two hidden layers (64-300-100-10) learns the 8 x 8 digits of scikit-learn: 1000 to learn from, 797 to test.
All ways start from the same trained network of a seed, prune by magnitude over all matrices together, and meet at the
same sparsities; the mean and the standard error over the seeds are drawn. Every retraining of the first four has two
thirds of the steps of the dense training at a fifth of its rate, every one of the last three has all of its rates.

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
from multiprocessing import get_context
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
    axes.set_xticks([100, 50, 20, 10, 5, 2, 1], labels=["100", "50", "20", "10", "5", "2", "1"])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_xlabel("weights left, %")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def save(points: list[tuple[str, float, float]], options: argparse.Namespace, seeds: int, seconds: float) -> None:
    """Write the mean and the standard error over the seeds so far, and print them as a table."""
    scores: dict[tuple[str, float], list[float]] = defaultdict(list)
    for name, sparsity, accuracy in points:
        scores[name, sparsity].append(accuracy)
    summary: dict[str, list[dict[str, float]]] = {name: [] for name in STYLES}
    for (name, sparsity), values in sorted(scores.items()):
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        summary[name].append({"sparsity": sparsity, "accuracy": statistics.mean(values), "stderr": error})
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    document = {"options": settings | {"seeds": seeds}, "seconds": seconds, "curves": summary}
    (options.out / "curves.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    draw(summary, options.out / "curves.png", f"Digits, 50,200 weights, {seeds} seeds")
    print("\nsparsity  " + "  ".join(f"{name:>14}" for name in summary))
    pruned = [[point for point in points if point["sparsity"] > 0] for points in summary.values()]
    for row in zip(*pruned, strict=True):
        cells = [f"{100 * point['accuracy']:7.2f} ± {100 * point['stderr']:4.2f}" for point in row]
        print(f"{row[0]['sparsity']:8.4f}  " + "  ".join(cells), flush=True)


def all_curves(arguments: tuple[int, list[float], int, int]) -> list[tuple[str, float, float]]:
    """All points of one seed, in a process of its own."""
    torch.set_num_threads(1)
    return list(curves(*arguments))


def main() -> None:
    """Run all seeds and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path("lottery"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sparsity", type=float, default=0.99, help="of the last round")
    parser.add_argument("--steps", type=int, default=200, help="of the dense training")
    parser.add_argument("--rewind-step", type=int, default=10)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    sparsities = rounds(options.sparsity, options.rounds)
    work = [(seed, sparsities, options.steps, options.rewind_step) for seed in range(options.seeds)]
    points: list[tuple[str, float, float]] = []
    with get_context("spawn").Pool(min(options.jobs, options.seeds)) as pool:
        for done, found in enumerate(pool.imap_unordered(all_curves, work), 1):
            points += found
            save(points, options, done, time.monotonic() - began)


if __name__ == "__main__":
    main()
