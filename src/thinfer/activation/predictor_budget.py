"""Budget: which layers get a predictor, and how large each may become."""

from collections.abc import Sequence

from thinfer.activation.recording import Task
from thinfer.core.predictor import BLOCK_VALUES


def least(task: Task) -> int:
    """Parameters of the task's smallest predictor, of rank 32."""
    return BLOCK_VALUES * (task.inputs + task.outputs) + task.outputs


class Budget:
    """Parameters that the predictors of all tasks may have together.

    Every task, one after the other, is promised its smallest predictor while the budget holds it. Beyond that each has
    an equal part, and what one leaves of its part the next may use.

    Attributes:
        held: tasks that get a predictor.
        left_out: those whose smallest predictor is more than what is left.
        needed: parameters of the smallest predictors of all tasks.

    Example: for each task of `held`, in order, train one of at most `room(task)` parameters, then `spend` what it has.
    """

    def __init__(self, tasks: Sequence[Task], parameters: float, part: float) -> None:
        """Choose the tasks.

        Args:
            tasks: what shall be trained.
            parameters: the budget.
            part: each task's part of it.
        """
        self.needed = sum(map(least, tasks))
        self.held: list[Task] = []
        self.left_out: list[Task] = []
        self._promised = 0
        for task in tasks:
            fits = self._promised + least(task) <= parameters
            (self.held if fits else self.left_out).append(task)
            self._promised += least(task) if fits else 0
        self._part = part
        self._pool = 0.0
        self._left = parameters

    def room(self, task: Task) -> float:
        """Most parameters of the next task's predictor: never less than its smallest has."""
        self._pool += self._part
        self._promised -= least(task)
        return min(max(self._pool, least(task)), self._left - self._promised)

    def spend(self, parameters: int) -> None:
        """Take what the predictor has from the budget."""
        self._pool -= parameters
        self._left -= parameters
