"""Programs of options for a bucket's size, which `gradwire.sim.replay` simulates, and lower bounds that no plan can beat."""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from operator import add, itemgetter, le
from typing import NamedTuple

from gradwire.core import CODEC_TASKS, LINKS, Identity, Points, Spec, TensorProfile
from gradwire.costs import Bytes, Step, bytes_of, time_at
from gradwire.sim import FS_PER_US, INTER, INTRA, ReplayProgram, Simulator

_SHARED_BYTES = 64
"""Most bytes of a payload that several tensors in one bucket may share: headers, rounding."""
_MEANS = ((1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75), (0.0, 1.0))
"""Weights of the link inside nodes and the link between nodes in a mean of their work."""
_ROUNDED_US = 1e-8
"""Most microseconds of rounding in a bucket: fewer than 20 tasks, each rounded by at most half a femtosecond."""
_LATEST = 4
"""Number of tensors whose own tasks count in the bound."""


def _rising(points: Points) -> Points:
    """The least time of a codec over each size and all larger sizes: a smaller time at a larger size lowers earlier points."""
    rising = list(points)
    for index in reversed(range(len(points) - 1)):
        rising[index] = (points[index][0], min(points[index][1], rising[index + 1][1]))
    return tuple(rising)


class LinkLoad(NamedTuple):
    """Load of an option on one link: microseconds, and microseconds for each byte of a bucket's `Bytes`."""

    latency: float
    raw: float
    first: float
    later: float

    def us(self, size: Bytes) -> float:
        """Microseconds for the bytes of a bucket, without latencies."""
        return self.raw * size.raw + self.first * size.first + self.later * size.later


class Pricer:
    """Programs for one model on one cluster, by the prices and rules of a simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self.prices, self.rules = simulator, simulator.prices, simulator.rules
        self.program = cache(self._price)
        """The tasks of a bucket. Raises PlanError for an option or a codec that cannot be priced."""

    @cached_property
    def _floor(self) -> dict[tuple[Spec, str, str], Points]:
        """The least codec times over a size and all larger sizes, by spec, task and device."""
        return {
            (codec.spec, task, codec.device): _rising(points)
            for codec in self.prices.codecs.values()
            for task, points in (("comp", codec.encode), ("decomp", codec.decode))
        }

    def loads(self, options: Sequence[tuple[str, ...]], rounds: int) -> list[tuple[LinkLoad, LinkLoad]]:
        """The loads of options on the links inside nodes and between nodes, without loads that another one beats in all parts."""
        kept: list[tuple[LinkLoad, LinkLoad]] = []
        forms = [steps for option in options for steps in self.prices.forms(option, rounds)]
        for loads in sorted({(self.load(steps, INTRA), self.load(steps, INTER)) for steps in forms}):
            parts = [number for load in loads for number in load]
            if not any(all(map(le, (number for load in other for number in load), parts)) for other in kept):
                kept.append(loads)
        return kept

    def load(self, steps: Sequence[Step], link: int) -> LinkLoad:
        """The load of an option on one link."""
        latency, factors = 0.0, [0.0, 0.0, 0.0]
        for step in steps:
            if step.traffic is not None and self.simulator.resource(step.task) == link:
                lines = [(line.latency_us - line.free_us, line.factor * line.us_per_byte) for line in self.prices.lines(step)]
                alpha, beta = max(lines, key=itemgetter(1))
                latency += alpha
                factors[step.payload] += beta * step.share * step.parts
        return LinkLoad(latency, *factors)

    def sequence_us(self, option: tuple[str, ...], spec: Spec, size: Bytes) -> float:
        """The least time of a bucket's tasks, one after the other, if the bucket has this size or a larger one."""
        return min(self._sequence_us(steps, spec, size) for steps in self.prices.forms(option, spec.rounds))

    def _sequence_us(self, steps: Sequence[Step], spec: Spec, size: Bytes) -> float:
        us = 0.0
        for step in steps:
            what, _, device = step.task.partition(":")
            if step.traffic is not None:
                us += self.prices.exchange_us(step, size[step.payload] * step.share * step.parts)
            elif step.share and step.parts and not (what == "decomp" and self.rules.decode == "none"):
                calls = self.prices.calls(step, spec)
                points = self._floor.get((spec, what, device), ((0, 0.0),))
                coded_us = calls * time_at(points, size.coded * step.share * step.parts / calls)
                us += coded_us / (spec.rounds or 1) if what == "comp" else coded_us
        return us

    def _price(self, option: tuple[str, ...], spec: Spec, size: Bytes) -> ReplayProgram:
        prices = self.prices.tasks(option, spec.rounds, {spec: 1.0}, size)
        sent = [price.task.endswith(LINKS) for price in prices]
        phases = sum(sent)
        tasks, busy, links = [], [0, 0, 0, 0], list[int]()
        for index, is_sent in enumerate(sent):
            phase = min(len(links), phases - 1)
            task = self.simulator.task(prices, index, phase, phase if len(links) < phases else None)
            if is_sent:
                links.append(task.resource)
                if task.cpu:  # programs have one task after the other
                    busy[task.cpu_on] += task.cpu
                    tasks.append((task.cpu_on, task.cpu, task.urgency, phase))
            busy[task.resource] += task.length
            tasks.append((task.resource, task.length, task.urgency, phase))
        codecs = sum(price.task.startswith(CODEC_TASKS) for price in prices)
        return ReplayProgram(tuple(tasks), tuple(links), (busy[0], busy[1], busy[2], busy[3]), codecs)


