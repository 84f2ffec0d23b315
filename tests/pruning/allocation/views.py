"""A model for allocations: matrices and inputs given outright, and a loss that is a formula."""

import torch

from thinfer.pruning.statistics import InputStatistics


class View:
    """`ModelView` over weights [block][name] and, if given, inputs x [tokens, inputs] by name."""

    def __init__(self, blocks, inputs=None, loss=None):
        self.blocks = [list(block) for block in blocks]
        self._weights = {name: weight for block in blocks for name, weight in block.items()}
        self._inputs = inputs or {}
        self._loss = loss
        self.asked = []

    def weight(self, name):
        return self._weights[name]

    def inputs(self, name):
        width = self._weights[name].shape[1]
        statistics = InputStatistics(width, frozenset({"norm"}))
        statistics.add(self._inputs.get(name, torch.ones(1, width)))
        return statistics

    def loss(self, rates):
        self.asked.append(dict(rates))
        return self._loss(rates)

    def mean(self, rates):
        """Mean rate over all weights."""
        sizes = {name: weight.numel() for name, weight in self._weights.items()}
        return sum(rates[name] * size for name, size in sizes.items()) / sum(sizes.values())


def random_view(blocks=4, spread=0.0, seed=0):
    """Blocks of two matrices of different sizes, some weights of the later blocks being outliers by `spread`."""
    random = torch.Generator().manual_seed(seed)
    stack, inputs = [], {}
    for block in range(blocks):
        names = {f"layers.{block}.q": (8 + 8 * block, 24), f"layers.{block}.down": (16, 40)}
        stack.append({name: torch.randn(shape, generator=random) for name, shape in names.items()})
        for name, shape in names.items():
            x = torch.randn(50, shape[1], generator=random)
            x[:, : 1 + block] *= 1 + spread * block
            inputs[name] = x
    return View(stack, inputs)
