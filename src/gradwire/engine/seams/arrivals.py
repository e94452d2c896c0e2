"""The short way through the hooks of gradients: most gradients of a backward are only noted.

A hook in Python takes about a microsecond, and there are two for each gradient. What a hook does beyond that counts in models of
many small tensors.
"""

from collections import Counter
from collections.abc import Callable

import torch

NO_BACKWARD = -2
"""Is the id of no graph task: torch's ids begin at 0, and -1 is outside of a backward."""

_current_task = torch._C._current_graph_task_id


class Arrivals:
    """The gradients that came in a step, by index of their parameters.

    Hooks note the gradients of the backward `task` here. All other gradients, and the last one of each run, go the long way: the
    hook asks the reducer. Arrivals refer to no parameter and to no reducer, since parameters keep their hooks.
    """

    def __init__(self) -> None:
        self.task = NO_BACKWARD
        """The graph task whose gradients are only noted."""
        self.coming: dict[int, None] = {}
        """Gradients that were accumulated. Hooks of the script may follow."""
        self.ready: dict[int, None] = {}
        """Gradients that are as they are to be sent, in the order in which they came."""
        self.left: list[int] = []
        """How many gradients of each run are not ready yet."""
        self._run_of: dict[int, int] = {}
        self._sizes: list[int] = []

    def attach(self, run_of: dict[int, int]) -> None:
        """Count gradients by these runs: the number of the run of each gradient."""
        self._run_of = run_of
        sizes = Counter(run_of.values())
        self._sizes = [sizes[run] for run in range(len(sizes))]

    def begin(self) -> None:
        """A step begins."""
        self.task, self.coming, self.ready, self.left = NO_BACKWARD, {}, {}, list(self._sizes)

    def count(self, index: int) -> int | None:
        """A gradient is ready. Returns the number of its run if it is the run's last one."""
        self.ready[index] = None
        run = self._run_of[index]
        self.left[run] -= 1
        return None if self.left[run] else run

    def never_ready(self) -> list[int]:
        """Gradients that were accumulated, and whose nodes have not called their hooks."""
        return [index for index in self.coming if index not in self.ready]

    def coming_hook(self, index: int, ask: Callable[[], None]) -> Callable[..., None]:
        """The hook for an accumulated gradient; `ask` is the long way."""

        def coming(*_: object) -> None:
            if _current_task() == self.task:
                self.coming[index] = None
            else:
                ask()

        return coming

    def ready_hook(self, index: int, ask: Callable[[], None]) -> Callable[..., None]:
        """The hook for a gradient that is ready; `ask` is the long way."""

        def ready(*_: object) -> None:
            if _current_task() == self.task:
                run = self._run_of[index]
                if (left := self.left[run]) > 1:
                    self.left[run] = left - 1
                    self.ready[index] = None
                    return
            ask()

        return ready
