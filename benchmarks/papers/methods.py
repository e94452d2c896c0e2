"""The papers' methods of planning, by the names that `gradwire plan --method` takes."""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.papers.cupcake import algorithm_1
from benchmarks.papers.strawmen import even_split, layer_wise
from gradwire.planner import starts
from gradwire.planner.drafts import Choice, Draft, Part, PlanningJob
from gradwire.planner.partition import FusionCosts, Strategy

__all__ = ["FUSIONS", "METHODS", "hipress"]


def _cupcake(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> tuple[int, ...]:
    return algorithm_1(backward_us, nbytes, costs, seconds=10.0).fusion.boundaries


FUSIONS: dict[str, Strategy] = {"cupcake": _cupcake, "even": even_split, "layerwise": layer_wise}
"""Methods that cut the tensors, by name, beside those of `gradwire.planner.starts`."""


def hipress(job: PlanningJob, choices: Sequence[Choice]) -> Draft:
    """Every tensor alone, and compressed if its own tasks then take less (docs/papers/cupcake.md)."""
    parts = []
    for place in range(len(job.profile.tensors)):
        allowed = [choice for choice in choices if job.may([place], choice)]
        parts.append(min((Part((place,), choice) for choice in allowed), key=lambda part: sum(job.program(part).busy)))
    return Draft(tuple(parts))


def _hipress(job: PlanningJob) -> Draft:
    return hipress(job, job.choices())


METHODS: dict[str, Callable[[PlanningJob], Draft]] = {
    **{name: partial(starts.fused_by, strategy=strategy) for name, strategy in FUSIONS.items()},
    "hipress": _hipress,
}
"""cupcake: Cupcake's own search. even: Cupcake's even split. layerwise: every tensor alone. hipress: every tensor alone, by
HiPress's rule."""
