"""What was decided, and how it is said."""

import logging
from dataclasses import dataclass

from gradwire.record.run import Alternative
from gradwire.record.run import Decision as Recorded

__all__ = ["AutoDecision", "Tried", "say"]

_LOGGER = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Tried:
    """A plan that was a candidate."""

    name: str
    """Its specs and number of buckets, in words."""
    predicted_us: float
    """Of a step, by the simulator."""
    measured_us: float | None
    """Median of the steps that counted, of the slowest rank; None if it was not run."""
    steps: int
    """How many counted."""
    steps_for_one: float = 1.0
    """So many of its steps bring the loss as far as one of plain all-reduce."""


@dataclass(frozen=True)
class AutoDecision:
    """What runs from a step on, and why."""

    step: int
    why: str
    """What made gradwire decide: 'start', or what had changed."""
    chosen: Tried
    plain: Tried
    """Plain all-reduce, whether or not it was chosen."""
    tried: tuple[Tried, ...]
    """All candidates, in the order of the trial."""
    took_steps: int
    """Steps from the first that was looked at to this one."""
    cost_us: float
    """How much longer these took than as many under the chosen plan, with all that was measured and planned."""
    exposed_us: float
    """Of the chosen plan's step, how long it waits for exchanges, on the rank that waits least: the most that another schedule
    could gain."""
    elsewhere: tuple[Tried, ...] = ()
    """The best plan by prediction of each schedule that `schedules=` does not allow."""
    refused: tuple[str, ...] = ()
    """Schedules that are allowed and cannot run in this script, each with the reason."""

    def __str__(self) -> str:
        chosen, plain = self.chosen, self.plain
        if chosen.measured_us is None:
            return f"plan='auto' runs {chosen.name}: by prediction nothing else comes near it."
        measured = chosen.measured_us
        runs = f"plan='auto' runs {chosen.name}: {measured / 1e3:.1f} ms a step (predicted {chosen.predicted_us / 1e3:.1f})"
        if chosen == plain:
            beside = "plain all-reduce, and nothing tried is more than 2 % faster"
        elif plain.measured_us:
            times = plain.measured_us / max(measured, 1e-9)
            beside = f"plain all-reduce {plain.measured_us / 1e3:.1f} ms, {times:.2f} times as long"
        else:
            beside = f"plain all-reduce {plain.predicted_us / 1e3:.1f} ms by prediction"
        part = 100 * self.cost_us / max(1000 * measured, 1e-9)
        return (
            f"{runs}; {beside}. Decided in {self.took_steps} steps ({self.why}), which cost {self.cost_us / 1e6:.2f} s, "
            f"{part:.1f} % of 1000 steps. {self.exposed_us / 1e3:.1f} ms of a step wait for exchanges{self._elsewhere}."
            + "".join(
                f" {each.name} took {each.measured_us / 1e3:.1f} ms, but needs about {each.steps_for_one:g} times the steps."
                for each in self.tried
                if each.measured_us and each.measured_us < measured and each.steps_for_one > chosen.steps_for_one
            )
            + "".join(f" Not tried: {each}." for each in self.refused)
        )

    def recorded(self) -> Recorded:
        """For a record of the run."""
        alternatives = tuple(
            Alternative(name=each.name, step_us=each.measured_us, kept=each == self.chosen)
            for each in self.tried
            if each.measured_us is not None
        )
        return Recorded(
            by=f"plan='auto', in step {self.step}", words=tuple(str(self).split("; ")), alternatives=alternatives
        )

    @property
    def _elsewhere(self) -> str:
        own_us = self.chosen.predicted_us * self.chosen.steps_for_one
        faster = [each for each in self.elsewhere if each.predicted_us * each.steps_for_one < own_us]
        if not faster:
            return " and no schedule that is not allowed is predicted to be faster" if self.elsewhere else ""
        times = "; ".join(f"{each.name} would take {each.predicted_us / 1e3:.1f} ms (predicted)" for each in faster)
        return f"; {times}, if schedules= allowed it"


def say(line: str) -> None:
    """Tell the user, through the logger 'gradwire' at level INFO: `logging.getLogger("gradwire").setLevel("WARNING")` keeps
    it quiet. Where nobody set up logging it goes to stderr, as warnings do."""
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    if not _LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("gradwire: %(message)s"))
        _LOGGER.addHandler(handler)
    _LOGGER.info(line)
