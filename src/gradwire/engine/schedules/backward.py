"""The `backward` schedule: both phases at once, and averaged gradients when backward returns."""

from collections.abc import Callable
from concurrent.futures import Future

import torch

from gradwire.core import Backward
from gradwire.engine.control import RankReports
from gradwire.engine.reducer import Reducer
from gradwire.engine.schedules.base import Closed, TrainingJob, Traits
from gradwire.exchange import StepReport


class BackwardSchedule:
    """Wait-free backpropagation: a bucket is exchanged while backward computes the gradients of the next one."""

    traits = Traits(weighs_batches=True)

    def __init__(self, reducer: Reducer, schedule: Backward, job: TrainingJob) -> None:
        self._reducer = reducer

    def attach(self) -> None:
        """Nothing depends on the buckets."""

    def on_forward(self, module: torch.nn.Module) -> None:
        """Nothing is under way."""

    def before_gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Nothing is under way."""

    def on_begin(self) -> None:
        self._reducer.begin(self._reducer.exchange)

    def on_end(self, told: "Future[RankReports]") -> None:
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
        """Nothing was changed."""
