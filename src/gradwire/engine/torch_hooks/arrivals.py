"""The short way through the hook of a gradient: most gradients of a backward are only noted.

Hooks in Python take a microsecond or more, most of it for Python's lock. So there is one hook for each gradient, which does next
to nothing, and a second one only for a few (see `Reducer.gradient_ready`).
"""

from collections.abc import Callable, Sequence

import torch

NO_BACKWARD = -2
"""Is the id of no graph task: torch's ids begin at 0, and -1 is outside of a backward."""

_current_task = torch._C._current_graph_task_id


class Arrivals:
    """The gradients that came in a step, by index of their parameters, and the runs that are complete.

    Hooks note the gradients of the backward `task` here. For any other gradient, and for the next one after a run is complete,
    the hook asks the reducer. Arrivals refer to no parameter and to no reducer, since parameters keep their hooks.
    """

    def __init__(self) -> None:
        self.task = NO_BACKWARD
        """The graph task whose gradients are only noted."""
        self.came: dict[int, None] = {}
        """Gradients that were accumulated, in order. Hooks of the script on the last one may follow."""
        self.left: list[int] = []
        """How many gradients of each run did not come yet."""
        self.complete: list[int] = []
        """Runs whose gradients all came, and were not taken yet."""
        self.last_ones: list[int] = []
        """The gradient of each run that comes last in the plan's order, or all gradients. Their nodes have a hook too."""
        self.heard: set[int] = set()
        """Those of them whose nodes called it."""
        self.awaited = False
        """Whether a training forward began whose backward would send, and no step began since."""
        self._run_of: dict[int, int] = {}
        self._sizes: list[int] = []

    def attach(self, runs: Sequence[Sequence[int]], hear_all: bool) -> None:
        """Count gradients by these runs, which are lists of indices. `hear_all`: every node must be a living one, since something
        is done before its gradient."""
        self._run_of = {index: number for number, run in enumerate(runs) for index in run}
        self._sizes, self.last_ones = [len(run) for run in runs], []
        for run in runs:
            self.last_ones += run if hear_all else run[-1:]

    def begin(self) -> None:
        """A step begins."""
        self.task, self.came, self.left = NO_BACKWARD, {}, list(self._sizes)
        self.complete, self.heard, self.awaited = [], set(), False

    def note(self, index: int) -> None:
        """A gradient came."""
        self.came[index] = None
        run = self._run_of[index]
        self.left[run] = left = self.left[run] - 1
        if not left:
            self.complete.append(run)

    def take_complete(self) -> list[int]:
        """The runs that are complete, once."""
        complete, self.complete = self.complete, []
        return complete

    @property
    def some_silent(self) -> bool:
        """Whether a gradient came whose node should have called its hook and did not."""
        return any(index in self.came and index not in self.heard for index in self.last_ones)

    def hook(self, index: int, ask: Callable[[], None]) -> Callable[..., None]:
        """The hook for an accumulated gradient; `ask` asks the reducer."""

        def coming(*_: object) -> None:
            if _current_task() == self.task and not self.complete and index not in self.came:
                self.note(index)
            else:
                ask()

        return coming
