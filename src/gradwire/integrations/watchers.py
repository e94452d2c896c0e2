"""The watchers of a job's gradients and tasks, for jobs that have no reducer."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gradwire.engine import GradientWatcher
from gradwire.transport import Lanes, LanesObserver

__all__ = ["Watchers"]


class Watchers:
    """The watchers of one job. Gradients are known by their place, and each is seen once in a step."""

    def __init__(self) -> None:
        self._of_gradients: list[tuple[weakref.ref[Any], bool]] = []
        self._of_tasks: list[LanesObserver] = []
        self._lanes: Lanes | None = None

    def add(self, watcher: GradientWatcher, values: bool) -> Callable[[], None]:
        """Show gradients to a watcher, with `values` before they are sent, too. Returns what ends it."""
        entry = weakref.ref(watcher), values
        self._of_gradients.append(entry)
        return lambda: self._of_gradients.remove(entry) if entry in self._of_gradients else None

    def came(self, place: int, gradient: torch.Tensor) -> None:
        """Show a gradient that came to all watchers."""
        for watcher, values in [(reference(), values) for reference, values in self._of_gradients]:
            if watcher is not None:
                if values:
                    watcher.coming(place, gradient)
                watcher.ready(place)

    def observe(self, observer: LanesObserver) -> Callable[[], None]:
        """Show the tasks of lanes to an observer, on lanes to come as well. Returns what ends it."""
        self._switch(observer, True)
        return partial(self._switch, observer, False)

    def follow(self, lanes: Lanes) -> None:
        """Observe these lanes from now on."""
        self._lanes = lanes
        for observer in self._of_tasks:
            lanes.observe(observer)

    def _switch(self, observer: LanesObserver, on: bool) -> None:
        (self._of_tasks.append if on else self._of_tasks.remove)(observer)
        if self._lanes is not None:
            self._lanes.observe(observer, on)

    def leave(self) -> None:
        """Observe no lanes, until there are others."""
        self._lanes = None
