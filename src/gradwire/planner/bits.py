"""The number of bits of each tensor: the fewest bytes with an error within a budget (CGX, section 5).

The input is the measured squared l2 error of each tensor in each way to encode it, on the same gradient. Errors add up over
tensors, so the problem is a multiple-choice knapsack. `exact` solves it. `kmeans` and `linear`, CGX's rules, are for comparison.

`shortest` looks for the shortest step instead. Fewer bytes do not shorten the step if backward hides the exchange of their
bucket. Their error uses up budget that is then missing in the buckets that the step waits for. So the price of a byte is the
time by which the predicted step becomes shorter without the byte.

>>> tensors = [Sensitivity("w", sizes=(10, 20, 40), errors=(9.0, 4.0, 1.0)), Sensitivity("v", (10, 20, 40), (90.0, 5.0, 1.0))]
>>> exact(tensors, budget=14.0)  # both errors of the middle, 4 + 5; or 9 + 5, which is smaller
Assignment(choices=(0, 1), nbytes=30, error=14.0, proven=True)
"""

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from gradwire.core import Bucket, Plan, Spec
from gradwire.errors import PlanError
from gradwire.sim import LightPlan, Simulator

MOST_STATES = 20_000
"""Most states of the exact search between two tensors. Of more states the search drops some, and its result is not proven."""


class Sensitivity(NamedTuple):
    """Bytes and error of a tensor for each way to encode it. All tensors have the same ways in the same order. `kmeans` and
    `linear` expect the ways from fewest bits to most."""

    name: str
    sizes: tuple[int, ...]
    """Payload bytes, by way."""
    errors: tuple[float, ...]
    """Squared l2 error, by way, measured on one gradient."""
    numel: int = 0
    norm: float = 0.0
    """l2 norm of the gradient, for `linear`."""
    top_norm: float = 0.0
    """l2 norm of the largest one percent of the values by magnitude, for `kmeans`."""


class Assignment(NamedTuple):
    """A choice for each tensor."""

    choices: tuple[int, ...]
    """The index of each tensor's way."""
    nbytes: int
    error: float
    """Squared l2 error of all tensors together."""
    proven: bool
    """Whether no smaller assignment keeps the budget."""


def error_budget(tensors: Sequence[Sensitivity], uniform: int, alpha: float = 2.0) -> float:
    """The allowed squared error: (alpha * E)^2, where E is the error of the way `uniform` for every tensor.

    alpha: 1.5 to 3 in the paper. Raises PlanError for an alpha below 1: not even uniform bits would keep the budget.
    """
    if not alpha >= 1:
        raise PlanError(f"alpha is {alpha}: the error allowed, over that of uniform bits, must be 1 or more (2 is usual).")
    return alpha * alpha * math.fsum(tensor.errors[uniform] for tensor in tensors)


def exact(tensors: Sequence[Sensitivity], budget: float) -> Assignment:
    """The assignment of fewest bytes with a squared error of at most `budget`.

    The relaxed problem, in which a tensor may mix two ways, gives a lower bound of the bytes and a price of error in bytes. At
    this price each tensor has a best way, and every other way costs a known regret. A solution's bytes are at least the bound
    plus its regrets. So a tensor can leave its best way only if the regret is less than the best known solution minus the
    bound; few tensors can. Dynamic programming searches these over states (bytes, error), and keeps the states that no other
    state beats in both. If there are too many states, the search keeps the most promising ones, and the result is not `proven`.

    Raises PlanError if even the largest encodings lose more than the budget.
    """
    _check(tensors, budget)
    price = _price_of_error(tensors, budget)
    base = [_cheapest(tensor, price) for tensor in tensors]
    bound = math.fsum(_priced(t, way, price) for t, way in zip(tensors, base, strict=True))
    bound -= price * budget if price else 0.0  # the budget is no limit, and may be infinite
    known = (repaired(tensors, base, budget), kmeans(tensors, budget), linear(tensors, budget))
    best = min(known, key=lambda assignment: assignment.nbytes)
    slack = best.nbytes - bound
    # regrets of each tensor's other ways; tensors with the least regret first
    others = []
    for index, (tensor, way) in enumerate(zip(tensors, base, strict=True)):
        regrets = [(_priced(tensor, w, price) - _priced(tensor, way, price), w) for w in range(len(tensor.sizes)) if w != way]
        regrets = [(regret, w) for regret, w in regrets if regret < slack]
        if regrets:
            others.append((min(regrets)[0], index, regrets))
    others.sort()
    return _search(tensors, base, others, budget, price, best)


