"""Driver of `plan="auto"`, in four phases.

1. settle: the first step runs the first policy, until memory is allocated and the order of gradients is known.

2. look: two steps, or one if steps are long, record when gradients become ready. All sends wait for the last gradient.
Then links are measured, the codecs' times are read from the machine's cache, and rank 0 plans and makes offers.

3. try: the best offer runs. Other offers run too if predictions cannot separate them. A `Trial` decides about the
turns. Specs with a warm-up are tried without it, since its steps send more bytes. The chosen plan has the rest of it.

4. watch: the chosen plan runs. Every few steps ranks exchange the times of these steps, and read the answer one step
later, without waiting. If exchanges take longer or shorter, links are measured. If the links or the batch have changed,
rank 0 makes new offers. If the plan is slower than predicted, a `SecondLook` compares it with its best rival.

All ranks do the same in the same step: every decision follows from numbers that all ranks have. Steps in which a rank
had no batch (`handle.join()`) do not count on any rank. `StepPace` times the steps; in the `delayed` schedule a step
ends in the next `optimizer.step()`. A schedule that the script of one rank cannot run is left out on all ranks. If
planning fails, plain all-reduce runs on all ranks.

On a GPU the host waits for the end of each step until a plan is chosen, and then no more: the times of `watch` are those of
the host, which is never more than a step ahead. Times of exchanges come from events. The time that kernels take to compile
counts nowhere. If a rank's device cannot be timed, the first policy runs, and a line in the log says so.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import msgspec

from gradwire.auto.accuracy import (
    SCHEDULES,
    all_specs,
    check_accuracy,
    check_schedules,
    ever_allowed,
    ever_scheduled,
    first_policy,
    later_specs,
    schedules_of,
    specs_of,
    specs_under,
    with_embeddings,
)
from gradwire.auto.change_watch import ChangeWatch, seconds_for
from gradwire.auto.changes import StepPace
from gradwire.auto.decision import AutoDecision, Compared, Tried, say
from gradwire.auto.live import DrivenJob, Live, Stepped
from gradwire.auto.local import EXPOSED, local_offer, worth
from gradwire.auto.measuring import (
    CODECS_SECONDS,
    LONG_STEP_US,
    LOOK_STEPS,
    Look,
    cluster_of,
    codecs_of,
    measured_speeds,
    scaled,
)
from gradwire.auto.planning import Offer, Seen, foreseen, offers, on_trial, words_of
from gradwire.auto.second_look import PART_STEPS, SecondLook
from gradwire.auto.trial import Candidate, Trial
from gradwire.core import Backward, Cluster, Costs, Document, Identity, LocalSteps, Plan, Profile, Spec, TensorInfo
from gradwire.engine import Driver
from gradwire.errors import FormatError, PlanError
from gradwire.exchange import Saved
from gradwire.plan import FLAT, Policy, Uniform
from gradwire.record import Decision as Recorded
from gradwire.sim import Rules, device_of, rules_of

SETTLE_STEPS = 1

_Phase = Callable[[Live, float], None]
_Planned = tuple[Candidate, dict[str, Any]]
_Offered = tuple[list[_Planned], list[Candidate], _Planned | None]
"""The message of rank 0: candidates with plans, the best ones of schedules that are not allowed, and local steps in any case."""


class Auto(Driver):
    """Driver of one handle with `plan="auto"`."""

    decisions: deque[AutoDecision]

    def __init__(self, accuracy: str | float, schedules: Sequence[str], ranks: int) -> None:
        """Raises PlanError for an unknown accuracy class or schedule."""
        check_accuracy(accuracy)
        super().__init__()
        self.accuracy, self._ranks = accuracy, ranks
        self.schedules = check_schedules(schedules)
        self.later_specs = later_specs(accuracy, self.schedules, ranks)
        self._watch = ChangeWatch()
        self._infos: list[TensorInfo] | None = None
        self.clock: Callable[[], float] = time.perf_counter
        self._pace = StepPace()
        self._began_s = 0.0
        """Start of the current step, in seconds of `clock`."""
        self._stepped: Stepped | None = None
        self._phase: _Phase = self._settle
        self._second: SecondLook | None = None
        """The second look at the last decision, until it ends."""
        self._current: Plan | None = None
        """The chosen plan."""
        self._profile: Profile | None = None
        self._costs: Costs | None = None
        self._looking: Look | None = None
        self._speeds: tuple[float, ...] = ()
        """The speed of each rank, in any unit. Empty before it was measured."""
        self._unmeasured = ""
        """Why nothing can be measured on a device; '' if it can."""
        self._compiling_us = 0.0
        """Time of rank 0 for compiling kernels in the last call of `_made`."""
        self._warned = False
        """Whether it has warned of a codec that distorts gradients."""

    def __repr__(self) -> str:
        return f"Auto(accuracy={self.accuracy!r}, schedules={self.schedules!r})"

    @property
    def searching(self) -> bool:
        return self._deciding or (self._second is not None and self._second.tries)

    @property
    def chosen(self) -> Plan | None:
        """The last decision's plan, while its rival runs."""
        return self._current if self.searching and not self._deciding else None

    @property
    def looks_again(self) -> bool:
        """Whether a second look at the last decision is likely to run another plan, and has not ended."""
        return self._second is not None and self._second.expected

    @property
    def _deciding(self) -> bool:
        return self._phase not in (self._watching, self._settle_resumed, self._fixed)

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> Policy:
        """The policy until the first decision. A single rank sends nothing and encodes nothing."""
        return first_policy(self.accuracy, tensors, ranks) if ranks > 1 else Uniform(Identity())

    def recorded(self) -> Recorded:
        """Return the last decision and its reason as a recorded run stores them."""
        if self.decisions:
            return self.decisions[-1].recorded()
        if self._unmeasured:
            return Recorded(by="plan='auto', which could not measure times", words=(self._unmeasured,))
        if self._deciding:
            words = "auto had not decided yet: deciding takes up to 15 steps."
            return Recorded(by="plan='auto', which had not decided yet", words=(words,))
        words = "auto kept a saved plan, or plain all-reduce because it could not plan or has one rank."
        return Recorded(by="plan='auto'", words=(words,))

    def measurements(self) -> dict[str, Document] | None:
        """The profile, the cluster and the costs of the last decision, on rank 0."""
        profile, cluster, costs = self._profile, self._watch.cluster, self._costs
        if profile is None or cluster is None or costs is None:
            return None
        return {"profile": profile, "cluster": cluster, "costs": costs}

    def refuses(self, plan: Plan, own: Plan) -> str:
        """Return why the schedule or the specs of a saved plan are not allowed; '' if they are."""
        kind = plan.schedule.word
        if kind not in self.schedules:
            return f"schedules={self.schedules!r} does not contain {kind!r}, the saved plan's schedule. Add {kind!r}."
        lossy = _beyond(plan, ever_allowed(self.accuracy))
        delayed = kind == "delayed" and plan.schedule not in ever_scheduled(self.accuracy, self.schedules)
        if delayed or (kind == "local" and self.accuracy == "exact"):
            lossy = [repr(plan.schedule)]
        cure = "Load the state with the accuracy= that it was saved with."
        return f"accuracy={self.accuracy!r} does not allow the saved plan's {lossy[0]}. {cure}" if lossy else ""

    def _allows(self, plan: Plan) -> bool:
        """Whether the class allows the specs of a plan, and its corrections, on this number of ranks."""
        if plan.schedule.word == "delayed" and plan.schedule not in schedules_of(self.accuracy, self.schedules, self._ranks):
            return False
        return not _beyond(plan, all_specs(self.accuracy, self._ranks))

    def resumed(self, session: DrivenJob, saved: Saved) -> None:
        """Go on from a saved state with the saved plan, or with the one that it was compared with. If other ranks saved the
        plan, decide anew with this plan as the current one. If the plan was only on trial, or is not allowed on so many ranks,
        decide anew without it."""
        live = Live(session)
        runs = saved.chosen is None or self._runs_too(live, saved.chosen)
        self._begin(live)
        stays = runs and not saved.searching and self._allows(live.plan)
        self._current = live.plan if stays else None
        if saved.own and stays:
            self._phase = self._settle_resumed
            if live.group.rank == 0:
                say(f"plan='auto' goes on with the plan of the state that was loaded: {words_of(live.plan)}.")

    def pause(self) -> None:
        """Leave out the time until the next step's forward, because the script does something else now."""
        self._pace.pause()

    def finished(self, session: DrivenJob) -> None:
        """End a step, and run the current phase."""
        live = Live(session)
        if live.infos is not self._infos:  # the model changed
            self._begin(live)
        live.settled = live.queues and not self._deciding
        if not live.settled:
            live.wait()
        now = self.clock()
        self._began_s = self._pace.step(live.began_s, now)
        if live.group.world_size == 1:
            self._phase = self._watching  # there is nothing to decide
        elif live.everybody:
            self._phase(live, 1e6 * (now - self._began_s))
            self._pace.goes_on(self.clock())

    # ---- where nothing can be measured

    def _cannot_measure(self, live: Live) -> bool:
        """Whether the device of some rank cannot be timed. Then the plan that runs goes on on all ranks. Collective."""
        why = next(filter(None, live.from_all(live.why_no_times())), "")
        if why:
            self._unmeasured = (
                f"plan='auto' cannot measure times on this device, and decides nothing: {why.rstrip('.')}. It runs "
                f"{words_of(live.plan)} from now on. Pass plan= to choose another plan."
            )
            live.time_device(False)
            self._phase = self._fixed
            if live.group.rank == 0:
                say(self._unmeasured)
        return bool(why)

    def _fixed(self, live: Live, us: float) -> None:
        """Decide nothing."""

    # ---- settle and look

    def detached(self) -> None:
        """Remove all hooks from the model and the optimizers."""
        for watcher in (self._stepped, self._looking):
            if watcher is not None:
                watcher.remove()
        self._stepped = self._looking = None

    def _begin(self, live: Live) -> None:
        self._infos = live.infos
        self.detached()
        live.hold(False)
        live.time_device(live.queues)
        self._pace = StepPace()
        self._phase = self._settle
        self._steps, self._spent_us, self._took = 0, 0.0, 0
        self._why = "at the start"
        self._current = self._profile = self._costs = self._second = None
        self._speeds, self._unmeasured = (), ""

    def _settle(self, live: Live, us: float) -> None:
        # in a resumed run: steps that overlap cannot be measured in parts, and other ranks may have been allowed other plans
        if live.plan.schedule != Backward() or not self._allows(live.plan):
            live.change_to(live.plan_of(self.first_policy(live.infos, live.group.world_size)))
            self._pace.forget()
            return
        self._steps += 1
        self._took += 1
        compiled = live.queues and self._steps == 1
        self._spent_us += 0.0 if compiled else us
        if compiled and self._cannot_measure(live):
            return
        if self._steps == 1 and self.schedules != ("backward",):
            self._stepped = Stepped(live.job.optimizers)
        # specs that change after the first steps, such as PowerSGD, are measured after the change
        last = SETTLE_STEPS + live.queues if self.accuracy != "aggressive" else 10 - LOOK_STEPS
        if self._steps >= last:
            self._steps, self._phase = 0, self._look
            long = max(row[0] for row in live.exchange([us])()) >= LONG_STEP_US
            self._looking = Look(live, 1 if long else LOOK_STEPS, self.clock)

    def _look(self, live: Live, us: float) -> None:
        assert self._looking is not None
        self._took += 1
        self._spent_us += us
        found = self._looking.ended(live, self._began_s, us, self._pace)
        if found is None:
            return
        self._speeds, self._looking = self._looking.speeds, None
        self._profile, step_us = found
        began = self.clock()
        self._watch.cluster = cluster_of(live, seconds_for(step_us))
        self._spent_us += 1e6 * (self.clock() - began)
        # the sends of that step were delayed, so the plan takes at most that long
        self._offer(live, step_us, Seen(live.plan, step_us))

    def _offer(self, live: Live, step_us: float, seen: Seen | None = None) -> None:
        """Let rank 0 make offers, and begin the trial. step_us: the time of a step, equal on all ranks."""
        began, self._second = self.clock(), None
        self._pace.forget()
        self._refused = self._find_refused(live)
        instead = "plain all-reduce runs on all ranks" if self._current is None else "the plan chosen before goes on"
        make = lambda: msgspec.json.encode(self._made(live, seconds_for(step_us), seen)).decode()  # noqa: E731
        self._offers, self._elsewhere, self._local = _read(live.made_by_first(make, instead))
        self._spent_us += 1e6 * (self.clock() - began) - self._compiling_us
        rows = live.exchange([self._spent_us, live.exposed_us])()
        spent_us, self._seen_exposed_us = rows[0][0], min(row[1] for row in rows)
        if not self._offers:
            if self._current is None:
                live.change_to(live.plan_of(Uniform(Identity(), scheme=FLAT)))
            else:
                self._runs_too(live, self._current)  # a resumed run left it for the measurements
            self._watch_from_now(live, live.plan)
            return
        kept = self._kept()
        current = None if kept is None else [offer.plan.digest() for offer in self._offers].index(kept.digest())
        self._trial = Trial([offer.candidate for offer in self._offers], current, self._took, spent_us, live.queues)
        self._exposed_us: list[list[float]] = [[] for _ in self._offers]
        self._phase, self._runs, self._changing_us = self._try, -1, 0.0
        self._untold: list[float] = []
        """For each step of the turn that other ranks do not know of: its time, and how long it waited for exchanges."""
        self._run_turn(live)

    def _made(self, live: Live, seconds: float, seen: Seen | None) -> _Offered:
        """Return the offers of rank 0, the best candidates of schedules that are not allowed, and local steps."""
        cluster, self._compiling_us = self._watch.cluster, 0.0
        assert self._profile is not None and cluster is not None
        specs = specs_of(self.accuracy, live.infos, self._ranks)
        allowed = [s for s in schedules_of(self.accuracy, self.schedules, self._ranks) if s.word not in self._refused]
        missing = schedules_of(self.accuracy, [word for word in SCHEDULES if word not in self.schedules], self._ranks)
        others = list({schedule.word: schedule for schedule in missing}.values())  # of each kind the fastest
        if self._costs is None:
            schedules = [Backward(), *allowed, *others, *([LocalSteps()] if "local" in self.schedules else [])]
            of_schedules = {spec for schedule in schedules for spec in specs_under(schedule, specs)}
            corrections = {s.correction for s in schedules if s.correction} if specs else set()
            if any(tensor.embedding for tensor in live.infos):
                of_schedules.update(with_embeddings(of_schedules))
            began = self.clock()
            self._costs = codecs_of(live, sorted(of_schedules | corrections, key=repr), CODECS_SECONDS)
            if live.queues:  # a kernel is compiled before its first call is timed
                self._compiling_us = 1e6 * max(0.0, self.clock() - began - CODECS_SECONDS)
        job, rules = (self._profile, cluster, self._costs, specs), _rules_of(live, self._profile, cluster)
        made = offers(*job, seconds, self._kept(), allowed, seen, rules)
        local = None
        waits = made[0].candidate.predicted_us * (1 - EXPOSED) > self._profile.compute_us
        if self.accuracy != "exact" and "local" not in self._refused and (waits or "local" in self.schedules):
            local = local_offer(*job, rules)
        offered = [(offer.candidate, offer.plan.to_dict()) for offer in made]
        return offered, foreseen(*job, others, rules), None if local is None else (local.candidate, local.plan.to_dict())

    def _kept(self) -> Plan | None:
        """Return the chosen plan, if the script can still run its schedule; None for local steps, which are compared apart."""
        current = self._current
        if current is None or current.schedule.word in self._refused or current.schedule.sends_weights:
            return None
        return current

    def _find_refused(self, live: Live) -> dict[str, str]:
        """Return the allowed kinds of schedule that the script cannot run, each with the reason of the first such rank."""
        own: dict[str, str] = {}
        if self._stepped is not None:
            problem = self._stepped.look()
            local = [LocalSteps()] if "local" in self.schedules and self.accuracy != "exact" else []
            for schedule in [*schedules_of(self.accuracy, self.schedules, self._ranks), *local]:
                own.setdefault(schedule.word, problem or live.why_not(schedule))
        refused = [msgspec.json.decode(text, type=dict[str, str]) for text in live.from_all(msgspec.json.encode(own).decode())]
        return {kind: why for each in reversed(refused) for kind, why in each.items() if why}

    # ---- try

    def _run_turn(self, live: Live) -> None:
        """Change to the plan of the next turn, or decide after the last one."""
        while (turn := self._trial.turn) is not None:
            try:
                if turn.candidate != self._runs:
                    self._change_to(live, turn.candidate, on_trial(self._offers[turn.candidate].plan, live.step))
                return
            except (PlanError, FormatError):  # the engine does not run an option of the plan, on any rank
                self._trial.leave_out()
        self._decide(live)

    def _change_to(self, live: Live, candidate: int, plan: Plan) -> None:
        began = self.clock()
        live.change_to(plan)
        self._runs = candidate
        self._pace.runs(candidate)
        self._changing_us += 1e6 * (self.clock() - began)

    def _try(self, live: Live, us: float) -> None:
        self._took += 1
        turn, schedule = self._trial.turn, live.plan.schedule
        assert turn is not None
        self._untold += [us, live.exposed_us]
        busy = schedule.gathers_in_forward or schedule.hides_exchange
        if busy and len(self._untold) < 2 * turn.steps:
            return  # lanes would work while ranks wait for each other here, which they do in no later step
        rows = live.exchange([self._changing_us, *self._untold])()
        self._trial.spend(max(row[0] for row in rows))
        for at in range(1, 1 + len(self._untold), 2):
            if self._trial.turn is turn:  # else the step before was the turn's last
                self._exposed_us[turn.candidate].append(min(row[at + 1] for row in rows))
                self._trial.took(max(row[at] for row in rows))
            else:
                self._trial.ran_on(max(row[at] for row in rows))
        self._untold, self._changing_us = [], 0.0
        self._run_turn(live)

    def _decide(self, live: Live) -> None:
        trial, index = self._trial, self._trial.chosen
        assert index is not None
        self._change_to(live, index, self._offers[index].plan)
        tried = [
            Tried(each.name, each.predicted_us, trial.median_us(place), len(trial.times[place]), each.steps_for_one)
            for place, each in enumerate(trial.candidates)
        ]
        plain = next(place for place, candidate in enumerate(trial.candidates) if candidate.plain)
        exposed_us, plan, elsewhere = (
            median(self._exposed_us[index] or [self._seen_exposed_us]),
            self._offers[index].plan,
            self._elsewhere,
        )
        chosen = tried[index]
        instead_of: Tried | None = None
        if (local := self._local) is not None and worth(local, trial, index, exposed_us):
            if "local" not in self.schedules:
                elsewhere = [*elsewhere, local.candidate]
            elif self._runs_too(live, local.plan):
                plan, instead_of, chosen = local.plan, chosen, _foreseen(local.candidate)
        decision = AutoDecision(
            step=live.step,
            why=self._why,
            chosen=chosen,
            plain=tried[plain],
            tried=tuple(tried),
            took_steps=self._took,
            cost_us=trial.cost_us,
            exposed_us=exposed_us,
            elsewhere=tuple(map(_foreseen, elsewhere)),
            instead_of=instead_of,
            batch_share=self._batch_share(),
            ranks=self._ranks,
            refused=tuple(f"{kind}, since {why.rstrip('.')}" for kind, why in self._refused.items()),
        )
        self.decide(decision)
        if live.group.rank == 0:
            say(str(decision))
        self._watch_from_now(live, plan)
        if instead_of is None and self._profile is not None:
            self._second = SecondLook(trial, index, [_kind(offer.plan) for offer in self._offers], self._profile.compute_us)

    def _runs_too(self, live: Live, plan: Plan) -> bool:
        """Change to a plan that was not tried here. Returns whether the engine can run the plan, equally on all ranks."""
        try:
            live.change_to(plan)
        except (PlanError, FormatError):
            return False
        return True

    # ---- watch

    def _settle_resumed(self, live: Live, us: float) -> None:
        self._steps += 1
        if self._steps == 1 and live.queues and self._cannot_measure(live):
            return
        if self._steps >= 1 + SETTLE_STEPS:
            (step_us,) = live.exchange([us])()[0]
            self._watch.cluster = cluster_of(live, seconds_for(step_us))
            self._pace.pause()
            self._watch_from_now(live, live.plan)

    def _batch_share(self) -> tuple[float, ...]:
        """The part of the samples for each rank. None where ranks share processors, since then they slow each other down."""
        cluster = self._watch.cluster
        if cluster is not None and cluster.ranks_per_processor > 1:
            return ()
        return tuple(speed / sum(self._speeds) for speed in self._speeds)

    def _watch_from_now(self, live: Live, plan: Plan) -> None:
        same = self._current is not None and plan.digest() == self._current.digest()
        self._current, self._phase = plan, self._watching
        self._spent_us, self._took = 0.0, 0
        profile = None if plan.schedule.sends_weights else self._profile
        self._watch.begin(live, plan, same, profile.compute_us if profile is not None else 0.0)

    def _watching(self, live: Live, us: float) -> None:
        if live.warms_up:
            return  # these steps send more bytes than later ones
        if live.is_compared and not self.searching:
            self._watch.runs(live.plan)
            return  # some of these steps are held back, and none may run another plan
        self._warn_of_codecs(live)
        asked = self._watch.step(live, us)
        if live.step == self._watch.measured_step:
            self._pace.pause()
        if asked is not None:
            self._why = asked.why
            self._again(live, asked.step_us, asked.compute)
        elif (look := self._second) is not None and self._watch.read is not None:
            runs = look.window(*self._watch.read, self._watch.sees_change)
            if runs is not None:
                self._swap(live, look, runs)
            if look.over:
                self._second = None
                if look.rival in look.parts:
                    self._decide_again(live, look)

    def _swap(self, live: Live, look: SecondLook, runs: int) -> None:
        """Run a plan of the second look from the next step on."""
        plan = self._offers[runs].plan
        try:
            self._change_to(live, runs, plan)
        except (PlanError, FormatError):  # the engine does not run the plan, on any rank
            look.leave_out(runs)
        self._watch.runs(live.plan, judged=not look.tries)

    def _decide_again(self, live: Live, look: SecondLook) -> None:
        """Keep the faster one of two plans after the second look."""
        first, rival = self.decisions[-1], look.rival
        assert rival is not None
        tried = list(first.tried)
        for place, parts in look.parts.items():
            tried[place] = replace(tried[place], measured_us=look.best(place).us, steps=PART_STEPS * len(parts))
        best = look.best(look.runs)
        decision = replace(
            first,
            step=live.step,
            why=f"a second look at the decision in step {first.step}",
            chosen=tried[look.runs],
            plain=tried[first.tried.index(first.plain)],
            tried=tuple(tried),
            took_steps=PART_STEPS,
            cost_us=PART_STEPS * max(0.0, look.best(rival).us - best.us),
            exposed_us=best.exposed_us,
            second_look=Compared(tried[look.before], tried[rival], look.runs == rival),
        )
        self.decide(decision)
        if live.group.rank == 0:
            say(str(decision))
        if look.runs == rival:
            self._watch_from_now(live, self._offers[rival].plan)

    def _warn_of_codecs(self, live: Live) -> None:
        """Warn once, on rank 0, of a codec that distorts gradients. The class "aggressive" accepts such codecs, and changes of
        weights are no gradients that an optimizer sees."""
        if self._warned or self.accuracy == "aggressive" or live.plan.schedule.sends_weights or live.group.rank:
            return
        if not (problem := live.codec_problem):
            return
        self._warned = True
        codecs = " and ".join(sorted({repr(spec) for bucket in live.plan.buckets for spec in bucket.specs if spec.encodes}))
        warnings.warn(
            f"in step {live.step}, with {codecs}, {problem}. The optimizer does not see the gradients that it should, "
            "and the loss may end higher. Pass accuracy='exact' or plan=gw.QSGD(bits=8), and compare the loss; "
            "stats().buckets has the numbers of each bucket.",
            stacklevel=2,
        )

    def _again(self, live: Live, step_us: float, computes: float = 1.0) -> None:
        """Decide again. computes: the computation time now over the time before."""
        if self._profile is None:  # a resumed run has none yet
            self._steps, self._phase = 0, self._settle
            return
        self._profile = scaled(self._profile, computes)
        self._speeds = measured_speeds(live, self._watch.compute_us, self._watch.inputs) or self._speeds
        self._offer(live, step_us)


