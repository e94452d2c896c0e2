"""Several optimizers of one job: which of them took the gradients of a step."""

from collections.abc import Sequence

import torch

from gradwire.errors import StepStateError

__all__ = ["OptimizerTurns"]


class OptimizerTurns:
    """The optimizers that stepped since the gradients were averaged.

    All of them step once, in any order. A GradScaler may leave some out. Optimizers that step in turns, each with a backward of
    its own, are refused: a joiner that makes a step again does not know whose it was.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._count = len(optimizers)
        self._stepped: set[int] = set()
        self._before: list[set[int]] = []
        """The ids of those that stepped in the last two steps."""

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it stepped in this step."""
        return id(optimizer) in self._stepped

    @property
    def is_over(self) -> bool:
        return len(self._stepped) == self._count

    def check(self, optimizer: torch.optim.Optimizer, arguments: Sequence[object]) -> None:
        """arguments: of its `step`, with itself. Raises StepStateError for a closure."""
        if any(each is not None and each is not optimizer for each in arguments):
            raise StepStateError(
                f"{type(optimizer).__name__}.step was called with a closure (or another argument): it would compute gradients "
                "inside the step, after the members averaged theirs. Call backward() first and step() without one, or pass a "
                "plan with schedule=gw.LocalSteps(...)."
            )

    def note(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer stepped. Returns whether it is the first one in this step."""
        is_first = not self._stepped
        self._stepped.add(id(optimizer))
        return is_first

    def end(self) -> None:
        """The next step begins. Raises StepStateError where twice in a row other optimizers stepped than in the step before: once
        may be a GradScaler's doing."""
        if not self._stepped:
            return
        last, self._stepped = [*self._before, self._stepped], set()
        self._before = last[-2:]
        if len(last) == 3 and last[1].isdisjoint(last[0] | last[2]):
            raise StepStateError(
                "the optimizers of the job step in turns, each after a backward of its own: a member that joins and makes these "
                "steps again does not know whose turn it is, and its weights would differ. Compute all gradients in one "
                "backward, and then step all optimizers. Or pass a plan with schedule=gw.LocalSteps(...)."
            )
