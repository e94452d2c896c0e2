"""The best partition of tensors into buckets: Cupcake's problem (section 4), solved exactly and in milliseconds.

One bucket decides when the link finishes: the link idles until this bucket is encoded, and is busy from then on. Let R(i) be the
backward time of the first i of n tensors and their encode time without the constants, S(i) their link time without the constants,
h and g the constants of every encode and every exchange. For y buckets with ends e(1) < ... < e(y) = n,

    step = max over j of  R(e(j)) + j*h  +  (y - j + 1)*g + S(n) - S(e(j-1)).

**Two numbers count.** With lag(j) = R(e(j)) - S(e(j-1)) - j*(g - h), the step is the greatest lag + (y + 1)*g + S(n). Given a
bound on the lags, the fewest buckets are found by a walk in which each bucket reaches as far as the bound allows: R and S do not
fall, so no other plan within the bound is ahead of the walk after any number of buckets. With g <= h the room for a bucket that
begins at a given tensor shrinks with each bucket before it: a walk that stands still shows that there is no plan.

**Branch and bound.** Let y(L) be the fewest buckets with lags below L. y does not rise with L, so no plan with a lag between
`low` and `high` has a shorter step than low + (y(high) + 1)*g + S(n). The search halves the interval with the least such bound,
until no bound is below the best plan. A walk also returns the L at which the walk would first change: smaller L need no walk.

**Mirror.** Read backwards, from the last exchange to the first gradient, the problem keeps its form: h and g change places, and
so do R and S. So the search always assumes g <= h. With g > h many plans with one bucket more and a lag smaller by g would tie.

**Decode.** A lumped decode is part of h and R. An exposed decode of the last bucket comes after the step so far. Let M(k) be the
shortest step without this decode, of plans with a last bucket that begins at tensor k or later. M does not fall with k and the
decode does not rise, so halving finds the best k too.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.costs import AffineCost
from gradwire.planner.partition import Decoding, Fusion, FusionCosts, prefix_sums, step_of
from gradwire.sim import native_fusion

_ROUNDING = 1 - 1e-12
"""Plans whose steps differ by less than this factor have the same step but for rounding errors."""


def optimal(
    backward_us: Sequence[float],
    nbytes: Sequence[float],
    encode: AffineCost | tuple[float, float],
    exchange: AffineCost | tuple[float, float],
    decode: AffineCost | tuple[float, float] = (0.0, 0.0),
    decoding: Decoding = "exposed",
    native: bool = True,
) -> Fusion:
    """The partition with the shortest step; if several tie, any of them.

    `backward_us` and `nbytes` are by tensor in gradient-ready order, first ready first. `encode`, `exchange` and `decode` are
    affine costs of one bucket, or pairs (alpha_us, us_per_byte), per byte of *uncompressed* gradient; `decoding` as in
    `FusionCosts`. native: whether to use the C++ library if it was built; the results are the same. The step is what `evaluate`
    gives, and no partition has a shorter one but for rounding (one part in 10^11).

    >>> optimal([10, 10, 10, 10], [400, 400, 400, 400], encode=(1, 0), exchange=(3, 0.01))
    Fusion(boundaries=(1, 3, 4), step_us=50.0)
    """
    costs = FusionCosts(encode=encode, exchange=exchange, decode=decode, decoding=decoding)
    ready_us, total_bytes = prefix_sums(backward_us), prefix_sums(nbytes)
    decode_us = [costs.after(total_bytes[-1] - before) for before in total_bytes[:-1]]  # by start of the last bucket
    chain = _chain(ready_us, total_bytes, costs)
    boundaries = (native_fusion(*chain, decode_us) if native else None) or _with_decode(chain, decode_us)
    return Fusion(tuple(boundaries), step_of(boundaries, ready_us, total_bytes, costs))


class _Chain(NamedTuple):
    """The problem in the direction in which second_us <= first_us: each bucket needs two resources, one after the other."""

    ready: Sequence[float]
    """Earliest time at which the first i tensors are done on the first resource, without the constants; n + 1 values."""
    sent: Sequence[float]
    """Time of the first i tensors on the second resource, without the constants; n + 1 values."""
    first_us: float
    """Constant of a bucket on the first resource."""
    second_us: float
    """Constant of a bucket on the second resource."""
    mirrored: bool
    """Whether the problem is read backwards, so that the first resource is the link."""

    def boundaries(self, ends: Sequence[int]) -> list[int]:
        """The plan's boundaries in gradient-ready order."""
        tensors = len(self.ready) - 1
        return [tensors - start for start in reversed((0, *ends[:-1]))] if self.mirrored else list(ends)


