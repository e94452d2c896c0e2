"""The best partition of tensors into buckets: Cupcake's problem (section 4), solved exactly and in milliseconds.

The link finishes as late as the worst bucket makes it: idle until that bucket was encoded, and busy from then on. Let R(i)
be backward time plus encode time per byte of the first i of n tensors, S(i) their link time per byte, h and g what every encode
and every exchange costs however small. For y buckets with ends e(1) < ... < e(y) = n,

    step = max over j of  R(e(j)) + j*h  +  (y - j + 1)*g + S(n) - S(e(j-1)).

**Two numbers count.** With lag(j) = R(e(j)) - S(e(j-1)) - j*(g - h), the step is the greatest lag + (y + 1)*g + S(n). Given a
bound on the lags, the fewest buckets are found by a walk in which each bucket reaches as far as the bound allows: R and S do not
fall, so no other plan within the bound is ahead of the walk after any number of buckets. (Where the bound leaves no room for a
tensor, an empty bucket counts; without it the step is no longer.)

**Branch and bound.** Let y(L) be the fewest buckets with lags below L. It does not rise with L, so no plan with a lag between
`low` and `high` has a shorter step than low + (y(high) + 1)*g + S(n). The interval with the least such bound is halved, until no
bound is below the best plan. A walk also says at which L it would first change, and no L before that needs a look.

**Mirror.** Read backwards, from the last exchange to the first gradient, the problem is itself, with h and g, and R and S, in
exchanged roles. In either reading the plans are told apart by (y + 1) times the constant of the second resource. The reading
is taken in which that is the smaller one: in the other, plans with one bucket more and a lag smaller by that constant
would tie in long rows.

**Decode.** Lumped into encode it is part of h and R. Exposed, that of the last bucket comes after the step so far: let M(k) be
the shortest step without it, of plans whose last bucket begins at tensor k or later. M does not fall with k and the decode does
not rise, so the best k is found by halving too.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradwire.core.checks import show
from gradwire.errors import PlanError
from gradwire.planner.partition import (
    Affine,
    Decoding,
    Fusion,
    FusionCosts,
    check_tensors,
    evaluate,
    prefix_sums,
    step_of,
)

__all__ = ["Affine", "Fusion", "FusionCosts", "evaluate", "optimal"]

_ROUNDING = 1 - 1e-12
"""Plans that would be shorter by less than this are rounding errors of one and the same step."""


def optimal(
    backward_us: Sequence[float],
    nbytes: Sequence[float],
    encode: tuple[float, float],
    exchange: tuple[float, float],
    decode: tuple[float, float] = (0.0, 0.0),
    decoding: Decoding = "exposed",
) -> Fusion:
    """The partition with the shortest step; of several that tie, any.

    `backward_us` and `nbytes` are by tensor in gradient-ready order, first ready first. `encode`, `exchange` and `decode` are
    (alpha_us, us_per_byte) of one bucket, per byte of *uncompressed* gradient; `decoding` as in `FusionCosts`. The step is what
    `evaluate` gives, and no partition's is shorter but for rounding (one part in 10^11). Raises PlanError as `evaluate` does, and
    if a cost is not affine.

    >>> optimal([10, 10, 10, 10], [400, 400, 400, 400], encode=(1, 0), exchange=(3, 0.01))
    Fusion(boundaries=(1, 3, 4), step_us=50.0)
    """
    check_tensors(backward_us, nbytes)
    costs = FusionCosts(encode=encode, exchange=exchange, decode=decode, decoding=decoding)
    ready_us, total_bytes = prefix_sums(backward_us), prefix_sums(nbytes)
    chain = _chain(ready_us, total_bytes, costs)
    until_decode = FusionCosts(encode=costs.of_compute, exchange=exchange)

    def step_us(boundaries: Sequence[int]) -> float:
        return step_of(boundaries, ready_us, total_bytes, until_decode)

    def decode_us(start: int) -> float:
        """The exposed decode when the last bucket begins at that tensor."""
        return costs.after(total_bytes[-1] - total_bytes[start])

    boundaries = _shortest(chain, 0, step_us)
    if decode_us(0) > decode_us(len(nbytes) - 1):
        boundaries = _with_decode(len(nbytes), lambda start: _shortest(chain, start, step_us), step_us, decode_us)
    return Fusion(tuple(boundaries), step_of(boundaries, ready_us, total_bytes, costs))


class _Chain(NamedTuple):
    """The problem in one reading: two resources that each bucket needs one after the other."""

    ready: Sequence[float]
    """When the first i tensors could be done on the first resource, without the constants; n + 1 values."""
    sent: Sequence[float]
    """Time of the first i tensors on the second resource, without the constants; n + 1 values."""
    first_us: float
    """Constant of a bucket on the first resource."""
    second_us: float
    """Constant of a bucket on the second resource."""
    mirrored: bool
    """Read backwards: the first resource is the link."""

    def mirror(self) -> "_Chain":
        """The same problem read backwards."""
        ready = [self.sent[-1] - sent for sent in reversed(self.sent)]
        sent = [self.ready[-1] - ready for ready in reversed(self.ready)]
        return _Chain(ready, sent, self.second_us, self.first_us, not self.mirrored)

    def boundaries(self, ends: Sequence[int]) -> list[int]:
        """The plan in gradient-ready order, without its empty buckets."""
        tensors = len(self.ready) - 1
        ends = [tensors - start for start in reversed((0, *ends[:-1]))] if self.mirrored else ends
        return [end for end in dict.fromkeys(ends) if end]


def _chain(ready_us: Sequence[float], total_bytes: Sequence[float], costs: FusionCosts) -> _Chain:
    encode, exchange, decode = (_affine(field, getattr(costs, field)) for field in ("encode", "exchange", "decode"))
    if costs.decoding == "lumped":
        encode = Affine(encode.alpha_us + decode.alpha_us, encode.us_per_byte + decode.us_per_byte)
    chain = _Chain(
        ready=[ready + encode.us_per_byte * size for ready, size in zip(ready_us, total_bytes, strict=True)],
        sent=[exchange.us_per_byte * size for size in total_bytes],
        first_us=encode.alpha_us,
        second_us=exchange.alpha_us,
        mirrored=False,
    )
    return chain.mirror() if chain.first_us < chain.second_us else chain


def _affine(field: str, cost: object) -> Affine:
    if not isinstance(cost, Affine):
        raise PlanError(
            f"{field} is {show(cost)}: the exact search is for affine costs, and would be wrong for others. Give a pair "
            "of alpha_us and us_per_byte."
        )
    return cost


def _shortest(chain: _Chain, last_start: int, step_us: Callable[[Sequence[int]], float]) -> list[int]:
    """Boundaries of the shortest step among plans whose last bucket begins at `last_start` or later."""
    tensors = len(chain.ready) - 1
    constant = chain.second_us
    fixed = chain.sent[-1] + constant  # step = lag + buckets * constant + fixed
    ends, _ = _walk(chain, last_start, math.inf, tensors)
    assert ends is not None, "without a bound every walk arrives"
    best = chain.boundaries(ends)
    best_us = step_us(best)
    low = (
        chain.ready[1] + chain.first_us - chain.second_us
    )  # the lag of a first bucket of one tensor: there is none below
    # (no step in the interval is shorter, low, high, fewest buckets in it)
    intervals = [(low + len(ends) * constant + fixed, low, math.inf, len(ends))]
    while intervals:
        bound, low, high, fewest = heapq.heappop(intervals)
        if bound >= best_us * _ROUNDING:
            break
        high = min(high, best_us - fewest * constant - fixed)
        middle = (low + high) / 2
        if not low < middle < high:
            continue
        worth = min(tensors, (best_us - fixed - low) / constant) if constant else tensors
        ends, turn = _walk(chain, last_start, middle, worth)
        if ends is not None:
            plan = chain.boundaries(ends)
            plan_us = step_us(plan)
            if plan_us < best_us:
                best, best_us = plan, plan_us
            below = len(ends) * constant + fixed
            heapq.heappush(intervals, (low + below, low, min(middle, plan_us - below), len(ends)))
        turn = max(turn, middle)
        if turn < high:
            heapq.heappush(intervals, (turn + fewest * constant + fixed, turn, high, fewest))
    return best


def _walk(chain: _Chain, last_start: int, bound: float, most: float) -> tuple[list[int] | None, float]:
    """Ends of the fewest buckets with lags below the bound, and the next bound at which the walk would change.

    Equal ends are empty buckets. None for the ends if there would be more than `most` or the walk stands still.
    """
    ready, sent, first_us, second_us, mirrored = chain
    tensors = len(ready) - 1
    ends: list[int] = []
    turn = math.inf
    end = 0
    while len(ends) < most:
        slack = (len(ends) + 1) * (second_us - first_us) + sent[end]
        reach = bisect_left(ready, bound + slack, lo=end) - 1
        if reach < tensors:
            turn = min(turn, ready[reach + 1] - slack)
        if mirrored and not ends:
            reach = min(reach, tensors - last_start)
        if reach >= tensors and (mirrored or end >= last_start):
            return [*ends, tensors], turn
        reach = max(end, min(reach, tensors - 1))
        if reach == end and second_us <= first_us:
            break
        ends.append(reach)
        end = reach
    return None, turn


def _with_decode(
    tensors: int,
    shortest_from: Callable[[int], list[int]],
    step_us: Callable[[Sequence[int]], float],
    decode_us: Callable[[int], float],
) -> list[int]:
    """Boundaries of the shortest step with the decode of the last bucket, which begins where it is best."""
    best: list[int] = []
    best_us = math.inf
    ranges = [
        (0, tensors - 1, 0.0)
    ]  # first and last start of the last bucket, and what the step is at least without decode
    while ranges:
        first, last, least_us = ranges.pop()
        if first > last or least_us + decode_us(last) >= best_us * _ROUNDING:
            continue
        middle = (first + last) // 2 if best else first
        plan = shortest_from(middle)
        start = plan[-2] if len(plan) > 1 else 0
        plan_us = step_us(plan)
        if plan_us + decode_us(start) < best_us:
            best, best_us = plan, plan_us + decode_us(start)
        ranges += [(first, middle - 1, least_us), (start + 1, last, plan_us)]
    return best
