"""Driver of `gw.Tuned`: tries bucket sizes, and keeps the one with the highest throughput.

The first steps of a trial do not count, because memory is new. The mean of its other steps on the slowest rank counts. Rank 0
searches and sends each size; every rank makes the same plan from it. A step is timed from the end of one backward to the end of
the next, so that the next forward of the pipelined schedule counts. Pauses, such as evaluations, do not count.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

from gradwire.auto.decision import PlanDriver, say
from gradwire.auto.live import Live
from gradwire.auto.sizes import SizeSearch, check_library
from gradwire.core import TensorInfo
from gradwire.engine import Session
from gradwire.exchange import Saved
from gradwire.plan import Policy, Tuned

_PAUSE = 3.0
"""A step of this many times the trial's median contains a pause. It counts as the median."""


@dataclass(frozen=True)
class TriedSize:
    """One trial of a bucket size."""

    nbytes: int
    """The `bucket_bytes` of the policy."""
    buckets: int
    """Number of buckets of this size."""
    step_us: float
    """Mean time of the counted steps on the slowest rank."""
    search_us: float
    """Time of finding this size and changing to it."""
    cost_us: float
    """Time of all steps of the trial and of finding the size, minus the time of equally many steps of the chosen size."""

    def __str__(self) -> str:
        buckets = f"{self.buckets} bucket{'s' if self.buckets > 1 else ''}"
        return f"{self.nbytes / 2**20:.3g} MB ({buckets}): {self.step_us / 1e3:.1f} ms a step"


@dataclass(frozen=True)
class TunedSize:
    """The bucket size from `step` on, and all trials."""

    step: int
    search: str
    chosen: TriedSize
    """The first trial of the chosen size; `step_us` is the mean over its trials."""
    tried: tuple[TriedSize, ...]
    """All trials in their order. The Bayesian search repeats the best sizes."""
    took_steps: int
    """Steps of all trials."""

    @property
    def cost_us(self) -> float:
        """The cost of all trials together."""
        return sum(each.cost_us for each in self.tried)

    def __str__(self) -> str:
        first, trials, sizes = self.tried[0], len(self.tried), len({each.nbytes for each in self.tried})
        cost_s = self.cost_us / 1e6
        first_size = "which was tried first" if self.chosen.nbytes == first.nbytes else f"tried first: {first}"
        return (
            f"buckets of {self.chosen}, {first_size}. search='{self.search}' tried {sizes} size{'s' if sizes > 1 else ''}"
            f" in {f'{trials} trials and ' if trials > sizes else ''}{self.took_steps} steps, which cost {cost_s:.2f} s, "
            f"{cost_s / trials:.3f} s a trial."
        )


class Tuning(PlanDriver):
    """Driver of one handle with `gw.Tuned`."""

    searching = True

    def __init__(self, tuned: Tuned) -> None:
        """Raises PlanError if the search needs a library that is missing."""
        if tuned.search == "bayes":
            check_library()  # on every rank and before the first step, though only rank 0 will use it
        super().__init__(tuned)
        self.tuned = tuned
        self.clock: Callable[[], float] = time.perf_counter
        self._infos: list[TensorInfo] | None = None
        self._search: SizeSearch | None = None
        """The search; None on ranks other than 0."""
        self._tried: list[TriedSize] = []
        self._nbytes = tuned.start_bytes
        """The size that is on trial."""
        self._steps_us: list[float] = []
        self._search_us, self._mark = 0.0, 0.0
        """Time of finding the size and changing to it, in microseconds; and the end of the last step, in seconds."""

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """Return the policy until the first trial."""
        return self.tuned.with_bytes(self.tuned.start_bytes)

    def resumed(self, session: Session, saved: Saved) -> None:
        """Go on with the saved size. Search anew if the search had not ended, or if other ranks saved the size."""
        settled = saved.own and not saved.searching
        self._infos, self.searching = (Live(session).infos, False) if settled else (None, True)

    def finished(self, session: Session) -> None:
        """End a step, and end a trial that is complete."""
        live = Live(session)
        if live.group.world_size == 1:
            self.searching = False
        elif live.infos is not self._infos:  # the first step, or the model changed
            self._begin(live)
        elif self.searching:
            self._step(live)

    def _begin(self, live: Live) -> None:
        self._infos, self.searching, self._tried = live.infos, True, []
        began = self.clock()
        self._search = None
        self._try_next(live, began)

    def _buckets(self, live: Live, nbytes: int) -> tuple[tuple[str, ...], ...]:
        plan = live.plan_of(self.tuned.with_bytes(nbytes))
        return tuple(bucket.tensors for bucket in plan.buckets)

    def _step(self, live: Live) -> None:
        live.wait()
        now = self.clock()
        if live.everybody:
            self._steps_us.append(1e6 * (now - self._mark))
        self._mark = now
        if len(self._steps_us) == self.tuned.discard_steps + self.tuned.trial_steps:
            self._ended(live)

    def _ended(self, live: Live) -> None:
        began, usual = self.clock(), median(self._steps_us)
        steps_us = [us if us <= _PAUSE * usual else usual for us in self._steps_us]
        own = [fmean(steps_us[self.tuned.discard_steps :]), self._search_us, sum(steps_us)]
        step_us, search_us, total_us = (max(column) for column in zip(*live.exchange(own)(), strict=True))
        buckets = len(live.plan.buckets)
        self._tried.append(TriedSize(self._nbytes, buckets, step_us, search_us, search_us + total_us))
        self._try_next(live, began)

    def _try_next(self, live: Live, began: float) -> None:
        """Change to the next size, or to the best size after the search."""
        nbytes = int(live.made_by_first(partial(self._proposed, live), "the best size so far stays") or 0)
        if nbytes == 0:
            self._decide(live)
            return
        self._nbytes, self._steps_us = nbytes, []
        live.change_to(live.plan_of(self.tuned.with_bytes(nbytes)))
        self._mark = self.clock()
        self._search_us = 1e6 * (self._mark - began)

    def _proposed(self, live: Live) -> str:
        """Return the next size as text, on rank 0; "0" after the search."""
        if self._search is None:
            self._search = SizeSearch(self.tuned, lambda nbytes: self._buckets(live, nbytes))
        if self._tried:
            self._search.took(1e6 / self._tried[-1].step_us)
        return str(self._search.propose() or 0)

    def _decide(self, live: Live) -> None:
        self.searching, self._search = False, None
        if not self._tried:  # rank 0 could not begin
            return
        sizes = dict.fromkeys(one.nbytes for one in self._tried)
        means = {nbytes: fmean(one.step_us for one in self._tried if one.nbytes == nbytes) for nbytes in sizes}
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
        self.decide(decision)
        if live.group.rank == 0:
            say(str(decision))