def _rules_of(live: Live, profile: Profile, cluster: Cluster) -> Rules:
    """The rules by which this job's exchanges run. Its lanes were chosen by the round trips of connections, and DDP's hook has no
    reports."""
    rules = rules_of(device_of(profile), cluster)
    lanes, reports = live.at_once if rules.lanes else 0, rules.reports and live.reports
    return msgspec.structs.replace(rules, lanes=lanes, reports=reports)


def _beyond(plan: Plan, specs: Sequence[Spec]) -> list[str]:
    """Return the specs of a plan that are not among these, and not what these come to under the plan's schedule."""
    allowed = with_embeddings(specs_under(plan.schedule, specs))
    own = {bucket.spec_of(name) for bucket in plan.buckets for name in bucket.tensors}
    return sorted(map(repr, own - {Identity(), *allowed, *(spec.settled for spec in allowed)}))


def _kind(plan: Plan) -> Hashable:
    """Return what plans have in common that differ in their buckets alone."""
    options, specs = {bucket.option for bucket in plan.buckets}, {spec for bucket in plan.buckets for spec in bucket.specs}
    return frozenset(options), frozenset(map(repr, specs)), repr(plan.schedule)


def _foreseen(candidate: Candidate) -> Tried:
    """Describe a candidate that did not run."""
    steps, constant = candidate.steps_for_one, candidate.steps_at_constant_rate
    return Tried(candidate.name, candidate.predicted_us, None, 0, steps, candidate.loss_above, constant)


def _read(text: str) -> tuple[list[Offer], list[Candidate], Offer | None]:
    """Decode the offers of rank 0. There are none if rank 0 could not plan."""
    made, elsewhere, local = msgspec.json.decode(text, type=_Offered) if text else ([], [], None)
    offers = [Offer(candidate, Plan.from_dict(plan)) for candidate, plan in [*made, *([local] if local else [])]]
    return offers[: len(made)], elsewhere, offers[-1] if local else None
