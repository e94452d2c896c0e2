"""`gw.Tuned` on a live job: bucket sizes are tried in turn, and the one with the highest throughput stays.

A trial is some steps that do not count, since memory is new, and some whose mean counts: of the slowest rank. Rank 0 searches and
sends each next size; every rank makes the same plan of it. When the search is over nothing is measured any more.

A step is timed from the end of one backward to the end of the next: so all that a size may lengthen counts, in the pipelined
schedule the next forward too. A pause between two steps, as for an evaluation, does not.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch

from gradwire.auto.decision import say
from gradwire.auto.live import Live
from gradwire.auto.resuming import unlike
from gradwire.auto.sizes import SizeSearch, check_library
from gradwire.core.plan import Plan
from gradwire.core.tensors import TensorInfo
from gradwire.engine.session import Session
from gradwire.planner.policy import Policy
from gradwire.planner.tuned import Tuned
from gradwire.record.run import Decision

__all__ = ["TriedSize", "TunedSize", "Tuning"]

_PAUSE = 3.0
"""A step that takes so many times as long as the trial's median holds a pause, and counts as the median."""


@dataclass(frozen=True)
class TriedSize:
    """One trial."""

    nbytes: int
    """The `bucket_bytes` of the policy."""
    buckets: int
    """How many that makes."""
    step_us: float
    """Mean of the steps that counted, of the slowest rank."""
    search_us: float
    """What finding this size and changing to it took."""
    cost_us: float
    """How much longer all steps of the trial took than as many under the chosen size, with what finding the size took."""

    def __str__(self) -> str:
        buckets = f"{self.buckets} bucket{'s' if self.buckets > 1 else ''}"
        return f"{self.nbytes / 2**20:.3g} MB ({buckets}): {self.step_us / 1e3:.1f} ms a step"


@dataclass(frozen=True)
class TunedSize:
    """What runs from a step on, and what was tried."""

    step: int
    search: str
    chosen: TriedSize
    """The first trial of the size that is kept; `step_us` is the mean over its trials."""
    tried: tuple[TriedSize, ...]
    """All trials, in their order. The Bayesian search tries again what looks best."""
    took_steps: int
    """Steps of all trials."""

    @property
    def cost_us(self) -> float:
        """Of all trials together."""
        return sum(each.cost_us for each in self.tried)

    def __str__(self) -> str:
        first, trials, sizes = self.tried[0], len(self.tried), len({each.nbytes for each in self.tried})
        cost_s = self.cost_us / 1e6
        beside = "which was tried first" if self.chosen.nbytes == first.nbytes else f"tried first: {first}"
        return (
            f"buckets of {self.chosen}, {beside}. search='{self.search}' tried {sizes} size{'s' if sizes > 1 else ''}"
            f" in {f'{trials} trials and ' if trials > sizes else ''}{self.took_steps} steps, which cost {cost_s:.2f} s, "
            f"{cost_s / trials:.3f} s a trial."
        )


