"""A schedule of one's own: gradients are sent when backward is over, all at once.

It hides nothing, so it is never faster than `backward`. It shows what a schedule consists of: data for planner and simulator,
and a class with a method for each event of a step.
"""

from collections.abc import Callable
from concurrent.futures import Future

import torch

from gradwire.core.schedules import Schedule
from gradwire.engine.control import RankReports
from gradwire.engine.reducer import Reducer
from gradwire.engine.schedules.base import Closed, TrainingJob, Traits
from gradwire.exchange import StepReport
from gradwire.transport import LanesObserver

__all__ = ["AtEnd", "AtEndSchedule"]


class AtEnd(Schedule, frozen=True, tag="atend"):
    """All gradients when backward is over."""

    @property
    def engine(self) -> str:
        return "gradwire_atend:AtEndSchedule"

    @property
    def sends_at_end(self) -> bool:
        return True


class HoldsBuckets(LanesObserver):
    """While it is registered the lanes get the buckets when the last one is ready."""

    holds = True


class AtEndSchedule:
    """Runs steps with the schedule `AtEnd`."""

    traits = Traits()

    def __init__(self, reducer: Reducer, schedule: AtEnd, job: TrainingJob) -> None:
        self._reducer = reducer
        self._holder = HoldsBuckets()

    def attach(self) -> None:
        """Nothing depends on the buckets."""

    def on_forward(self, module: torch.nn.Module) -> None:
        """Nothing is under way."""

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Nothing is under way."""

    def on_begin(self) -> None:
        self._reducer.lanes.observe(self._holder)
        self._reducer.begin(self._reducer.exchange)

    def on_end(self, told: "Future[RankReports]") -> None:
        self._reducer.lanes.observe(self._holder, on=False)
        self._reducer.running.wait(others=[told])

    def on_closed(self, closed: Closed) -> None:
        for missing in closed.missing:
            self._reducer.settle_missing(missing)
        running = self._reducer.running
        self._reducer.observers.measured(StepReport(running.meters, closed.exposed_s, running.device_times))

    def settle(self) -> None:
        """Nothing is under way."""

    def let_go(self) -> Callable[[], None]:
        return self._reducer.exchange.give_up

    def detach(self) -> None:
        self._reducer.lanes.observe(self._holder, on=False)
