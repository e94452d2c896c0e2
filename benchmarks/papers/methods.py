"""The papers' methods of planning, by the names that `gradwire plan --method` takes."""

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.papers.cupcake import algorithm_1
from gradwire.planner import starts
from gradwire.planner.drafts import Draft, PlanningJob
from gradwire.planner.partition import FusionCosts, Strategy

__all__ = ["FUSIONS", "METHODS"]


def _cupcake(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> tuple[int, ...]:
    return algorithm_1(backward_us, nbytes, starts.along_lines(costs), seconds=10.0).fusion.boundaries


FUSIONS: dict[str, Strategy] = {
    "fusion": starts.by_curves,
    "cupcake": _cupcake,
    "bucket": starts.close_after,
    "even": starts.even_split,
    "layerwise": starts.layer_wise,
}
"""Strategies that cut the tensors, by the names of their methods."""

METHODS: dict[str, Callable[[PlanningJob], Draft]] = {"cupcake": partial(starts.fused_by, strategy=_cupcake)}
"""cupcake: Cupcake's own search, stopped after 10 seconds."""
