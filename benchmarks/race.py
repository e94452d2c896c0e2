"""Races: methods of the bench train for equal seconds, in turns, in one run, and are evaluated after each turn."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.campaigns.requests import RepositoryRequest
from gradwire.bench.jobs import make_job
from gradwire.bench.progress import RaceView, View
from gradwire.bench.results import Cell, Decided, StepEvent
from gradwire.bench.runner import run_bench

__all__ = ["Race", "is_whole", "reached", "steps_for_one"]


def is_whole(path: Path) -> bool:
    """Whether these results are of a run that came to its end, in which no method failed."""
    return path.exists() and not {"failed", "unfinished"} & json.loads(path.read_text()).keys()


class Race:
    """The results of each method so far, by its name: pairs of seconds and held-out loss, and the times of its steps.

    During the race seconds are those of rank 0's clock; at its end, the mean over ranks. Of a method that decides, its first
    decision is kept, too.
    """

    def __init__(self, methods: Mapping[str, str], about: Mapping[str, Any], job: str, link: str, **request: Any) -> None:
        """methods: of the bench, by their names in the tables. about: keys of the results beside those of the race. request: more
        arguments of the bench's request, with `race_s` and `nodes`."""
        self.failed: dict[str, str] = {}
        self._methods, self._about = dict(methods), dict(about)
        self._request = RepositoryRequest([job], [link], list(self._methods.values()), alone_steps=0, **request)
        self._batch = make_job(job).batch_size * self._request.world_size
        self._step_us: dict[str, list[float]] = {name: [] for name in methods}
        self._held_out: dict[str, list[tuple[int, float]]] = {name: [] for name in methods}
        self._decided: dict[str, Decided] = {}
        self._unfinished = True

    def run(self, keep: Callable[[dict[str, Any]], None]) -> None:
        """Measure. `keep` is given the results after each turn."""
        view = RaceView(Console(stderr=True), self._batch)
        done = run_bench(self._request, None, Told(view, self, keep))
        self.ended(done.cells)
        keep(self.result())

    def told(self, event: StepEvent) -> bool:
        """Add a step, or the evaluation after a turn. Returns whether the event is an evaluation."""
        name = next(name for name, method in self._methods.items() if method == event.method)
        if event.held_out is None:
            self._step_us[name].append(event.us)
        else:
            self._held_out[name].append((len(self._step_us[name]), event.held_out))
        return event.held_out is not None

    def ended(self, cells: Iterable[Cell]) -> None:
        """The run is over, by itself or not."""
        by_method = {cell.method: cell for cell in cells}
        for name, method in self._methods.items():
            cell = by_method[method]
            if cell.failure is not None:
                self.failed[name] = cell.failure
            else:
                self._step_us[name], self._held_out[name] = list(cell.step_us), list(cell.held_out)
                self._decided |= {name: cell.decided[0]} if cell.decided else {}
        self._unfinished = False

    def result(self) -> dict[str, Any]:
        """Return the results to write. Methods that failed have their results from before the failure."""
        found = {name: self._found(name) for name in self._methods if self._held_out[name] and self._step_us[name]}
        result = self._about | {"methods": found}
        result |= {"failed": self.failed} if self.failed else {}
        return result | ({"unfinished": True} if self._unfinished else {})

    def _found(self, name: str) -> dict[str, Any]:
        ends = [0.0, *accumulate(us / 1e6 for us in self._step_us[name])]
        steps = len(ends) - 1
        found = {
            "steps": steps,
            "samples": steps * self._batch,
            "step_ms": 1e3 * ends[-1] / steps,
            "held_out": [(ends[at], loss) for at, loss in self._held_out[name]],
        }
        if (decided := self._decided.get(name)) is not None:
            found["decided"] = msgspec.to_builtins(decided) | {"after_s": ends[min(decided.step, steps)]}
        return found


class Told:
    """The view of a race, which also records its events."""

    def __init__(self, view: View, race: Race, keep: Callable[[dict[str, Any]], None]) -> None:
        self._view, self._race, self._keep = view, race, keep

    def group(self, title: str, methods: Sequence[str], steps: int) -> AbstractContextManager[None]:
        return self._view.group(title, methods, steps)

    def step(self, event: StepEvent) -> None:
        self._view.step(event)
        if self._race.told(event):
            self._keep(self._race.result())


def reached(held_out: list[tuple[float, float]], goal: float) -> float | None:
    """Seconds of training after which the loss was at most the goal, on the line between two evaluations; None: it never was.

    >>> reached([(0.0, 4.0), (10.0, 3.0), (20.0, 2.0)], 2.5)
    15.0
    """
    last: tuple[float, float] | None = None
    for seconds, loss in held_out:
        if loss <= goal:
            if last is None:
                return seconds
            return last[0] + (seconds - last[0]) * (last[1] - goal) / (last[1] - loss)
        last = seconds, loss
    return None


def steps_for_one(found: Mapping[str, Any], other: Mapping[str, Any], steps: int) -> float | None:
    """Return how many steps of a method learned what one step of the other had learned after so many steps. None if one of them
    did not get so far.

    Losses of weights that were trained at a constant rate differ by chance from one evaluation to the next. So each counts as the
    mean of three in a row.

    >>> slow, fast = ({"step_ms": 1e3, "held_out": [(n, 4.0 - n / part) for n in range(0, 50, 10)]} for part in (20, 10))
    >>> steps_for_one(slow, fast, 15), steps_for_one(slow, fast, 25)
    (2.0, None)
    """
    own, others = _by_steps(found), _by_steps(other)
    goal = next(
        (a + (b - a) * (steps - begin) / (end - begin) for (begin, a), (end, b) in pairwise(others) if begin <= steps <= end),
        None,
    )
    took = None if goal is None else reached(own, goal)
    return None if took is None else took / steps


def _by_steps(found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Pairs of a number of steps and the mean of the loss then, before and after."""
    losses = [loss for _, loss in found["held_out"]]
    return [
        (1e3 * seconds / found["step_ms"], fmean(losses[max(0, at - 1) : at + 2]))
        for at, (seconds, _) in enumerate(found["held_out"])
    ]
