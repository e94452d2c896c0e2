"""Chooses local steps for `plan="auto"`: the fewest steps between exchanges at which a step hardly waits for exchanges.

Local steps train differently from plain data parallelism. So they are considered only if the fastest of all other plans
waits for exchanges during more than the share EXPOSED of a step. They are not tried: a trial lasts 15 steps, and a
period of local steps up to 100. The simulator's times decide.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product

import msgspec

from gradwire.auto.accuracy import policy_of, specs_under
from gradwire.auto.planning import Offer, words_of
from gradwire.auto.trial import GAIN, Candidate, Trial
from gradwire.core import Cluster, Costs, Identity, LocalSteps, Plan, Profile, Spec
from gradwire.errors import PlanError
from gradwire.sim import Simulator

EVERY = (5, 10, 30, 100)
"""Numbers of steps between exchanges, as in the table of docs/local_steps.md. The first one that is long enough is chosen."""
EXPOSED = 0.1
"""Largest share of a step that may be spent waiting for exchanges, encoding included."""
_STREAMED = LocalSteps(every=5, fragments=4, delay=1, mixing=0.5)
_LONGEST_DELAY = 5


def averaged(every: int) -> LocalSteps:
    """Return the schedule that averages all weights after so many steps.

    >>> averaged(30)
    LocalSteps()
    """
    return LocalSteps(every=every)


def streamed(every: int) -> LocalSteps:
    """Return the schedule that averages the weights in fragments, while some of the steps run.

    >>> streamed(30)
    LocalSteps(fragments=4, delay=5, mixing=0.5)
    """
    delay = min(_LONGEST_DELAY, every // _STREAMED.fragments)
    return msgspec.structs.replace(_STREAMED, every=every, delay=delay)


def local_offer(profile: Profile, cluster: Cluster, costs: Costs, specs: Sequence[Spec]) -> Offer | None:
    """Return the first plan of local steps with a step that is longer than its computation by at most the share
    EXPOSED. If there is none, return the plan with the shortest step. Return None if no plan can be priced.

    Plans are ordered by steps between exchanges, the fewest first; then in one piece before streamed; then by accuracy
    of the spec. specs: the specs that the accuracy class allows; if empty, nothing is encoded.
    """
    most_us = profile.compute_us / (1 - EXPOSED)
    found: list[tuple[float, Plan]] = []
    for plan, step_us in _priced(profile, cluster, costs, specs):
        found.append((step_us, plan))
        if step_us <= most_us:
            break
    if not found:
        return None
    step_us, plan = found[-1] if found[-1][0] <= most_us else min(found, key=lambda each: each[0])
    return Offer(Candidate(words_of(plan), step_us, cycle=plan.schedule.period), plan)


def _priced(profile: Profile, cluster: Cluster, costs: Costs, specs: Sequence[Spec]) -> Iterator[tuple[Plan, float]]:
    """Yield plans in the order of preference, each with its mean step time over a period."""
    infos = profile.tensor_infos("cpu" if profile.device == "cpu" else "gpu")
    ranks, per_node, compute_us = cluster.world_size, cluster.ranks_per_node, profile.compute_us
    simulator = Simulator(profile, cluster, costs)
    policies = [policy_of(spec, infos) for spec in specs_under(_STREAMED, specs) or (Identity(),)]
    for every in EVERY:
        exchange_us: dict[int, float] = {}
        for schedule, (at, policy) in product((averaged(every), streamed(every)), enumerate(policies)):
            least_us = _least_us(schedule, exchange_us.get(at, 0.0), compute_us)
            if schedule.delay and least_us > compute_us / (1 - EXPOSED):
                continue
            with suppress(PlanError):  # fewer tensors than fragments, or no costs of the spec
                plan = msgspec.structs.replace(policy, schedule=schedule).plan(infos, ranks, per_node)
                step_us = simulator.step_us(plan)
                if not schedule.delay:
                    exchange_us[at] = every * (step_us - compute_us)
                yield plan, step_us


def _least_us(schedule: LocalSteps, exchange_us: float, compute_us: float) -> float:
    """Return a lower bound of a step: the part of a fragment's exchange that `delay` steps do not hide."""
    exposed_us = exchange_us / schedule.fragments - schedule.delay * compute_us
    return compute_us + max(0.0, exposed_us) * schedule.fragments / schedule.every


def worth(local: Offer | None, trial: Trial, chosen: int, exposed_us: float) -> bool:
    """Return whether local steps should run: the trial's chosen plan waits long for exchanges, and local steps are shorter."""
    step_us = trial.median_us(chosen)
    if local is None or step_us is None or exposed_us <= EXPOSED * step_us:
        return False
    return local.candidate.predicted_us < (1 - GAIN) * step_us * trial.candidates[chosen].steps_for_one
