"""Chooses local steps for `plan="auto"`: those with the shortest predicted time to a loss.

Local steps train differently from plain data parallelism. So they are considered only if the fastest of all other plans
waits for exchanges during more than the share EXPOSED of a step. They are not tried: a trial lasts 15 steps, and a
period of local steps up to 100. The simulator's times and the measured losses decide.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product

import msgspec

from gradwire.auto.accuracy import policy_of, specs_under
from gradwire.auto.local_losses import EVERY, at_constant_rate, averaged, loss_above, steps_to_make_up, streamed
from gradwire.auto.planning import Offer, words_of
from gradwire.auto.trial import ALIKE, GAIN, Candidate, Trial
from gradwire.core import Cluster, Costs, Identity, Profile, Spec
from gradwire.errors import PlanError
from gradwire.sim import Rules, Simulator, device_of, rules_of

EXPOSED = 0.1
"""Share of a step that other plans may spend waiting for exchanges, encoding included, before local steps are considered."""


def local_offer(
    profile: Profile, cluster: Cluster, costs: Costs, specs: Sequence[Spec], rules: Rules | None = None
) -> Offer | None:
    """Return the plan of local steps with the shortest predicted time to a loss. If times are alike, return the plan that ends
    with the lowest loss at equal samples. Return None if no plan can be priced.

    Only schedules and specs with a measured loss are considered. specs: the specs that the accuracy class allows; if empty,
    nothing is encoded. rules: None is gradwire's engine on the profile's device.
    """
    simulator = Simulator(profile, cluster, costs, rules or rules_of(device_of(profile), cluster))
    found = list(_priced(simulator, cluster, specs))
    if not found:
        return None
    most_us = (1 + ALIKE) * min(offer.candidate.to_loss_us for offer in found)
    alike = [offer for offer in found if offer.candidate.to_loss_us <= most_us]
    return min(alike, key=lambda offer: (offer.candidate.loss_above, offer.candidate.predicted_us))


def _priced(simulator: Simulator, cluster: Cluster, specs: Sequence[Spec]) -> Iterator[Offer]:
    """Yield the plans that may be the fastest to a loss, each with its mean step time over a period."""
    profile, best_us = simulator.profile, float("inf")
    infos = profile.tensor_infos("cpu" if profile.device == "cpu" else "gpu")
    ranks, per_node = cluster.world_size, cluster.ranks_per_node_if_even
    for every, way, spec in product(EVERY, (averaged, streamed), specs_under(averaged(EVERY[0]), specs) or (Identity(),)):
        schedule = way(every)
        above = loss_above(schedule, spec, ranks)
        if above is None or profile.compute_us * steps_to_make_up(above) > (1 + ALIKE) * best_us:
            continue
        with suppress(PlanError):  # fewer tensors than fragments, or no costs of the spec
            plan = msgspec.structs.replace(policy_of(spec, infos), schedule=schedule).plan(infos, ranks, per_node)
            step_us, steps = simulator.step_us(plan), steps_to_make_up(above)
            best_us = min(best_us, step_us * steps)
            made = Candidate(words_of(plan), step_us, cycle=every, steps_for_one=steps, loss_above=above)
            yield Offer(made._replace(steps_at_constant_rate=at_constant_rate(steps, spec)), plan)


def worth(local: Offer | None, trial: Trial, chosen: int, exposed_us: float) -> bool:
    """Return whether local steps should run: the trial's chosen plan waits long for exchanges, and local steps are predicted to
    be faster to a loss."""
    step_us = trial.median_us(chosen)
    if local is None or step_us is None or exposed_us <= EXPOSED * step_us:
        return False
    return local.candidate.to_loss_us < (1 - GAIN) * step_us * trial.candidates[chosen].steps_for_one
