"""`plan="auto"` on a live job: what happens in which step.

1. settle: the first steps, under the first policy: memory is new, and the order of gradients is learned.
2. look: a few steps whose gradients' moments are taken, with nothing sent before the last one. Then links and codecs are measured
   and rank 0 makes offers.
3. try: the offers run in turns, as the trial says.
4. watch: the chosen plan runs. Every few steps ranks exchange how long these took; the answer is looked at a step later, so
   that nobody waits for it. When something drifted, links are measured again and offers are tried again, the running plan first.

Ranks always do the same in the same step: every decision follows from numbers that all of them have, exchanged or sent by rank 0.
Steps in which a rank had no batch (`handle.join()`) are left out on all.

A step is timed from the end of the last one to its own, as `Pace` says, whatever the schedule. In the `delayed` schedule it ends
in the script's next `optimizer.step()`, when its exchange has landed.

Schedules that the script cannot run are left out, on all ranks if on any: how it steps its optimizers is watched until offers
are made.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import msgspec
import torch

from gradwire.auto.accuracy import (
    SCHEDULES,
    all_specs,
    check_accuracy,
    check_schedules,
    first_policy,
    schedules_of,
    specs_of,
)
from gradwire.auto.decision import AutoDecision, Tried, say
from gradwire.auto.live import Live
from gradwire.auto.measuring import StepMoments, cluster_of, codecs_of, profile_of, scaled
from gradwire.auto.pace import Pace
from gradwire.auto.planning import Offer, foreseen, offers
from gradwire.auto.stepped import Stepped
from gradwire.auto.trial import Candidate, Trial
from gradwire.auto.watch import WINDOW, Drift, Watch
from gradwire.core.cluster import Cluster
from gradwire.core.costs import Costs
from gradwire.core.plan import Plan
from gradwire.core.profile import Profile
from gradwire.core.schedules import Backward
from gradwire.core.specs import Identity
from gradwire.core.tensors import TensorInfo
from gradwire.engine.session import Session
from gradwire.errors import FormatError, GradwireError, PlanError
from gradwire.planner.policy import Policy, Uniform
from gradwire.profiler.clock import Clock
from gradwire.record.run import Decision as Recorded

__all__ = ["Auto"]

SETTLE_STEPS, LOOK_STEPS = 2, 3
_MOST_SECONDS = 0.3
"""For each kind of link, for codecs and for the planner's search, at most."""
_STEPS_WORTH = 4.0
"""And no longer than so many steps take."""

_UNDECIDED = "auto had not decided yet: it takes 40 to 80 steps, in which it measures and tries plans."

_GOES_ON = (
    "It goes on under the plan that it began this run with: one that was saved, or the first where it could not "
    "plan or is alone."
)

_Phase = Callable[[Live, float], None]
_Told = tuple[list[tuple[Candidate, dict[str, Any]]], list[Candidate]]
"""Candidates with their plans; and those that are only foreseen."""


