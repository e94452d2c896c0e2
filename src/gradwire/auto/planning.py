"""Chooses the few plans that are worth a trial, from measured times."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from gradwire.auto.accuracy import policy_of, specs_under, steps_for_one
from gradwire.auto.trial import Candidate
from gradwire.core import (
    COLLECTIVES,
    Backward,
    Bucket,
    Cluster,
    Costs,
    Identity,
    Plan,
    Profile,
    Schedule,
    Spec,
    as_schedule,
)
from gradwire.errors import PlanError
from gradwire.plan import FLAT, Policy, Uniform, between_nodes, carries, codes_own_gradient, launch_of
from gradwire.planner import EVALUATIONS, PlanningJob, ddp_draft, joint
from gradwire.sim import Rules

MOST_TRIED = 3
"""Plans to try besides plain all-reduce. Each further kind of allowed schedule adds one."""
_WORTH = 1.5
"""A plan is not tried if its predicted time to a loss is this many times as long as the best plan's."""
CLOSE = 1.02
"""Plans whose predictions differ by no more than this factor are tried in the order of their accuracy."""
_DDP_BUCKET = 25 * 2**20
_PLAIN = (Uniform(Identity(), scheme=FLAT), Uniform(Identity(), scheme=FLAT, bucket_bytes=_DDP_BUCKET, edge_bytes=_DDP_BUCKET))
"""The candidates for plain all-reduce. The one with the better prediction is used."""
_FEWEST_EVALUATIONS = 20
_FAR_BUCKETS = 3, 1
"""How many buckets to look at over a far link, where each waits long for messages that carry little."""
_FEW_NODES = 4
"""The most nodes that may give each other whole payloads."""


class Offer(NamedTuple):
    """A candidate and its plan."""

    candidate: Candidate
    plan: Plan


class Seen(NamedTuple):
    """A plan that ran before the trial, and the longest time of its steps."""

    plan: Plan
    us: float


def offers(
    profile: Profile,
    cluster: Cluster,
    costs: Costs,
    specs: Sequence[Spec],
    seconds: float,
    current: Plan | None = None,
    schedules: Sequence[Schedule] = (),
    seen: Seen | None = None,
    rules: Rules | None = None,
) -> list[Offer]:
    """Return the best plans by prediction, the current plan and plain all-reduce, without duplicates, in the order of
    the trial: plans close to the best by accuracy, then the others by their times.

    specs: the allowed specs, the most accurate first. schedules: the allowed schedules besides `backward`, in the same
    order; the best plan of each kind is offered if it is worth a trial. Candidates are the plan of the planner's
    search, which takes about `seconds`, and one policy for each spec; if ranks share nodes, one hierarchical and one
    flat; over a far link also with few buckets. A plan that was seen comes last if it is none of these. rules: as of
    `PlanningJob`.
    """
    found = _Plans(profile, cluster, costs, specs, schedules, rules)
    began = time.perf_counter()
    for spec in specs:
        for policy in found.of_sizes(policy_of(spec, found.infos)):
            found.policy(policy)
    if found.shared:
        found.policy(Uniform(Identity()))
    uncompressed = [found.policy(policy) for policy in _PLAIN]
    plain = min(uncompressed, key=found.us)
    evaluations = min(EVALUATIONS, int(seconds * len(found.plans) / (time.perf_counter() - began)))
    planned = []
    # jobs of other dtypes were never searched: their gains are not measured
    if evaluations >= _FEWEST_EVALUATIONS and {tensor.dtype for tensor in profile.tensors} <= {"float32"}:
        # the search compares step times alone, so it gets only specs that need no more steps for a loss than the plan
        # that is fastest to a loss
        most_steps = _steps_for_one(min(found.plans.values(), key=found.us))
        paying = [spec for spec in specs if steps_for_one([spec]) <= most_steps]
        job = found.job if len(paying) == len(specs) else PlanningJob(profile, cluster, costs, paying, rules=rules)
        planned.append(job.plan(joint(job, evaluations), ddp_draft(job)))
    found.add(*planned)
    found.add_scheduled(planned)
    if current is not None:
        found.add(current)
    known = {plan.digest() for plan in (current, *uncompressed) if plan is not None}
    others = [plan for digest, plan in found.plans.items() if digest not in known]
    most_us = _WORTH * found.least_us(list(found.plans.values()))
    worth = found.best_first([plan for plan in others if found.us(plan) <= most_us])
    of_each = _best_of_each_kind(worth)
    rest = [plan for plan in worth if plan not in of_each]
    most = MOST_TRIED - 1 + len({schedule.word for schedule in (Backward(), *schedules)})
    tried = [*of_each, *rest[: max(0, most - len(of_each))], plain, *([current] if current is not None else [])]
    offered = {plan.digest(): plan for plan in found.best_first(tried)}
    made = [Offer(found.candidate(plan, digest == plain.digest()), plan) for digest, plan in offered.items()]
    return made if seen is None else _with_seen(found, made, seen)