def kmeans(tensors: Sequence[Sensitivity], budget: float, seed: int = 0, ladder: Sequence[int] | None = None) -> Assignment:
    """CGX's Algorithm 1, repaired (docs/papers/cgx.md). Clusters tensors by (log size, log norm of the top values), both
    standardised. The cluster with the lowest norm - size gets the first way of the ladder. Then bits are raised until the budget
    holds.

    ladder: the ways that clusters may get, from that of the least sensitive tensors to that of the most sensitive ones. None: all
    in their order.
    """
    _check(tensors, budget)
    steps = range(len(tensors[0].sizes)) if ladder is None else ladder
    ways = len(steps)
    points = np.array([(math.log(max(1, t.numel)), math.log(max(t.top_norm, 1e-30))) for t in tensors])
    spread = points.std(axis=0)
    points = (points - points.mean(axis=0)) / np.where(spread, spread, 1.0)
    clusters = _lloyd(points, min(ways, len(tensors)), random.Random(seed))
    count = int(clusters.max()) + 1
    sensitivity = [float((points[clusters == cluster] @ (-1.0, 1.0)).mean()) for cluster in range(count)]
    ranking = sorted(range(count), key=lambda cluster: sensitivity[cluster])
    way_of = {cluster: steps[round(place * (ways - 1) / max(1, count - 1))] for place, cluster in enumerate(ranking)}
    return repaired(tensors, [way_of[cluster] for cluster in clusters], budget)


def linear(tensors: Sequence[Sensitivity], budget: float, ladder: Sequence[int] | None = None) -> Assignment:
    """CGX's simple rule: tensors by norm over size get from the fewest bits to the most, which rise until the budget holds.
    ladder: as for `kmeans`."""
    _check(tensors, budget)
    steps = range(len(tensors[0].sizes)) if ladder is None else ladder
    ranking = sorted(range(len(tensors)), key=lambda i: tensors[i].norm / max(1, tensors[i].numel))
    ways = [0] * len(tensors)
    for place, index in enumerate(ranking):
        ways[index] = steps[round(place * (len(steps) - 1) / max(1, len(tensors) - 1))]
    return repaired(tensors, ways, budget)


def _check(tensors: Sequence[Sensitivity], budget: float) -> None:
    if not tensors:
        raise PlanError("there are 0 tensors to choose bits for: all are exempt, or the policy compresses none.")
    for tensor in tensors:
        if len(tensor.sizes) != len(tensor.errors) or not tensor.sizes:
            raise PlanError(
                f"tensor {tensor.name!r} has {len(tensor.sizes)} sizes and {len(tensor.errors)} errors: one of each for every "
                "way to encode it."
            )
        if not all(math.isfinite(error) and error >= 0 for error in tensor.errors):
            raise PlanError(
                f"tensor {tensor.name!r} has errors {tensor.errors}: its gradient was not finite when they were measured. "
                "Measure in another step."
            )
    least = math.fsum(min(tensor.errors) for tensor in tensors)
    if least > budget:
        raise PlanError(
            f"the squared error is at least {least:.4g} with any bits, but the budget is {budget:.4g}. Raise alpha, or allow "
            "more bits."
        )


def _cheapest(tensor: Sensitivity, price: float) -> int:
    return min(range(len(tensor.sizes)), key=lambda way: (_priced(tensor, way, price), tensor.errors[way]))


