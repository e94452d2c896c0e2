"""The truth for the tests of searches: slow, simple, and right for any costs."""

import math
from collections.abc import Iterator, Sequence
from itertools import product

from gradwire.core.schedules import Backward
from gradwire.errors import PlanError
from gradwire.planner.drafts import Choice, Draft, Part, PlanningJob
from gradwire.planner.partition import Fusion, FusionCosts, prefix_sums
from gradwire.sim.simulator import LightPlan

__all__ = ["best_step_us", "brute_force", "pareto", "partitions"]

_MOST = 20
"""Tensors that `brute_force` takes: half a million partitions, some seconds."""


def brute_force(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> Fusion:
    """The best of all 2^(n-1) partitions of n tensors; of several that tie, any. PlanError above 20 tensors."""
    if len(nbytes) > _MOST:
        raise PlanError(
            f"there are {len(nbytes)} tensors: 2^{len(nbytes) - 1} partitions are too many to try. Use at most {_MOST}, or "
            "`pareto`."
        )
    tensors = len(nbytes)
    ready_us, total_bytes = prefix_sums(backward_us), prefix_sums(nbytes)
    # each bucket's codec and link time, by start and end, so that the many partitions only add
    buckets = [
        [
            (end, ready_us[end], costs.of_compute(total - total_bytes[start]), costs.exchange(total - total_bytes[start]))
            for end, total in enumerate(total_bytes)
            if end > start
        ]
        for start in range(tensors)
    ]
    after_us = [costs.after(total_bytes[-1] - size) for size in total_bytes]
    best = Fusion((), math.inf)

    def visit(start: int, ends: tuple[int, ...], codec_us: float, link_us: float) -> None:
        nonlocal best
        for end, done_us, compute_us, exchange_us in buckets[start]:
            encoded_us = done_us + codec_us + compute_us
            free_us = (link_us if link_us > encoded_us else encoded_us) + exchange_us
            if end < tensors:
                visit(end, (*ends, end), codec_us + compute_us, free_us)
            elif free_us + after_us[start] < best.step_us:
                best = Fusion((*ends, end), free_us + after_us[start])

    visit(0, (), 0.0, 0.0)
    return best


def pareto(backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts) -> Fusion:
    """The best partition for costs of any shape, by dynamic programming over the tensors.

    Of plans for the first i tensors only those are kept that no other beats in both: codec time so far, and when the link is
    free. A step is never shorter for being later in one of them, so the best plan is among their continuations. At worst
    exponential, in practice about the cube of the number of tensors.
    """
    ready_us, total_bytes = prefix_sums(backward_us), prefix_sums(nbytes)
    tensors = len(nbytes)
    fronts: list[list[tuple[float, float, tuple[int, ...]]]] = [[(0.0, 0.0, ())]]  # (link_us, codec_us, ends) by tensors
    best = Fusion((), math.inf)
    for end in range(1, tensors + 1):
        reached = []
        for start, front in enumerate(fronts):
            size = total_bytes[end] - total_bytes[start]
            compute_us, exchange_us, after_us = costs.of_compute(size), costs.exchange(size), costs.after(size)
            for link_us, codec_us, ends in front:
                codec_after_us = codec_us + compute_us
                link_after_us = max(link_us, ready_us[end] + codec_after_us) + exchange_us
                reached.append((link_after_us, codec_after_us, (*ends, end)))
                if end == tensors and link_after_us + after_us < best.step_us:
                    best = Fusion((*ends, end), link_after_us + after_us)
        fronts.append(_undominated(reached))
    return best


def _undominated(plans: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for plan in sorted(plans):
        if not kept or plan[1] < kept[-1][1]:
            kept.append(plan)
    return kept


def best_step_us(job: PlanningJob, choices: Sequence[Choice]) -> float:
    """The shortest step of all plans: every way to make buckets, every choice for every bucket, every launch order.

    In microseconds, by the simulator. For up to four tensors and few choices: the number of plans explodes.
    """
    best = math.inf
    for buckets in partitions(range(len(job.profile.tensors))):
        allowed = [[choice for choice in choices if job.may(bucket, choice)] for bucket in buckets]
        for chosen in product(*allowed):
            light = job.light(Draft(tuple(Part(*pair) for pair in zip(buckets, chosen, strict=True))))
            tasks = [[(index, word) for word in bucket.link_tasks] for index, bucket in enumerate(light.buckets)]
            for launch in _interleaved(tasks):
                best = min(best, job.simulator.step_us(LightPlan(light.buckets, launch, Backward())))
    return best


def partitions(places: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to put the places into buckets."""
    if not places:
        yield []
        return
    *before, last = places
    for buckets in partitions(before):
        yield [*buckets, (last,)]
        for index, bucket in enumerate(buckets):
            yield [*buckets[:index], *buckets[index + 1 :], (*bucket, last)]


def _interleaved(rows: Sequence[Sequence[tuple[int, str]]]) -> Iterator[list[tuple[int, str]]]:
    """Every order of all entries that keeps each row's own."""
    if not any(rows):
        yield []
    for index, row in enumerate(rows):
        if row:
            for rest in _interleaved([*rows[:index], row[1:], *rows[index + 1 :]]):
                yield [row[0], *rest]