def _with_seen(found: "_Plans", made: Sequence[Offer], seen: Seen) -> list[Offer]:
    """Return the offers, with the time of the plan that was seen. If it is not among them, it is added without a turn."""
    offers = {offer.plan.digest(): offer for offer in made}
    digest = seen.plan.digest()
    if digest not in offers:
        try:
            found.add(seen.plan)
        except PlanError:  # of a run that was saved during a trial: specs without their warm-up have no costs
            return list(made)
        offers[digest] = Offer(found.candidate(seen.plan, False)._replace(runs=False), seen.plan)
    own = offers[digest]
    offers[digest] = own._replace(candidate=own.candidate._replace(seen_us=seen.us))
    return list(offers.values())


def on_trial(plan: Plan, step: int) -> Plan:
    """Return the plan with the specs that it has after any warm-up, whose times a trial measures.

    The steps of a trial train as others do: an error that is not sent yet is kept, and the rest of the warm-up sends it."""
    late = {spec: spec.settled for bucket in plan.buckets for spec in bucket.specs if spec.at_step(step) != spec.settled}
    if not late:
        return plan
    buckets = []
    for bucket in plan.buckets:
        spec: Any = bucket.spec
        changed = late.get(spec, spec) if isinstance(spec, Spec) else {name: late.get(own, own) for name, own in spec.items()}
        buckets.append(msgspec.structs.replace(bucket, spec=changed))
    return msgspec.structs.replace(plan, buckets=tuple(buckets))


def foreseen(
    profile: Profile,
    cluster: Cluster,
    costs: Costs,
    specs: Sequence[Spec],
    schedules: Sequence[Schedule],
    rules: Rules | None = None,
) -> list[Candidate]:
    """Return the best candidate by prediction for each kind of schedule."""
    found = _Plans(profile, cluster, costs, specs, schedules, rules)
    found.add_scheduled([])
    return [found.candidate(plan, False) for plan in _best_of_each_kind(found.best_first(list(found.plans.values())))]