def _priced(tensor: Sensitivity, way: int, price: float) -> float:
    """Bytes plus the price of the error."""
    return tensor.sizes[way] + price * tensor.errors[way]


def _price_of_error(tensors: Sequence[Sensitivity], budget: float) -> float:
    """Bytes that one more unit of squared error saves in the relaxed problem."""
    steps: list[tuple[float, float]] = []
    error = 0.0
    for tensor in tensors:
        corners = hull(tensor)
        error += tensor.errors[corners[0]]
        for low, high in pairwise(corners):
            less = tensor.errors[low] - tensor.errors[high]
            steps.append(((tensor.sizes[high] - tensor.sizes[low]) / less, less))
    if error <= budget:
        return 0.0
    steps.sort()
    for slope, less in steps:
        error -= less
        if error <= budget:
            return slope
    return steps[-1][0] if steps else 0.0


def hull(tensor: Sensitivity) -> list[int]:
    """The ways on the lower left hull of (size, error), from the smallest to the one of least error."""
    order = sorted(range(len(tensor.sizes)), key=lambda way: (tensor.sizes[way], tensor.errors[way]))
    found: list[int] = []
    for way in order:
        if found and tensor.errors[way] >= tensor.errors[found[-1]]:
            continue
        while len(found) > 1 and _gain(tensor, found[-2], found[-1]) <= _gain(tensor, found[-1], way):
            found.pop()
        found.append(way)
    return found


def _gain(tensor: Sensitivity, low: int, high: int) -> float:
    """Error saved by each further byte."""
    more = tensor.sizes[high] - tensor.sizes[low]
    less = tensor.errors[low] - tensor.errors[high]
    return less / more if more else math.inf


def repaired(tensors: Sequence[Sensitivity], ways: Sequence[int], budget: float) -> Assignment:
    """Ways within the budget: raise the way that saves most error per byte until the budget holds, then lower others."""
    _check(tensors, budget)
    chosen = list(ways)
    error = _error_of(tensors, chosen)
    while error > budget:
        moves = [
            (_gain(tensor, chosen[index], way), index, way)
            for index, tensor in enumerate(tensors)
            for way in range(len(tensor.sizes))
            if tensor.errors[way] < tensor.errors[chosen[index]]
        ]
        _, index, way = max(moves, key=lambda move: (move[0], -move[1], -move[2]))
        chosen[index] = way
        error = _error_of(tensors, chosen)
    while True:
        savings = [
            (tensor.sizes[chosen[index]] - tensor.sizes[way], -index, -way)
            for index, tensor in enumerate(tensors)
            for way in range(len(tensor.sizes))
            if tensor.sizes[way] < tensor.sizes[chosen[index]]
            and error + tensor.errors[way] - tensor.errors[chosen[index]] <= budget
        ]
        if not savings:
            return _assignment(tensors, chosen)
        _, index, way = max(savings)
        chosen[-index] = -way
        error = _error_of(tensors, chosen)


def _error_of(tensors: Sequence[Sensitivity], chosen: Sequence[int]) -> float:
    return math.fsum(tensor.errors[way] for tensor, way in zip(tensors, chosen, strict=True))


def _assignment(tensors: Sequence[Sensitivity], chosen: Sequence[int], proven: bool = False) -> Assignment:
    picked = [(t.sizes[way], t.errors[way]) for t, way in zip(tensors, chosen, strict=True)]
    return Assignment(tuple(chosen), sum(size for size, _ in picked), math.fsum(error for _, error in picked), proven)


