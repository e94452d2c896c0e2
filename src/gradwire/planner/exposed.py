"""The number of bits of each tensor for the shortest step, with an error within a budget.

`gradwire.planner.bits` looks for the fewest bytes. But fewer bytes do not shorten the step if backward hides the exchange of
their bucket. Their error uses up budget that is then missing in the buckets that the step waits for. Here the price of a byte is
the time by which the predicted step becomes shorter without the byte.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gradwire.core import Bucket, Plan, Spec
from gradwire.planner.bits import Assignment, Sensitivity, exact, hull
from gradwire.sim import LightPlan, Simulator

StepTime = Callable[[Sequence[int]], float]
"""Microseconds of a step as a function of the index of each tensor's way."""
_ROUNDS = 8
"""Parts of the budget. After each part prices are computed again, since the buckets that a step waits for change with the bits.
The parts grow with the error: one bit less has four times the error."""
_HIDDEN = 0.1
"""The least price of a byte, as a share of the highest price: times are never exact, and others may use the link."""
_ALIKE = 1.001
"""Predictions within this factor count as equal; then fewer bytes are better."""


def shortest(tensors: Sequence[Sensitivity], budget: float, buckets: Sequence[int], step_us: StepTime) -> Assignment:
    """The assignment with the shortest predicted step among those tried, with a squared error of at most `budget`.

    buckets: the index of each tensor's bucket. The search begins with the ways of least error. It spends the budget on the
    changes that shorten the step most for their error. The assignment of fewest bytes is tried too, so the predicted step is
    never longer than with fewest bytes. Equal arguments give equal results. Raises PlanError as `exact` does.
    """
    found = [exact(tensors, budget)]
    chosen, prices = _spent(tensors, budget, buckets, step_us)
    found.append(_assignment(tensors, chosen))
    priced = [
        tensor._replace(sizes=tuple(round(size * prices[bucket]) for size in tensor.sizes))
        for tensor, bucket in zip(tensors, buckets, strict=True)
    ]
    found.append(_assignment(tensors, exact(priced, budget).choices))
    timed = [(step_us(each.choices), each) for each in found if each is found[0] or each.error <= budget]
    most_us = _ALIKE * min(us for us, _ in timed)
    return min((each for us, each in timed if us <= most_us), key=lambda each: each.nbytes)


def step_times(plan: Plan, simulator: Simulator, names: Sequence[str], ways: Sequence[Spec]) -> StepTime:
    """The predicted step of the plan as a function of the ways of the tensors `names`. Other tensors keep their specs."""
    inside = [[place for place, name in enumerate(names) if name in {*bucket.tensors}] for bucket in plan.buckets]
    known: dict[tuple[int, tuple[int, ...]], Bucket] = {}

    def bucket_of(index: int, choices: Sequence[int]) -> Bucket:
        key = index, tuple(choices[place] for place in inside[index])
        if key not in known:
            specs = {names[place]: ways[choices[place]] for place in inside[index]}
            known[key] = with_specs(plan.buckets[index], specs)
        return known[key]

    def step_us(choices: Sequence[int]) -> float:
        buckets = [bucket_of(index, choices) for index in range(len(plan.buckets))]
        return simulator.step_us(LightPlan(buckets, plan.launch, plan.schedule))

    return step_us


def with_specs(bucket: Bucket, specs: Mapping[str, Spec]) -> Bucket:
    """The bucket with these specs by tensor. Other tensors keep their specs."""
    given = {name: specs.get(name) or bucket.spec_of(name) for name in bucket.tensors}
    alike = len(set(given.values())) == 1
    return msgspec.structs.replace(bucket, spec=given[bucket.tensors[0]] if alike else given)


def _spent(
    tensors: Sequence[Sensitivity], budget: float, buckets: Sequence[int], step_us: StepTime
) -> tuple[list[int], dict[int, float]]:
    """The ways after the whole budget is spent, and the final price of a byte of each bucket."""
    hulls = [hull(tensor) for tensor in tensors]
    places = [len(ways) - 1 for ways in hulls]

    def chosen() -> list[int]:
        return [ways[place] for ways, place in zip(hulls, places, strict=True)]

    def prices() -> dict[int, float]:
        return _prices(tensors, hulls, places, buckets, step_us)

    def lower(limit: float, error: float, of_byte: Mapping[int, float], all_of_it: bool) -> float:
        """Lower bits until the next change would exceed the limit; changes that shorten the step most for their error first."""
        gains = {i: _gain(tensors[i], hulls[i], place) for i, place in enumerate(places) if place}
        heap = [(-gain * of_byte[buckets[i]], i) for i, gain in gains.items()]
        heapq.heapify(heap)
        while heap:
            _, index = heapq.heappop(heap)
            before, after = (hulls[index][places[index] - less] for less in (0, 1))
            more = error + tensors[index].errors[after] - tensors[index].errors[before]
            if more <= limit:
                error, places[index] = more, places[index] - 1
                if places[index]:
                    gain = _gain(tensors[index], hulls[index], places[index])
                    heapq.heappush(heap, (-gain * of_byte[buckets[index]], index))
            elif not all_of_it:
                break
        return error

    error = math.fsum(tensor.errors[way] for tensor, way in zip(tensors, chosen(), strict=True))
    first = max(error, budget * 4.0**-_ROUNDS)
    for number in range(1, _ROUNDS + 1):
        limit = first * (budget / first) ** (number / _ROUNDS) if first else budget
        error = lower(min(limit, budget), error, prices(), number == _ROUNDS)
    return chosen(), prices()


def _prices(
    tensors: Sequence[Sensitivity],
    hulls: Sequence[Sequence[int]],
    places: Sequence[int],
    buckets: Sequence[int],
    step_us: StepTime,
) -> dict[int, float]:
    """The price of a byte of each bucket, relative to the highest price.

    The price is the time that the step loses for each byte saved, if the bucket gets the next smaller number of bits. For a
    bucket with the fewest bits, it is the time that the step gains for each byte added, with the next larger number.
    """

    def moved(bucket: int, by: int) -> list[int]:
        changed = [
            max(0, min(len(hulls[i]) - 1, place + by * (buckets[i] == bucket))) for i, place in enumerate(places)
        ]
        return [ways[place] for ways, place in zip(hulls, changed, strict=True)]

    def nbytes(choices: Sequence[int]) -> int:
        return sum(tensor.sizes[way] for tensor, way in zip(tensors, choices, strict=True))

    now = moved(-1, 0)
    now_us, size = step_us(now), nbytes(now)
    found: dict[int, float] = {}
    for bucket in sorted(set(buckets)):
        other = moved(bucket, -1)
        other = moved(bucket, 1) if other == now else other
        change = size - nbytes(other)
        found[bucket] = max(0.0, (now_us - step_us(other)) / change) if change else 0.0
    dearest = max(found.values())
    return {bucket: max(_HIDDEN, price / dearest) if dearest else 1.0 for bucket, price in found.items()}


def _gain(tensor: Sensitivity, ways: Sequence[int], place: int) -> float:
    """Bytes that the next smaller number of bits saves for each unit of error."""
    before, after = ways[place], ways[place - 1]
    more = tensor.errors[after] - tensor.errors[before]
    return (tensor.sizes[before] - tensor.sizes[after]) / more if more > 0 else math.inf


def _assignment(tensors: Sequence[Sensitivity], chosen: Sequence[int]) -> Assignment:
    picked = [(t.sizes[way], t.errors[way]) for t, way in zip(tensors, chosen, strict=True)]
    return Assignment(tuple(chosen), sum(size for size, _ in picked), math.fsum(error for _, error in picked), False)