def least_step_us(
    pricer: Pricer,
    after: Sequence[int],
    tensors: Sequence[tuple[TensorProfile, bool]],
    specs: Sequence[Spec],
    plain: Sequence[tuple[str, ...]],
    coded: Mapping[Spec, Sequence[tuple[str, ...]]],
    moved: Mapping[Spec, Sequence[tuple[str, ...]]],
) -> float:
    """Microseconds that no plan can beat, with any buckets, options, specs and launch order, if no bucket is cut into chunks.

    All bytes that tensor k and later tensors put on a link travel after k's gradient is ready, at the earliest by backward alone;
    a bucket with earlier tensors is ready no sooner. Each tensor counts with the least link time of all choices. Only one latency
    counts, since fusion can remove the others.

    The tasks of a bucket follow each other. So after a tensor's gradient is ready the step takes at least the time of the
    quickest choice for this tensor alone, since no task of a larger bucket is shorter.

    after: femtoseconds until each gradient can be ready, the forward first. tensors: (tensor, whether it must stay uncompressed)
    in gradient-ready order. plain, coded: the options of uncompressed buckets, and of compressed buckets by spec. moved: the
    options in `coded` that may be offloaded, with codecs on CPUs.
    """
    ready_us = [time / FS_PER_US for time in after]
    bound = ready_us[-1]
    for link in (INTER, INTRA):
        ways: list[tuple[Spec, LinkLoad]] = []
        for spec in (Identity(), *specs):
            options = coded[spec] if spec.encodes else plain
            forms = [steps for option in options for steps in pricer.prices.forms(option, spec.rounds)]
            ways += [(spec, load) for load in {pricer.load(steps, link) for steps in forms}]
        known: dict[tuple[object, ...], float] = {}
        least = []
        for tensor, exempt in tensors:
            key = (tensor.shape, tensor.dtype, exempt)
            if key not in known:
                allowed = [spec for spec in (Identity(), *specs) if not exempt or not spec.encodes or spec.carries_uncompressed]
                sizes = {spec: _least_bytes(tensor, spec, exempt) for spec in allowed}
                known[key] = min(load.us(sizes[spec]) for spec, load in ways if spec in sizes)
            least.append(known[key])
        latency_us = min(load.latency for _, load in ways)
        still = list(accumulate(reversed(least)))[::-1]
        bound = max(bound, *(r + s + latency_us for r, s in zip(ready_us[1:], still, strict=True)))
    for place in _latest_and_largest(tensors):
        tensor, exempt = tensors[place]
        quickest = min(pricer.sequence_us(option, Identity(), _least_bytes(tensor, Identity())) for option in plain)
        for spec in [spec for spec in specs if not exempt or spec.carries_uncompressed]:
            size = _least_bytes(tensor, spec, exempt)
            options = (*coded[spec], *moved.get(spec, ()))
            quickest = min([quickest, *(pricer.sequence_us(option, spec, size) for option in options)])
        bound = max(bound, ready_us[place + 1] + quickest)
    return bound * (1 - 1e-12) - _ROUNDED_US * len(tensors)


def least_alone_us(
    pricer: Pricer,
    after: Sequence[int],
    tensors: Sequence[tuple[TensorProfile, bool]],
    plain: Sequence[tuple[str, ...]],
    coded: Mapping[Spec, Sequence[tuple[str, ...]]],
) -> float:
    """Microseconds that no plan with every tensor alone can beat; arguments as of `least_step_us`.

    After the first gradient is ready, the step lasts at least as long as the work of each link, so at least as long as any
    weighted mean of both links' work. The least mean takes the option of least mean for each tensor, latencies included.
    """
    ways: list[tuple[Spec, tuple[LinkLoad, LinkLoad]]] = [(Identity(), loads) for loads in pricer.loads(plain, 0)]
    ways += [(spec, loads) for spec, options in coded.items() for loads in pricer.loads(options, spec.rounds)]
    known: dict[tuple[object, ...], list[float]] = {}
    totals = [0.0] * len(_MEANS)
    for tensor, exempt in tensors:
        key = (tensor.shape, tensor.dtype, exempt)
        if key not in known:
            allowed = [(spec, loads) for spec, loads in ways if not (exempt and spec.encodes)]
            sizes = {spec: bytes_of([tensor], spec) for spec in dict(allowed)}
            work = [[load.latency + load.us(sizes[spec]) for load in loads] for spec, loads in allowed]
            known[key] = [min(intra * a + inter * b for a, b in work) for intra, inter in _MEANS]
        totals = list(map(add, totals, known[key]))
    return (after[1] / FS_PER_US + max(totals)) * (1 - 1e-12) - _ROUNDED_US * len(tensors)


def _latest_and_largest(tensors: Sequence[tuple[TensorProfile, bool]]) -> list[int]:
    """The last four tensors that are larger than all tensors that are ready later; exempt and other tensors counted apart."""
    found: dict[bool, list[int]] = {True: [], False: []}
    largest = {True: -1, False: -1}
    for place in reversed(range(len(tensors))):
        tensor, exempt = tensors[place]
        if tensor.nbytes > largest[exempt] and len(found[exempt]) < _LATEST:
            largest[exempt] = tensor.nbytes
            found[exempt].append(place)
    return found[True] + found[False]


def _least_bytes(tensor: TensorProfile, spec: Spec, exempt: bool = False) -> Bytes:
    """Lower bound of the tensor's part of a bucket's `Bytes`."""
    size = bytes_of([], spec, [tensor]) if exempt and spec.encodes else bytes_of([tensor], spec)
    first, later = (max(0.0, nbytes - _SHARED_BYTES) for nbytes in (size.first, size.later))
    return size._replace(first=first, later=later)
