"""From measured times to the few plans that are worth a trial."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from gradwire.auto.accuracy import policy_of, steps_for_one
from gradwire.auto.trial import Candidate
from gradwire.core.cluster import Cluster
from gradwire.core.costs import Costs
from gradwire.core.plan import Plan
from gradwire.core.profile import Profile
from gradwire.core.schedules import Backward, Schedule
from gradwire.core.specs import Identity, Spec
from gradwire.errors import PlanError
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.joint import EVALUATIONS, joint
from gradwire.planner.policy import Policy, Uniform, launch_of
from gradwire.planner.starts import ddp

__all__ = ["MOST_TRIED", "Offer", "foreseen", "offers", "words_of"]

MOST_TRIED = 3
"""Plans that are tried beside plain all-reduce; for each further kind of schedule that is allowed one more."""
_WORTH = 1.5
"""Those that are predicted to be so many times slower to a loss than the best are not."""
_CLOSE = 1.05
"""Predictions that differ by no more say nothing: what costs least accuracy is tried first."""
_DDP_BUCKET = 25 * 2**20
_FEWEST_EVALUATIONS = 20


class Offer(NamedTuple):
    """A candidate and its plan."""

    candidate: Candidate
    plan: Plan


def offers(
    profile: Profile,
    cluster: Cluster,
    costs: Costs,
    specs: Sequence[Spec],
    seconds: float,
    current: Plan | None = None,
    schedules: Sequence[Schedule] = (),
) -> list[Offer]:
    """Plain all-reduce and the best others by prediction, all different, the best first; the current plan before all.

    specs: in the order of what they cost in accuracy, the least first. schedules: those allowed beside `backward`, in the same
    order; the best of each kind is offered if it is worth it.
    The planner's own plan is among them, sought for about so many seconds; the others are policies, one for each spec.
    """
    found = _Plans(profile, cluster, costs, specs, schedules)
    began = time.perf_counter()
    plain = found.policy(Uniform(Identity()))
    for spec in specs:
        found.policy(policy_of(spec, found.infos))
    found.policy(Uniform(Identity(), bucket_bytes=_DDP_BUCKET, edge_bytes=_DDP_BUCKET))
    evaluations = min(EVALUATIONS, int(seconds * len(found.plans) / (time.perf_counter() - began)))
    planned = []
    if evaluations >= _FEWEST_EVALUATIONS and _one_kind(profile):
        # the search knows steps alone: of what needs more of them for a loss, it gets only what pays for all of the model
        most_steps = _steps_for_one(min(found.plans.values(), key=found.us))
        paying = [spec for spec in specs if steps_for_one([spec]) <= most_steps]
        job = found.job if len(paying) == len(specs) else PlanningJob(profile, cluster, costs, paying)
        planned.append(job.plan(joint(job, evaluations), ddp(job)))
    found.add(*planned)
    found.add_scheduled(planned)
    if current is not None:
        found.add(current)
    known = {plan.digest() for plan in (current, plain) if plan is not None}
    others = [plan for digest, plan in found.plans.items() if digest not in known]
    most_us = _WORTH * found.least_us(list(found.plans.values()))
    worth = found.best_first([plan for plan in others if found.us(plan) <= most_us])
    of_each = [next(plan for plan in worth if plan.schedule.word == kind) for kind in _kinds(worth)]
    rest = [plan for plan in worth if plan not in of_each]
    most = MOST_TRIED - 1 + len({schedule.word for schedule in (Backward(), *schedules)})
    tried = found.best_first([*of_each, *rest[: max(0, most - len(of_each))]])
    offered = {plan.digest(): plan for plan in (*([current] if current else []), *tried, plain)}
    return [Offer(found.candidate(plan, digest == plain.digest()), plan) for digest, plan in offered.items()]


def foreseen(
    profile: Profile, cluster: Cluster, costs: Costs, specs: Sequence[Spec], schedules: Sequence[Schedule]
) -> list[Candidate]:
    """The best by prediction of each kind of schedule, plans made from policies."""
    found = _Plans(profile, cluster, costs, specs, schedules)
    found.add_scheduled([])
    plans = found.best_first(list(found.plans.values()))
    return [
        found.candidate(next(plan for plan in plans if plan.schedule.word == kind), False) for kind in _kinds(plans)
    ]


class _Plans:
    """Plans for one job, and what is predicted of them."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        costs: Costs,
        specs: Sequence[Spec],
        schedules: Sequence[Schedule],
    ) -> None:
        self.infos, self.ranks = profile.tensor_infos(_device(profile)), cluster.world_size
        self.job = PlanningJob(profile, cluster, costs, specs)
        self.plans: dict[str, Plan] = {}
        """By digest."""
        self._us: dict[str, float] = {}
        self._specs, self._schedules = specs, schedules

    def policy(self, policy: Policy) -> Plan:
        """Add the plan of a policy."""
        plan = policy.plan(self.infos, self.ranks)
        self.add(plan)
        return plan

    def add(self, *plans: Plan) -> None:
        for plan in plans:
            if (digest := plan.digest()) not in self.plans:
                self._us[digest] = self.job.simulator.step_us(plan)
                self.plans[digest] = plan

    def add_scheduled(self, planned: Sequence[Plan]) -> None:
        """The policy of each spec, and these plans, in all the schedules; without those that the simulator cannot price."""
        policies = [Uniform(Identity()), *(policy_of(spec, self.infos) for spec in self._specs)]
        for schedule in self._schedules:
            plans = [msgspec.structs.replace(p, schedule=schedule).plan(self.infos, self.ranks) for p in policies]
            for plan in planned:
                launch = launch_of(plan.buckets, schedule)
                plans.append(msgspec.structs.replace(plan, schedule=schedule, launch=launch, prediction=None))
            for plan in plans:
                with suppress(PlanError):  # corrections that cannot be priced, as of PowerSGD
                    self.add(plan)

    def us(self, plan: Plan) -> float:
        """Of what does as much for the loss as one step of plain all-reduce, predicted."""
        return self._us[plan.digest()] * _steps_for_one(plan)

    def least_us(self, plans: Sequence[Plan]) -> float:
        return min(self.us(plan) for plan in plans)

    def best_first(self, plans: Sequence[Plan]) -> list[Plan]:
        """Those that come close to the best by what they cost in accuracy, and then the rest by time."""
        if not plans:
            return []
        close_us = _CLOSE * self.least_us(plans)
        return sorted(plans, key=lambda p: (False, self.loss(p)) if (us := self.us(p)) <= close_us else (True, us))

    def loss(self, plan: Plan) -> int:
        """The place of the plan's most lossy spec; a schedule that costs accuracy comes after all specs without one."""
        places = {spec: place for place, spec in enumerate(self._specs, 1)}
        delayed = [schedule for schedule in self._schedules if schedule.costs_accuracy]
        later = 1 + delayed.index(plan.schedule) if plan.schedule in delayed else 0
        of_specs = max(places.get(spec, 0) for bucket in plan.buckets for spec in bucket.specs)
        return of_specs + later * (1 + len(self._specs))

    def candidate(self, plan: Plan, plain: bool) -> Candidate:
        step_us = self._us[plan.digest()]
        return Candidate(words_of(plan), step_us, plain, self.loss(plan), plan.schedule.period, _steps_for_one(plan))