class Auto:
    """The driver of one handle."""

    def __init__(self, accuracy: str, schedules: tuple[str, ...]) -> None:
        """Raises PlanError for a class of accuracy or a schedule that is none."""
        self.accuracy = check_accuracy(accuracy)
        self.schedules = check_schedules(schedules)
        self.decisions: list[AutoDecision] = []
        self._watch = Watch()
        self._infos: list[TensorInfo] | None = None
        self.clock: Callable[[], float] = time.perf_counter
        """Seconds that pass on this rank."""
        self._pace = Pace()
        self._began_s = 0.0
        """When the step in hand began."""
        self._stepped: Stepped | None = None
        self._phase: _Phase = self._settle
        self._current: Plan | None = None
        """The plan that was chosen."""
        self._profile: Profile | None = None
        self._costs: Costs | None = None
        self._moments: StepMoments | None = None
        self._waiting: Callable[[], list[list[float]]] | None = None
        """For a window's times of all ranks, which were sent a step before."""

    def __repr__(self) -> str:
        return f"Auto(accuracy={self.accuracy!r}, schedules={self.schedules!r})"

    @property
    def searching(self) -> bool:
        """Whether what runs is not decided: a run that resumes then decides anew."""
        return self._phase not in (self._watching, self._settle_resumed)

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """What runs until something is decided. A rank alone sends nothing, so there nothing is encoded."""
        return first_policy(self.accuracy, tensors) if ranks > 1 else Uniform(Identity())

    def recorded(self) -> Recorded:
        """The last decision, and why."""
        if self.decisions:
            return self.decisions[-1].recorded()
        if self.searching:
            return Recorded(by="plan='auto', which had not decided yet", words=(_UNDECIDED,))
        return Recorded(by="plan='auto'", words=(_GOES_ON,))

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Why a saved plan is not allowed: by its schedule, or by what it encodes; '' if it is."""
        kind = plan.schedule.word
        if kind not in self.schedules:
            return f"schedules is {self.schedules!r}, and it is in {kind!r}. Allow that one."
        specs = {bucket.spec_of(name) for bucket in plan.buckets for name in bucket.tensors}
        allowed = {Identity(), *all_specs(self.accuracy)}
        if kind == "delayed" and plan.schedule not in schedules_of(self.accuracy, self.schedules):
            return f"accuracy is {self.accuracy!r}, which allows no {plan.schedule!r}. Load it with the class it was saved under."
        if lossy := sorted(map(repr, specs - allowed)):
            return (
                f"accuracy is {self.accuracy!r}, which allows no {lossy[0]}. Load it with the class it was saved under."
            )
        return ""

    def resumed(self, session: Session, same_ranks: bool, searching: bool) -> None:
        """Go on under the plan of the state. Other ranks than those that saved decide anew, beginning with it; what was only
        being tried is one candidate among others."""
        live = Live(session)
        self._begin(live)
        self._current = None if searching else live.plan
        if same_ranks and not searching:
            self._phase = self._settle_resumed

    def pause(self) -> None:
        """The script does something else now: what passes until the next step's forward is no part of that step."""
        self._pace.pause()

    def finished(self, session: Session) -> None:
        """One step more."""
        live = Live(session)
        if live.infos is not self._infos:  # the model is another one
            self._begin(live)
        if live.device.type != "cpu":
            # that of the computation alone: gathers may go on beside the next forward
            torch.accelerator.current_stream(live.device).synchronize()
        now = self.clock()
        began_s = live.began_s
        if began_s is None:
            began_s = now if self._pace.mark_s is None else self._pace.mark_s
        self._began_s = self._pace.step(began_s, now)
        if live.group.world_size == 1:
            self._phase = self._watching  # there is nothing to decide
        elif live.everybody:
            self._phase(live, 1e6 * (now - self._began_s))

    # ---- settle and look

    def detached(self) -> None:
        """The handle lets go of the model: nothing stays on it or on the optimizers."""
        for watcher in (self._stepped, self._moments):
            if watcher is not None:
                watcher.remove()
        self._stepped = self._moments = None

    def _begin(self, live: Live) -> None:
        self._infos = live.infos
        self.detached()
        live.hold(False)
        self._pace = Pace()
        self._phase = self._settle
        self._steps, self._spent_us, self._took = 0, 0.0, 0
        self._why = "at the start"
        self._current = self._profile = self._costs = self._waiting = None

    def _settle(self, live: Live, us: float) -> None:
        if live.plan.schedule != Backward():  # of a resumed run; steps that overlap do not show what they consist of
            live.change_to(live.plan_of(self.first_policy(live.infos, live.group.world_size)))
            self._pace.forget()
            return
        self._steps += 1
        if self._steps == 1 and self.schedules != ("backward",):
            self._stepped = Stepped(live.session.optimizers)
        # what changes with the step, as PowerSGD does after its first ones, is to be seen as it stays
        last = SETTLE_STEPS if self.accuracy != "aggressive" else 10 - LOOK_STEPS
        if self._steps >= last:
            self._steps, self._phase = 0, self._look
            self._moments = StepMoments(live.session.parameters, Clock(live.device, self.clock))
            live.hold(True)

    def _look(self, live: Live, us: float) -> None:
        assert self._moments is not None and self._infos is not None and self._pace.mark_s is not None
        self._steps += 1
        self._took += 1
        self._spent_us += us
        self._moments.ended(self._began_s, self._pace.mark_s)
        if self._steps < LOOK_STEPS:
            return
        self._moments.remove()
        live.hold(False)
        own = [us, 1e6 * self._pace.usual_s, *(moment for row in self._moments.rows for moment in row)]
        rows = live.exchange(own)()
        self._moments = None
        between_us = max(row[1] for row in rows)
        self._profile = profile_of(live, self._infos, [row[2:] for row in rows], between_us)
        self._offer(live, max(row[0] for row in rows))

    def _offer(self, live: Live, step_us: float) -> None:
        """Measure links, let rank 0 make offers, and begin to try them. `step_us` is the same on all ranks."""
        began = self.clock()
        self._pace.forget()
        seconds = min(_MOST_SECONDS, _STEPS_WORTH * step_us / 1e6)
        cluster = cluster_of(live, seconds)
        self._refused = self._find_refused(live)
        text = ""
        if live.group.rank == 0:
            try:
                text = msgspec.json.encode(self._made(live, cluster, seconds)).decode()
            except GradwireError as error:
                say(f"plan='auto' could not plan and goes on as it is: {error}")
        self._offers, self._elsewhere = _read(live.from_first(text))
        self._spent_us += 1e6 * (self.clock() - began)
        (spent_us,) = live.exchange([self._spent_us])()[0]
        if not self._offers:
            self._watch_from_now(live, live.plan, step_us)
            return
        current = 0 if self._kept() is not None else None
        self._trial = Trial([offer.candidate for offer in self._offers], current, step_us, spent_us, self._took)
        self._exposed_us: list[list[float]] = [[] for _ in self._offers]
        self._phase, self._runs, self._changing_us = self._try, -1, 0.0
        self._run_turn(live)

    def _made(self, live: Live, cluster: Cluster, seconds: float) -> _Told:
        """What rank 0 offers, and the best by prediction of the schedules that are not allowed."""
        assert self._profile is not None
        specs = specs_of(self.accuracy, live.infos)
        allowed = [s for s in schedules_of(self.accuracy, self.schedules) if s.word not in self._refused]
        others = schedules_of(self.accuracy, [word for word in SCHEDULES if word not in self.schedules])
        if self._costs is None:
            corrections = {s.correction for s in [*allowed, *others] if s.correction}
            self._costs = codecs_of(live, [*specs, *(corrections if specs else ())], seconds)
        job = (self._profile, cluster, self._costs, specs)
        made = offers(*job, seconds, self._kept(), allowed)
        return [(offer.candidate, offer.plan.to_dict()) for offer in made], foreseen(*job, others)

    def _kept(self) -> Plan | None:
        """The chosen plan, if its schedule can still run."""
        current = self._current
        return None if current is None or current.schedule.word in self._refused else current

    def _find_refused(self, live: Live) -> dict[str, str]:
        """The kinds of schedule that are allowed and cannot run here, with the reason of the first rank that has one."""
        own: dict[str, str] = {}
        if self._stepped is not None:
            self._stepped.remove()
            for schedule in schedules_of(self.accuracy, self.schedules):
                own.setdefault(schedule.word, self._stepped.problem or live.why_not(schedule))
        refused: dict[str, str] = {}
        for told in live.from_all(msgspec.json.encode(own).decode()):
            for kind, why in msgspec.json.decode(told, type=dict[str, str]).items():
                if why:
                    refused.setdefault(kind, why)
        return refused

    # ---- try

    def _run_turn(self, live: Live) -> None:
        """Change to the plan whose turn it is; to the chosen one when there is none."""
        while (turn := self._trial.turn) is not None:
            try:
                self._change_to(live, turn.candidate)
                return
            except (PlanError, FormatError):  # of an option that this engine does not run: on every rank
                self._trial.leave_out()
        self._decide(live)

    def _change_to(self, live: Live, candidate: int) -> None:
        if candidate != self._runs:
            began = self.clock()
            live.change_to(self._offers[candidate].plan)
            self._runs = candidate
            self._pace.runs(candidate)
            self._changing_us += 1e6 * (self.clock() - began)

    def _try(self, live: Live, us: float) -> None:
        self._took += 1
        turn, rows = self._trial.turn, live.exchange([us, live.exposed_us, self._changing_us])()
        assert turn is not None
        self._trial.spend(max(row[2] for row in rows))
        self._changing_us = 0.0
        self._exposed_us[turn.candidate].append(min(row[1] for row in rows))
        self._trial.took(max(row[0] for row in rows))
        self._run_turn(live)

    def _decide(self, live: Live) -> None:
        trial, index = self._trial, self._trial.chosen
        assert index is not None
        self._change_to(live, index)
        tried = [
            Tried(
                candidate.name,
                candidate.predicted_us,
                trial.median_us(place),
                len(trial.times[place]),
                candidate.steps_for_one,
            )
            for place, candidate in enumerate(trial.candidates)
        ]
        plain = next(place for place, candidate in enumerate(trial.candidates) if candidate.plain)
        decision = AutoDecision(
            step=live.step,
            why=self._why,
            chosen=tried[index],
            plain=tried[plain],
            tried=tuple(tried),
            took_steps=self._took,
            cost_us=trial.cost_us,
            exposed_us=median(self._exposed_us[index] or [0.0]),
            elsewhere=tuple(
                Tried(each.name, each.predicted_us, None, 0, each.steps_for_one) for each in self._elsewhere
            ),
            refused=tuple(f"{kind}, since {why.rstrip('.')}" for kind, why in self._refused.items()),
        )
        self.decisions.append(decision)
        if live.group.rank == 0:
            say(str(decision))
        self._watch_from_now(live, self._offers[index].plan, trial.median_us(index) or 0.0)

    # ---- watch

    def _settle_resumed(self, live: Live, us: float) -> None:
        self._steps += 1
        if self._steps >= SETTLE_STEPS:
            self._watch_from_now(live, live.plan, 0.0)

    def _watch_from_now(self, live: Live, plan: Plan, step_us: float) -> None:
        self._current = plan
        self._watch.chosen(live.step, plan.digest(), step_us)
        self._cycle: deque[tuple[float, float]] = deque(maxlen=plan.schedule.period)
        """Times of the last steps, of which the mean counts: a correction takes longer than other steps."""
        self._window: list[tuple[float, float]] = []
        self._waiting, self._phase = None, self._watching
        self._spent_us, self._took = 0.0, 0

    def _watching(self, live: Live, us: float) -> None:
        self._cycle.append((us, live.link_us))
        step_us, link_us = (fmean(column) for column in zip(*self._cycle, strict=True))
        self._window.append((step_us, link_us))
        if self._waiting is not None:
            rows, self._waiting = self._waiting(), None
            drift = self._watch.window(live.step, *_over_ranks(rows))
            if drift is not None:
                self._again(live, drift, max(row[WINDOW - 1] for row in rows))
                return
        if len(self._window) == WINDOW:
            self._waiting = live.exchange([value for column in zip(*self._window, strict=True) for value in column])
            self._window = []

    def _again(self, live: Live, drift: Drift, step_us: float) -> None:
        self._why = str(drift)
        if self._profile is None:  # a resumed run has none yet
            self._steps, self._phase = 0, self._settle
            return
        if not drift.of_links:
            self._profile = scaled(self._profile, drift.step)
        self._offer(live, step_us)


def _read(text: str) -> tuple[list[Offer], list[Candidate]]:
    """What rank 0 made; nothing where it could not."""
    made, elsewhere = msgspec.json.decode(text, type=_Told) if text else ([], [])
    return [Offer(candidate, Plan.from_dict(plan)) for candidate, plan in made], elsewhere


def _over_ranks(rows: list[list[float]]) -> tuple[list[float], list[float]]:
    """Of each step how long it took, on the slowest rank, and how long lanes were busy with links, on the rank that waited
    least for others."""
    columns = list(zip(*rows, strict=True))
    return [max(column) for column in columns[:WINDOW]], [min(column) for column in columns[WINDOW:]]
