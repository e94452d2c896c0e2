"""Decisions of `plan="auto"`, and the lines that report them to the user."""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from gradwire.auto.local_losses import DOUBLING
from gradwire.core import Plan, Spec
from gradwire.engine import Driver
from gradwire.record import Alternative
from gradwire.record import Decision as Recorded

_LOGGER = logging.getLogger("gradwire")
_UNEQUAL = 1.25
"""Factor between the speeds of two ranks from which on the line of a decision proposes unequal batches."""


@dataclass(frozen=True)
class Tried:
    """A candidate plan."""

    name: str
    """Specs and number of buckets, in words."""
    predicted_us: float
    """Predicted time of a step."""
    measured_us: float | None
    """Median time of the counted steps on the slowest rank. For a plan that only ran before the trial: the longest time
    of a step. None if the plan did not run."""
    steps: int
    """The number of counted steps."""
    steps_for_one: float = 1.0
    """Number of steps that bring the progress of one step of plain all-reduce."""
    loss_above: float = 0.0
    """How far the loss ends above synchronous SGD's at equal samples, as a share of it; only of local steps."""
    steps_at_constant_rate: float = 0.0
    """The number of `steps_for_one` at a constant learning rate; 0 if it is the same."""


@dataclass(frozen=True)
class Compared:
    """The two plans of a second look at a decision, with their times in it."""

    before: Tried
    """The plan that ran before: slower than predicted, or chosen before the rival had a turn."""
    rival: Tried
    """The candidate that seemed to be faster."""
    swapped: bool
    """Whether the rival runs from now on."""


@dataclass(frozen=True)
class AutoDecision:
    """The plan from `step` on, and the reasons for it."""

    step: int
    why: str
    """The reason for deciding: "at the start", or the change in the times."""
    chosen: Tried
    plain: Tried
    """Plain all-reduce, whether it was chosen or not."""
    tried: tuple[Tried, ...]
    """All candidates, in the order of the trial."""
    took_steps: int
    """The number of steps that deciding took."""
    cost_us: float
    """Time of these steps and of measuring and planning, minus the time of equally many steps of the chosen plan."""
    exposed_us: float
    """Time that a step waits for exchanges, on the rank that waits least: an upper bound on the gain of other schedules."""
    elsewhere: tuple[Tried, ...] = ()
    """The plan with the best prediction for each schedule that `schedules=` does not allow."""
    refused: tuple[str, ...] = ()
    """Allowed schedules that cannot run in this script, with the reasons."""
    instead_of: Tried | None = None
    """The fastest plan of the trial, if local steps were chosen instead of it; else None."""
    batch_share: tuple[float, ...] = ()
    """The proposed part of all samples for each rank, by its measured speed: with it all ranks compute equally long. The parts
    sum to 1. Empty if speeds are unknown, and where ranks share processors. `gw.LocalSteps.with_shares` makes
    numbers of local steps of it."""
    second_look: Compared | None = None
    """The result of a second look at the decision before; None if plans were tried as at the start."""
    ranks: int = 2
    """The number of ranks."""

    def seconds_for(self, steps: int) -> float:
        """Return in how many seconds the chosen plan is expected to learn what so many steps of synchronous SGD learn, at a
        constant learning rate. Steps count with their measured time, or else with the predicted one.

        >>> local = Tried("local steps", predicted_us=200_000.0, measured_us=None, steps=0, steps_for_one=1.5)
        >>> AutoDecision(5, "at the start", local, local, (local,), 5, 0.0, 0.0).seconds_for(1000)
        300.0
        """
        chosen = self.chosen
        step_us = chosen.measured_us or chosen.predicted_us
        return steps * step_us * (chosen.steps_at_constant_rate or chosen.steps_for_one) / 1e6

    def __str__(self) -> str:
        chosen, plain = self.chosen, self.plain
        if self.second_look is not None:
            return self._of_second_look(self.second_look)
        if self.instead_of is not None:
            return self._of_local_steps(self.instead_of)
        if chosen.measured_us is None:
            return f"plan='auto' runs {chosen.name}: all other plans are predicted to be much slower."
        measured = chosen.measured_us
        runs = f"plan='auto' runs {chosen.name}: {measured / 1e3:.1f} ms a step (predicted {chosen.predicted_us / 1e3:.1f})"
        if chosen == plain:
            comparison = "plain all-reduce: no plan tried is more than 2 % faster"
        elif plain.measured_us:
            times = plain.measured_us / max(measured, 1e-9)
            comparison = f"plain all-reduce {plain.measured_us / 1e3:.1f} ms, {times:.2f} times as long"
        else:
            comparison = f"plain all-reduce {plain.predicted_us / 1e3:.1f} ms by prediction"
        part = 100 * self.cost_us / max(1000 * measured, 1e-9)
        return (
            f"{runs}; {comparison}. Decided in {self.took_steps} steps ({self.why}), which cost {self.cost_us / 1e6:.2f} s, "
            f"{part:.1f} % of 1000 steps. A step waits {self.exposed_us / 1e3:.1f} ms for exchanges{self._elsewhere}."
            + "".join(
                f" {each.name} took {each.measured_us / 1e3:.1f} ms, but needs about {each.steps_for_one:g} times as many steps."
                for each in self.tried
                if each.measured_us and each.measured_us < measured and each.steps_for_one > chosen.steps_for_one
            )
            + self._ending
        )

    def _of_local_steps(self, before: Tried) -> str:
        runs = f"plan='auto' runs {self.chosen.name}: {self.chosen.predicted_us / 1e3:.1f} ms a step (predicted)"
        more = f" on 2 ranks, and {100 * DOUBLING:.1f} % more for each doubling, which 4 bits every 5 steps lost on 4 ranks"
        return (
            f"{runs}; {before.name} took {(before.measured_us or 0.0) / 1e3:.1f} ms, and a step waited "
            f"{self.exposed_us / 1e3:.1f} ms for exchanges. "
            f"At equal samples the loss is expected to end {100 * self.chosen.loss_above:.1f} % above that of synchronous SGD, "
            f"as on the bench's transformer{more if self.ranks > 2 else ''}: "
            f"the same loss needs about {self.chosen.steps_for_one:.2f} times as many steps. At a constant learning rate, "
            f"as there, it has what 1,000 steps of synchronous SGD learn after about {self.seconds_for(1000):.0f} s. "
            f"Decided in {self.took_steps} steps ({self.why}). Each rank trains alone from one exchange to the next, so compare "
            "the held-out loss; without 'local' in schedules= auto does not do it." + self._ending
        )

    def _of_second_look(self, look: Compared) -> str:
        before, rival = look.before, look.rival
        before_ms, rival_ms = ((each.measured_us or 0.0) / 1e3 for each in (before, rival))
        slow = f"{before_ms:.1f} ms a step, where {before.predicted_us / 1e3:.1f} were predicted"
        if look.swapped:
            return (
                f"plan='auto' runs {rival.name} from now on: {rival_ms:.1f} ms a step (predicted "
                f"{rival.predicted_us / 1e3:.1f}); {before.name}, which ran before, took {slow}."
            )
        return (
            f"plan='auto' goes on with {before.name}: it takes {slow}; {rival.name} was tried for {self.took_steps} steps, "
            f"and took {rival_ms:.1f}. That cost {self.cost_us / 1e6:.2f} s."
        )

    def recorded(self) -> Recorded:
        """Return the decision as a recorded run stores it."""
        alternatives = tuple(
            Alternative(name=each.name, step_us=each.measured_us, kept=each == self.chosen)
            for each in self.tried
            if each.measured_us is not None
        )
        return Recorded(by=f"plan='auto', in step {self.step}", words=tuple(str(self).split("; ")), alternatives=alternatives)

    @property
    def _ending(self) -> str:
        """The proposal of unequal batches, if ranks are far from equally fast, and what was not tried."""
        parts, refused = self.batch_share, "".join(f" Not tried: {each}." for each in self.refused)
        if not parts or max(parts) < _UNEQUAL * min(parts):
            return refused
        return (
            f" Ranks are not equally fast. With {100 * min(parts):.0f} to {100 * max(parts):.0f} % of the samples on each, by "
            f"handle.decision.batch_share, nobody waits.{refused}"
        )

    @property
    def _elsewhere(self) -> str:
        own_us = self.chosen.predicted_us * self.chosen.steps_for_one
        faster = [each for each in self.elsewhere if each.predicted_us * each.steps_for_one < own_us]
        if not faster:
            return "; the schedules that schedules= does not allow are not predicted to be faster" if self.elsewhere else ""
        times = "; ".join(f"{each.name} would take {each.predicted_us / 1e3:.1f} ms (predicted)" for each in faster)
        return f"; {times}, if schedules= allowed its schedule"