def _steps_for_one(plan: Plan) -> float:
    return steps_for_one(spec for bucket in plan.buckets for spec in bucket.specs)


def _kinds(plans: Sequence[Plan]) -> list[str]:
    """Of their schedules."""
    return list(dict.fromkeys(plan.schedule.word for plan in plans))


def _device(profile: Profile) -> str:
    return "cpu" if profile.device == "cpu" else "gpu"


def _one_kind(profile: Profile) -> bool:
    """Whether all gradients are of one dtype, and one that compressors take: else the search might compress others."""
    return {tensor.dtype for tensor in profile.tensors} <= {"float32"}


def words_of(plan: Plan) -> str:
    """A plan in a few words.

    >>> from gradwire.core import QSGD, TensorInfo
    >>> words_of(Uniform(QSGD(bits=4)).plan([TensorInfo("w", (10, 10), "float32")]))
    'QSGD(bits=4, block=128) in 1 bucket'
    """
    specs = {repr(spec): spec for bucket in plan.buckets for spec in bucket.specs}
    encoding = [name for name, spec in specs.items() if spec.encodes]
    families = {spec.family for spec in specs.values() if spec.encodes}
    if len(encoding) > 2 and len(families) == 1:
        what = f"{encoding[0].partition('(')[0]} of several widths"
    else:
        what = " and ".join(sorted(encoding)) or "uncompressed"
    count = len(plan.buckets)
    words = f"{what} in {count} bucket{'s' if count > 1 else ''}"
    schedule = plan.schedule
    if schedule == Backward():
        return words
    return f"{words}, {repr(schedule) if schedule.costs_accuracy else schedule.word}"