def _chain(ready_us: Sequence[float], total_bytes: Sequence[float], costs: FusionCosts) -> _Chain:
    encode, exchange, decode = costs.encode, costs.exchange, costs.decode
    if costs.decoding == "lumped":
        encode = AffineCost(encode.alpha_us + decode.alpha_us, encode.us_per_byte + decode.us_per_byte)
    ready = [ready + encode.us_per_byte * size for ready, size in zip(ready_us, total_bytes, strict=True)]
    sent = [exchange.us_per_byte * size for size in total_bytes]
    if exchange.alpha_us <= encode.alpha_us:
        return _Chain(ready, sent, encode.alpha_us, exchange.alpha_us, mirrored=False)
    return _Chain(
        ready=[sent[-1] - time for time in reversed(sent)],
        sent=[ready[-1] - time for time in reversed(ready)],
        first_us=exchange.alpha_us,
        second_us=encode.alpha_us,
        mirrored=True,
    )


class _FusionWalk(NamedTuple):
    """The fewest buckets whose lags are below a bound."""

    ends: list[int] | None
    """End of each bucket; None if there would be too many, or the walk stands still."""
    lag: float
    """The greatest of the lags."""
    turn: float
    """The next bound at which the walk would change."""


def _walk(chain: _Chain, last_start: int, bound: float, most: float) -> _FusionWalk:
    """Walk with buckets that reach as far as the bound allows: at most `most` buckets, the last from `last_start` or later."""
    ready, sent, first_us, second_us, mirrored = chain
    tensors = len(ready) - 1
    ends: list[int] = []
    lag, turn = -math.inf, math.inf
    end = 0
    while len(ends) < most:
        slack = (len(ends) + 1) * (second_us - first_us) + sent[end]
        reach = bisect_left(ready, bound + slack, lo=end) - 1
        if reach < tensors:
            turn = min(turn, ready[reach + 1] - slack)
        if mirrored and not ends:
            reach = min(reach, tensors - last_start)
        if reach >= tensors and (mirrored or end >= last_start):
            return _FusionWalk([*ends, tensors], max(lag, ready[tensors] - slack), turn)
        reach = min(reach, tensors - 1)
        if reach <= end:
            break
        lag = max(lag, ready[reach] - slack)
        ends.append(reach)
        end = reach
    return _FusionWalk(None, lag, turn)


def _shortest(chain: _Chain, last_start: int, least_us: float, below_us: float) -> tuple[list[int] | None, float]:
    """Boundaries of the plan with the shortest step, without an exposed decode, and the microseconds of the step.

    The last bucket begins at `last_start` or later. The caller knows that no plan is shorter than `least_us`. The boundaries are
    None if no plan is shorter than `below_us`.
    """
    tensors = len(chain.ready) - 1
    constant = chain.second_us
    fixed = chain.sent[-1] + constant  # step = lag + buckets * constant + fixed
    best, best_us = None, below_us
    # no plan has a smaller lag than a first bucket of one tensor
    low = chain.ready[1] + chain.first_us - chain.second_us
    # (no step in the interval is shorter, low, high, fewest buckets in it)
    intervals = [(low + constant + fixed, low, math.inf, 1)]
    while intervals:
        floor_us, low, high, fewest = heapq.heappop(intervals)
        if max(floor_us, least_us) >= best_us * _ROUNDING:
            break
        high = min(high, best_us - fewest * constant - fixed)
        bound = (low + high) / 2
        if not low < bound <= high:
            continue
        most = min(tensors, (best_us - fixed - low) / constant) if constant else tensors
        walk = _walk(chain, last_start, bound, most)
        if walk.ends is not None:
            others_us = len(walk.ends) * constant + fixed
            if walk.lag + others_us < best_us:
                best, best_us = walk.ends, walk.lag + others_us
            heapq.heappush(intervals, (low + others_us, low, min(bound, walk.lag), len(walk.ends)))
        turn = max(walk.turn, bound)
        if turn < high:
            heapq.heappush(intervals, (turn + fewest * constant + fixed, turn, high, fewest))
    return (None if best is None else chain.boundaries(best)), best_us


def _with_decode(chain: _Chain, decode_us: Sequence[float]) -> list[int]:
    """Boundaries of the plan with the shortest step and an exposed decode. decode_us: of the last bucket, by its first tensor."""
    best: list[int] = []
    best_us = math.inf
    # first and last start of the last bucket, and a lower bound of the step without decode
    ranges = [(0, len(decode_us) - 1, 0.0)]
    while ranges:
        first, last, least_us = ranges.pop()
        below_us = best_us * _ROUNDING - decode_us[last]
        if first > last or least_us >= below_us:
            continue
        middle = (first + last) // 2 if best else first
        plan, plan_us = _shortest(chain, middle, least_us, below_us)
        ranges.append((first, middle - 1, least_us))
        if plan is not None:
            start = plan[-2] if len(plan) > 1 else 0
            if plan_us + decode_us[start] < best_us:
                best, best_us = plan, plan_us + decode_us[start]
            ranges.append((start + 1, last, plan_us))
    return best