class _Plans:
    """Plans for one job, with predictions."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        costs: Costs,
        specs: Sequence[Spec],
        schedules: Sequence[Schedule],
        rules: Rules | None,
    ) -> None:
        device = "cpu" if profile.device == "cpu" else "gpu"
        self.infos, self.ranks, self.per_node = profile.tensor_infos(device), cluster.world_size, cluster.ranks_per_node_if_even
        self.shared = 1 < cluster.ranks_per_node < self.ranks
        """Whether there are several nodes with several ranks each."""
        self.job = PlanningJob(profile, cluster, costs, specs, rules=rules)
        self.plans: dict[str, Plan] = {}
        """The plans by digest."""
        self._us: dict[str, float] = {}
        self._specs, self._schedules = specs, schedules

    def policy(self, policy: Policy) -> Plan:
        """Add the plan of a policy; if ranks share nodes, the flat one too."""
        plans = [self._plan(way) for way in self._ways(policy)]
        self.add(*plans)
        return plans[0]

    def of_sizes(self, policy: Policy) -> list[Policy]:
        """Return the policy; over a far link also with few buckets, each of which is sent as a whole."""
        if not self.job.cluster.is_far:
            return [policy]
        total = sum(info.numel for info in self.infos) * 4
        sizes = [-(-total // count) for count in _FAR_BUCKETS]
        return [policy, *(msgspec.structs.replace(policy, bucket_bytes=n, edge_bytes=n, chunk_bytes=total) for n in sizes)]

    def _plan(self, policy: Policy) -> Plan:
        return policy.plan(self.infos, self.ranks, self.per_node)

    def _ways(self, policy: Policy) -> list[Policy]:
        """Return the policy. If it names no scheme, also its flat twin where ranks share nodes, and its twin of one phase."""
        schemes = [] if policy.scheme is not None else [FLAT] * self.shared + self._one_phase(policy)
        return [policy, *(msgspec.structs.replace(policy, scheme=scheme) for scheme in schemes)]

    def _one_phase(self, policy: Policy) -> list[str]:
        """Return the scheme by which a few far nodes give each other whole payloads, if all specs can travel so.

        Two phases wait for the distance twice. Between two nodes one phase sends as many bytes: a half of each is one whole.
        Between more each payload crosses several times, which pays where links are fast."""
        cluster, schedule, device = self.job.cluster, as_schedule(policy.schedule), self.infos[0].device
        if not (2 <= cluster.nodes <= _FEW_NODES and cluster.is_far) or schedule.gathers_in_forward or not policy.default.encodes:
            return []
        option = COLLECTIVES["allgather"].on(device)
        if cluster.ranks_per_node > 1:
            option = between_nodes(option, leaders=cluster.uneven)
        specs = [policy.default, *(spec for _, spec in policy.rules), *([schedule.correction] if schedule.correction else [])]
        fits = all(carries(option, spec, device) for spec in specs if spec.encodes)
        return [" ".join(option)] * fits

    def add(self, *plans: Plan) -> None:
        for plan in plans:
            if (digest := plan.digest()) not in self.plans:
                self._us[digest] = self.job.simulator.step_us(plan)
                self.plans[digest] = plan

    def add_scheduled(self, planned: Sequence[Plan]) -> None:
        """Add each spec's policy in all schedules that can be priced, and the `planned` plans in those that cost no accuracy."""
        for schedule in self._schedules:
            own = [policy_of(spec, self.infos) for spec in specs_under(schedule, self._specs)]
            policies = [policy for each in own for policy in self.of_sizes(each)]
            if not schedule.costs_accuracy:
                policies.append(Uniform(Identity()))
            scheduled = [msgspec.structs.replace(policy, schedule=schedule) for policy in policies]
            plans = [self._plan(way) for policy in scheduled for way in self._ways(policy)]
            for plan in () if schedule.costs_accuracy else planned:
                launch = launch_of(plan.buckets, schedule)
                plans.append(msgspec.structs.replace(plan, schedule=schedule, launch=launch, prediction=None))
            for plan in plans:
                with suppress(PlanError):  # corrections of some specs, such as PowerSGD, have no price
                    self.add(plan)

    def us(self, plan: Plan) -> float:
        """Return the predicted time for the progress of one step of plain all-reduce."""
        return self._us[plan.digest()] * _steps_for_one(plan)

    def least_us(self, plans: Sequence[Plan]) -> float:
        return min(self.us(plan) for plan in plans)

    def best_first(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans close to the best in the order of their accuracy, then the others in the order of their times."""
        if not plans:
            return []
        close_us = CLOSE * self.least_us(plans)
        return sorted(plans, key=lambda p: (False, self.loss(p)) if (us := self.us(p)) <= close_us else (True, us))

    def loss(self, plan: Plan) -> int:
        """Return the plan's place in the order of accuracy, 0 for the best: by schedule, then by the most lossy spec."""
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


def _best_of_each_kind(plans: Sequence[Plan]) -> list[Plan]:
    """Return the first plan of each kind of schedule."""
    best: dict[str, Plan] = {}
    for plan in plans:
        best.setdefault(plan.schedule.word, plan)
    return list(best.values())


def words_of(plan: Plan) -> str:
    """Describe a plan in a few words.

    >>> from gradwire.core import QSGD, TensorInfo
    >>> words_of(Uniform(QSGD(bits=4)).plan([TensorInfo("w", (10, 10), "float32")]))
    'QSGD(bits=4, block=128) in 1 bucket'
    """
    specs = {repr(spec): spec for spec in {spec for bucket in plan.buckets for spec in bucket.specs}}
    encoding = [name for name, spec in specs.items() if spec.encodes]
    families = {spec.family for spec in specs.values() if spec.encodes}
    if len(encoding) > 2 and len(families) == 1:
        what = f"{encoding[0].partition('(')[0]} of several widths"
    else:
        what = " and ".join(sorted(encoding)) or "uncompressed"
    count = len(plan.buckets)
    words = f"{what} in {count} bucket{'s' if count > 1 else ''}"
    inside = [bucket.option for bucket in plan.buckets if any(task.endswith(":intra") for task in bucket.option)]
    if inside:
        words += ", hierarchical"
        words += " and compressed inside nodes too" * any(codes_own_gradient(option) for option in inside)
    if any(_is_one_phase(bucket) for bucket in plan.buckets):
        words += ", in one phase"
    schedule = plan.schedule
    if schedule == Backward():
        return words
    return f"{words}, {repr(schedule) if schedule.costs_accuracy else schedule.word}"


def _is_one_phase(bucket: Bucket) -> bool:
    """Whether nodes give each other whole payloads, where by default each part has an owner who adds it up."""
    option, spec = bucket.option, bucket.main_spec
    across = [task for task in option if task.endswith(":inter")]
    exact_inside = len(option) == 3 or not codes_own_gradient(option)
    return across == ["allgather:inter"] and exact_inside and spec.encodes and spec.schemes[0] != "allgather"