class Tuning:
    """The driver of one handle."""

    def __init__(self, tuned: Tuned) -> None:
        """Raises PlanError if the search needs a library that is missing."""
        if tuned.search == "bayes":
            check_library()  # on every rank and before the first step, though only rank 0 will use it
        self.tuned = tuned
        self.decisions: list[TunedSize] = []
        self.clock: Callable[[], float] = time.perf_counter
        """Seconds that pass on this rank."""
        self.searching = True
        self._infos: list[TensorInfo] | None = None
        self._search: SizeSearch | None = None
        """On rank 0."""
        self._tried: list[TriedSize] = []
        self._nbytes = tuned.start_bytes
        """The size that is being tried."""
        self._steps_us: list[float] = []
        """Of the trial."""
        self._search_us, self._mark = 0.0, 0.0
        """How long it took to find the size and to change to it, and when the last step ended."""

    def __repr__(self) -> str:
        return repr(self.tuned)

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """What runs until the first trial."""
        return self.tuned.with_bytes(self.tuned.start_bytes)

    def recorded(self) -> Decision:
        """The last size found, if there is one."""
        return Decision(by=repr(self), words=tuple(str(each) for each in self.decisions[-1:]))

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Why a saved plan is not the policy's in buckets of some size; '' if it is."""
        return unlike(plan, own)

    def resumed(self, session: Session, same_ranks: bool, searching: bool) -> None:
        """Go on under the size that was found; search anew where it was not found yet, or by other ranks."""
        settled = same_ranks and not searching
        self._infos, self.searching = (Live(session).infos, False) if settled else (None, True)

    def detached(self) -> None:
        """Nothing is kept on the model."""

    def finished(self, session: Session) -> None:
        """One step more."""
        live = Live(session)
        if live.group.world_size == 1:
            self.searching = False
        elif live.infos is not self._infos:  # the first step, or the model is another one
            self._begin(live)
        elif self.searching:
            self._step(live)

    def _begin(self, live: Live) -> None:
        self._infos, self.searching, self._tried = live.infos, True, []
        began = self.clock()
        if live.group.rank == 0:
            self._search = SizeSearch(self.tuned, lambda nbytes: self._buckets(live, nbytes))
        self._try_next(live, began)

    def _buckets(self, live: Live, nbytes: int) -> tuple[tuple[str, ...], ...]:
        plan = live.plan_of(self.tuned.with_bytes(nbytes))
        return tuple(bucket.tensors for bucket in plan.buckets)

    def _step(self, live: Live) -> None:
        if live.device.type != "cpu":
            # that of the computation alone: gathers may go on beside the next forward
            torch.accelerator.current_stream(live.device).synchronize()
        now = self.clock()
        if live.everybody:
            self._steps_us.append(1e6 * (now - self._mark))
        self._mark = now
        if len(self._steps_us) == self.tuned.discard_steps + self.tuned.trial_steps:
            self._ended(live)

    def _ended(self, live: Live) -> None:
        began, steps_us = self.clock(), _without_pauses(self._steps_us)
        own = [fmean(steps_us[self.tuned.discard_steps :]), self._search_us, sum(steps_us)]
        step_us, search_us, total_us = (max(column) for column in zip(*live.exchange(own)(), strict=True))
        buckets = len(live.plan.buckets)
        self._tried.append(TriedSize(self._nbytes, buckets, step_us, search_us, search_us + total_us))
        if self._search is not None:
            self._search.took(1e6 / step_us)
        self._try_next(live, began)

    def _try_next(self, live: Live, began: float) -> None:
        """Change to the size that is to be tried, or, when the search is over, to the best."""
        proposed = self._search.propose() if self._search is not None else None
        told = int(live.from_first(str(proposed or 0)))
        if told == 0:
            self._decide(live)
            return
        self._nbytes, self._steps_us = told, []
        live.change_to(live.plan_of(self.tuned.with_bytes(told)))
        self._mark = self.clock()
        self._search_us = 1e6 * (self._mark - began)

    def _decide(self, live: Live) -> None:
        self.searching, self._search = False, None
        means = {one.nbytes: _mean_us(self._tried, one.nbytes) for one in self._tried}
        nbytes = min(means, key=means.__getitem__)
        live.change_to(live.plan_of(self.tuned.with_bytes(nbytes)))
        each = self.tuned.discard_steps + self.tuned.trial_steps
        tried = tuple(replace(one, cost_us=max(0.0, one.cost_us - each * means[nbytes])) for one in self._tried)
        decision = TunedSize(
            step=live.step,
            search=self.tuned.search,
            chosen=replace(next(one for one in tried if one.nbytes == nbytes), step_us=means[nbytes]),
            tried=tried,
            took_steps=each * len(tried),
        )
        self.decisions.append(decision)
        if live.group.rank == 0:
            say(str(decision))


def _mean_us(tried: Sequence[TriedSize], nbytes: int) -> float:
    """Of a step under a size, over all its trials."""
    return fmean(one.step_us for one in tried if one.nbytes == nbytes)


def _without_pauses(steps_us: Sequence[float]) -> list[float]:
    usual = median(steps_us)
    return [us if us <= _PAUSE * usual else usual for us in steps_us]
