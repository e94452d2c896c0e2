"""The `backward` schedule: both phases at once, and averaged gradients when backward returns."""

from concurrent.futures import Future

from gradwire.collectives import Meter
from gradwire.engine.control import Report
from gradwire.engine.stats import StepReport
from gradwire.engine.step import Steps

__all__ = ["Backward"]


class Backward(Steps):
    """Wait-free backpropagation."""

    _meters: list[Meter]

    def _wait(self, told: "Future[list[Report]]") -> None:
        self._meters = self.executor.finish(told)

    def _closed(self, exposed_s: float) -> None:
        self.on_measured(StepReport(self._meters, exposed_s))