def say(line: str) -> None:
    """Log a line at level INFO of the logger 'gradwire', which level WARNING silences; to stderr if logging is not set up."""
    if _LOGGER.level == logging.NOTSET:
        _LOGGER.setLevel(logging.INFO)
    if not _LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("gradwire: %(message)s"))
        _LOGGER.addHandler(handler)
    _LOGGER.info(line)


def say_failed(instead: str) -> None:
    """Log that rank 0 could not plan, with the current exception. instead: what runs now."""
    _LOGGER.warning("rank 0 could not plan, so %s. Pass plan= to choose one.", instead, exc_info=True)


def unlike(plan: Plan, own: Plan, ways: Collection[Spec] = ()) -> str:
    """Return why a saved plan is not of the policy of `own`; '' if it is. Buckets may differ; specs in `ways` replace each other.

    >>> from gradwire.core import QSGD, Identity, TensorInfo
    >>> from gradwire.plan.policy import Uniform
    >>> four, eight, plain = (
    ...     Uniform(spec).plan([TensorInfo("w", (10, 10), "float32")]) for spec in (QSGD(bits=4), QSGD(bits=8), Identity())
    ... )
    >>> unlike(eight, four, ways=(QSGD(bits=4), QSGD(bits=8)))
    ''
    >>> unlike(eight, plain)
    "'w' has QSGD(bits=8, block=128) in the saved plan and Identity() here. Load the state with the plan= that it was saved with."
    """
    cure = "Load the state with the plan= that it was saved with."
    if plan.schedule != own.schedule:
        return f"the saved plan has schedule {plan.schedule!r}, this run has {own.schedule!r}. {cure}"
    specs = {name: bucket.spec_of(name) for bucket in own.buckets for name in bucket.tensors}
    for bucket in plan.buckets:
        for name in bucket.tensors:
            saved, here = bucket.spec_of(name), specs.get(name)
            if saved != here and not (saved in ways and here in ways):
                return f"{name!r} has {saved!r} in the saved plan and {here!r} here. {cure}"
    return ""


class PlanDriver(Driver):
    """The parts that drivers of policies share. given: the policy, `gw.AdaptiveBits` or `gw.Tuned` of the script."""

    def __init__(self, given: object) -> None:
        super().__init__()
        self._given = given

    def __repr__(self) -> str:
        return repr(self._given)

    def recorded(self) -> Recorded:
        """Return the last decision as a recorded run stores it."""
        return Recorded(by=repr(self), words=tuple(map(str, list(self.decisions)[-1:])))

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Return why a saved plan cannot come from the policy with other buckets; '' if it can."""
        return unlike(plan, own)