def _search(
    tensors: Sequence[Sensitivity],
    base: Sequence[int],
    others: Sequence[tuple[float, int, Sequence[tuple[float, int]]]],
    budget: float,
    price: float,
    best: Assignment,
) -> Assignment:
    """The best of all changes of `base`; see `exact`. States are rows of arrays. A stage holds each row's parent."""
    start = _assignment(tensors, base, proven=True)
    nbytes, error = np.array([start.nbytes]), np.array([start.error])
    stages: list[tuple[int, np.ndarray, np.ndarray]] = []
    least, found, proven = best.nbytes, None, True
    if start.error <= budget and start.nbytes < least:
        least, found = start.nbytes, (0, 0)
    for _, index, ways in others:
        tensor, own = tensors[index], base[index]
        choices = [own, *(way for _, way in ways)]
        rows = len(nbytes)
        nbytes = np.concatenate([nbytes + (tensor.sizes[way] - tensor.sizes[own]) for way in choices])
        error = np.concatenate([error + (tensor.errors[way] - tensor.errors[own]) for way in choices])
        parent, way = np.tile(np.arange(rows), len(choices)), np.repeat(np.array(choices), rows)
        order = np.lexsort((error, nbytes))
        # bytes are whole numbers, so a state priced within half a byte of the best known result cannot end below that result
        order = order[(nbytes + price * (error - budget))[order] < least - 0.5]
        lowest = np.minimum.accumulate(np.concatenate(([np.inf], error[order])))
        order = order[error[order] < lowest[:-1]]
        if len(order) > MOST_STATES:
            proven = False
            cheapest = np.argpartition((nbytes + price * error)[order], MOST_STATES)[:MOST_STATES]
            order = order[np.sort(cheapest)]
        nbytes, error = nbytes[order], error[order]
        stages.append((index, parent[order], way[order]))
        good = np.flatnonzero((error <= budget) & (nbytes < least))
        if len(good):  # rows ascend in bytes
            least, found = int(nbytes[good[0]]), (len(stages), int(good[0]))
    if found is None:
        return best._replace(proven=proven)
    chosen, (stage, row) = list(base), found
    for index, parent, way in reversed(stages[:stage]):
        chosen[index], row = int(way[row]), int(parent[row])
    return _assignment(tensors, chosen, proven)


def _lloyd(points: np.ndarray, count: int, chance: random.Random) -> np.ndarray:
    """k-means with k-means++ starts: the cluster of each point, numbered without gaps."""
    centres = points[[chance.randrange(len(points))]]
    while len(centres) < count and (weights := _squares(points, centres).min(axis=1)).any():
        centres = np.vstack([centres, points[chance.choices(range(len(points)), weights.tolist())]])
    own = np.zeros(len(points), dtype=np.int64)
    for _ in range(100):
        nearest = _squares(points, centres).argmin(axis=1)
        if (nearest == own).all():
            break
        own = nearest
        for cluster in set(own):
            centres[cluster] = points[own == cluster].mean(axis=0)
    return np.unique(own, return_inverse=True)[1]


def _squares(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The squared distance of each point (row) to each centre (column)."""
    squares: np.ndarray = ((points[:, None] - centres) ** 2).sum(axis=2)
    return squares


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
        gains = {i: _bytes_saved(tensors[i], hulls[i], place) for i, place in enumerate(places) if place}
        heap = [(-gain * of_byte[buckets[i]], i) for i, gain in gains.items()]
        heapq.heapify(heap)
        while heap:
            _, index = heapq.heappop(heap)
            before, after = (hulls[index][places[index] - less] for less in (0, 1))
            more = error + tensors[index].errors[after] - tensors[index].errors[before]
            if more <= limit:
                error, places[index] = more, places[index] - 1
                if places[index]:
                    gain = _bytes_saved(tensors[index], hulls[index], places[index])
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
        changed = [max(0, min(len(hulls[i]) - 1, place + by * (buckets[i] == bucket))) for i, place in enumerate(places)]
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


def _bytes_saved(tensor: Sensitivity, ways: Sequence[int], place: int) -> float:
    """Bytes that the next smaller number of bits saves for each unit of error."""
    before, after = ways[place], ways[place - 1]
    more = tensor.errors[after] - tensor.errors[before]
    return (tensor.sizes[before] - tensor.sizes[after]) / more if more > 0 else math.inf
