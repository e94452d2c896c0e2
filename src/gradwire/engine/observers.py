"""Who is told of a reducer's steps."""

import weakref
from collections.abc import Iterator

from gradwire.exchange import StepReport


class Observer:
    """What is told of a reducer's steps. Register it with `Reducer.observe`, which does not keep it alive."""

    def begins(self) -> None:
        """The first gradient of a step came; nothing is sent yet."""

    def finished(self, exposed_s: float) -> None:
        """A step counts, at the end of its backward, where `exposed_s` seconds were waited for it. The newest observer is told
        first."""

    def idle(self) -> None:
        """All observers were told that the step is finished."""

    def measured(self, report: StepReport) -> None:
        """The lanes are done with a step: where steps overlap, when the next one has begun."""


class Observers:
    """Those of one reducer, the newest first. They are not kept alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Observer]] = []

    def __iter__(self) -> Iterator[Observer]:
        for reference in list(self._references):
            if (observer := reference()) is not None:
                yield observer

    def add(self, observer: Observer) -> None:
        """Tell it of steps, before all others."""
        self._references.insert(0, weakref.ref(observer))

    def remove(self, observer: Observer) -> None:
        """Tell it no more."""
        self._references = [reference for reference in self._references if reference() not in (observer, None)]

    def begins(self) -> None:
        """The first gradient of a step came."""
        for observer in self:
            observer.begins()

    def finished(self, exposed_s: float) -> None:
        """A step counts, and its backward returns."""
        observers = list(self)
        for observer in observers:
            observer.finished(exposed_s)
        for observer in observers:
            observer.idle()

    def measured(self, report: StepReport) -> None:
        """The lanes are done with a step."""
        for observer in self:
            observer.measured(report)
