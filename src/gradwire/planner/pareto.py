"""The best partition of tensors into buckets for costs of any shape, such as measured curves: Cupcake's problem (section 4).

The search builds plans from the first tensor on. A plan for the first i tensors has two numbers: the codec time so far, and the
time at which the link is free. The search drops a plan if another one is no later in both. More time in either number never makes
the step shorter, so the best plan is a continuation of a kept one.

**Pruned.** The rest of a step takes at least the time of the remaining bytes at the best rate of any bucket, on compute and on
the link, and no bucket is encoded before its last gradient is ready. If this bound is no shorter than the best plan so far,
neither this bucket nor a larger one in its place can be in a better plan.

**Cut short.** After `most` tried buckets the best plan so far is the answer. The count makes the answer the same for the same
input.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.costs import CurveCost
from gradwire.planner.partition import Cost, Fusion, FusionCosts, prefix_sums, step_of

MOST_BUCKETS = 10_000
"""Default of `most`: about 10 ms."""


class _FusionPrefix(NamedTuple):
    """A plan for the first tensors that no other plan for them beats."""

    link_us: float
    codec_us: float
    ends: tuple[int, ...]


def improved(
    backward_us: Sequence[float], nbytes: Sequence[float], costs: FusionCosts, known: Fusion, most: int = MOST_BUCKETS
) -> tuple[Fusion, bool]:
    """The best partition, or the best one found with `most` buckets tried, and whether it is certainly the best.

    known: a partition of these tensors and its step, as `evaluate` gives it. Other arguments as of `evaluate`.
    """
    ready_us, total_bytes = prefix_sums(backward_us), prefix_sums(nbytes)
    tensors, best, tried = len(nbytes), known, 0
    codec_rate, link_rate = _least_rate(costs.encode), _least_rate(costs.exchange)
    if costs.decoding == "lumped":
        codec_rate += _least_rate(costs.decode)
    fronts: list[list[_FusionPrefix]] = [[] for _ in range(tensors + 1)]
    fronts[0] = [_FusionPrefix(0.0, 0.0, ())]
    for start in range(tensors):
        codec_left_us = codec_rate * (total_bytes[-1] - total_bytes[start])
        link_left_us = link_rate * (total_bytes[-1] - total_bytes[start])
        buckets: list[tuple[float, float, float]] = []  # codec, exchange and end of a bucket, made when first asked for
        for link_us, codec_us, ends in _undominated(fronts[start]):
            if max(link_us + link_left_us, ready_us[-1] + codec_us + codec_left_us) >= best.step_us:
                continue
            for end in range(start + 1, tensors + 1):
                # the remaining bytes are sent after the encode of the bucket
                if ready_us[end] + codec_us + link_left_us >= best.step_us:
                    break
                if (tried := tried + 1) > most:
                    return best, False
                if end - start > len(buckets):
                    size = total_bytes[end] - total_bytes[start]
                    buckets.append((costs.of_compute(size), costs.exchange(size), costs.after(size)))
                compute_us, exchange_us, after_us = buckets[end - start - 1]
                codec_after_us = codec_us + compute_us
                link_after_us = max(link_us, ready_us[end] + codec_after_us) + exchange_us
                if end < tensors:
                    fronts[end].append(_FusionPrefix(link_after_us, codec_after_us, (*ends, end)))
                elif link_after_us + after_us < best.step_us:
                    best = Fusion((*ends, end), step_of((*ends, end), ready_us, total_bytes, costs))
    return best, True


def _undominated(labels: list[_FusionPrefix]) -> list[_FusionPrefix]:
    kept: list[_FusionPrefix] = []
    for label in sorted(labels):
        if not kept or label.codec_us < kept[-1].codec_us:
            kept.append(label)
    return kept


def _least_rate(cost: Cost) -> float:
    """Lower bound of the microseconds for each byte of a bucket; 0 for an arbitrary function."""
    if not isinstance(cost, CurveCost):
        return getattr(cost, "us_per_byte", 0.0)
    points = cost.points
    rates = [us / nbytes for nbytes, us in points if nbytes]
    if len(points) > 1:
        rates.append(max(0.0, (points[-1][1] - points[-2][1]) / (points[-1][0] - points[-2][0])))
    return min(rates, default=math.inf if not points else 0.0)
