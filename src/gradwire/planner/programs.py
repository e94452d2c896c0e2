"""Times of options for a bucket's size, as programs that `gradwire.sim.replay` simulates, and a bound that no plan can beat."""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from gradwire.core.checks import DTYPE_BYTES
from gradwire.core.costs import Points
from gradwire.core.payload import RAW
from gradwire.core.profile import TensorProfile
from gradwire.core.specs import Identity, Spec
from gradwire.core.specs.base import ElementRun
from gradwire.costs.collectives import us_per_byte
from gradwire.costs.prices import CodecTimes, time_at
from gradwire.costs.steps import steps_of
from gradwire.sim.events import AWAITED, COMPUTE, INTER, INTRA, LAST, LATE, POOL
from gradwire.sim.native import ReplayProgram
from gradwire.sim.simulator import FS_PER_US, Simulator, fs_of

_SHARED_BYTES = 64
"""Bytes of a payload that several tensors in one bucket may share: headers, rounding."""
_LATEST = 4
"""The number of tensors whose own tasks count in the bound."""


class Bytes(NamedTuple):
    """The sizes from which the times of a bucket's tasks follow."""

    raw: float
    """Of the gradients."""
    first: float
    """Of the payload of the first encode; 0 if nothing is encoded."""
    later: float
    """Of the payload of a later encode, of a sum."""
    coded: float
    """Of the gradients that are encoded, in float32: codecs are timed by these bytes."""


def bytes_of(tensors: Sequence[TensorProfile], spec: Spec, beside: Sequence[TensorProfile] = ()) -> Bytes:
    """The sizes of a bucket of these tensors, summed in float32. Those `beside` travel uncompressed in the same payload."""
    raw = sum(tensor.nbytes for tensor in (*tensors, *beside))
    coded = DTYPE_BYTES["float32"] * sum(tensor.numel for tensor in tensors)
    if not spec.encodes:
        return Bytes(raw, 0, 0, coded)
    runs = [ElementRun(tensor.numel, spec.element_bits, tensor.shape) for tensor in tensors]
    runs += [ElementRun(tensor.numel, RAW) for tensor in beside]
    first = spec.bytes_beside(runs, DTYPE_BYTES[(*tensors, *beside)[0].dtype])
    if spec.rounds:
        return Bytes(raw, first / spec.rounds, first / spec.rounds, coded)
    return Bytes(raw, first, spec.bytes_beside(runs, DTYPE_BYTES["float32"]), coded)


class _Move(NamedTuple):
    """A task of an option on this cluster, for buckets of any size."""

    resource: int
    urgency: int
    phase: int
    share: float
    """The part of the payload's bytes that an exchange moves, or of the float32 gradients that each codec call has."""
    payload: int = -1
    """Of an exchange: index into Bytes. Of a codec task: -1."""
    lines: tuple[tuple[float, float], ...] = ()
    """Of an exchange: microseconds and microseconds per byte, one for each link; the longer one counts."""
    decodes: bool = False
    device: str = ""
    calls: int = 1
    cuts: int = 1
    with_decodes: bool = False
    """Whether the time of all decodes is added to this task."""

    def exchange_us(self, size: Bytes) -> float:
        held = size[self.payload] * self.share
        return max(alpha + beta * held for alpha, beta in self.lines)


def _rising(points: Points) -> Points:
    """The least time of a codec for each size and all larger ones: later smaller times lower the earlier ones."""
    rising = list(points)
    for index in reversed(range(len(points) - 1)):
        rising[index] = (points[index][0], min(points[index][1], rising[index + 1][1]))
    return tuple(rising)


class Pricer:
    """Programs for one model on one cluster, by the prices and rules of a simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self.cluster, self.rules = simulator.prices.cluster, simulator.rules
        self.codecs: CodecTimes = simulator.prices.codecs
        self._moves_of = cache(self._plan_moves)
        self._times: dict[tuple[Spec, str, bool, float], float] = {}
        self.program = cache(self._price)
        """The tasks of a bucket. Raises PlanError for an option or a codec that cannot be priced."""

    @cached_property
    def _floor(self) -> dict[tuple[Spec, str, bool], Points]:
        """By spec, device and whether it decodes: the least time of a size and all larger ones."""
        return {
            (codec.spec, codec.device, decodes): _rising(codec.decode if decodes else codec.encode)
            for codec in self.codecs.costs.codecs
            for decodes in (False, True)
        }

    def link_loads(
        self, options: Sequence[tuple[str, ...]], rounds: int, link: int
    ) -> set[tuple[float, tuple[float, float, float]]]:
        """The least load of options on one link: (latencies in us, us for each byte of Bytes.raw, .first and .later)."""
        found = set()
        for option in options:
            latency, factors = 0.0, [0.0, 0.0, 0.0]
            for move in self._moves_of(option, rounds):
                if move.payload >= 0 and move.resource == link:
                    alpha, beta = max(move.lines, key=lambda line: line[1])
                    latency += alpha
                    factors[move.payload] += beta * move.share
            found.add((latency, (factors[0], factors[1], factors[2])))
        return found

    def sequence_us(self, option: tuple[str, ...], spec: Spec, size: Bytes) -> float:
        """The least time of a bucket's tasks, one after the other, if the bucket has this size or a larger one."""
        free = self.rules.decode == "none"
        us = 0.0
        for move in self._moves_of(option, spec.rounds):
            if move.payload >= 0:
                us += move.exchange_us(size)
            elif move.share and not (free and move.decodes):
                points = self._floor.get((spec, move.device, move.decodes))
                us += move.calls * time_at(points, size.coded * move.share) / move.cuts if points else 0.0
        return us

    def _price(self, option: tuple[str, ...], spec: Spec, size: Bytes) -> ReplayProgram:
        moves = self._moves_of(option, spec.rounds)
        tasks, busy, links, codecs = [], [0, 0, 0, 0], [], 0
        lumped = any(move.with_decodes for move in moves)
        decodes_us = sum(self._codec_us(move, spec, size) for move in moves if move.decodes) if lumped else 0.0
        for move in moves:
            if move.payload < 0:
                codecs += 1
                free = move.decodes and self.rules.decode in ("none", "with encode")
                us = 0.0 if free else self._codec_us(move, spec, size)
                us += decodes_us if move.with_decodes else 0.0
            else:
                links.append(move.resource)
                us = move.exchange_us(size)
            length = fs_of(us)
            busy[move.resource] += length
            tasks.append((move.resource, length, move.urgency, move.phase))
        return ReplayProgram(tuple(tasks), tuple(links), (busy[0], busy[1], busy[2], busy[3]), codecs)

    def _codec_us(self, move: _Move, spec: Spec, size: Bytes) -> float:
        if not move.share:
            return 0.0
        nbytes = size.coded * move.share
        key = (spec, move.device, move.decodes, nbytes)
        us = self._times.get(key)
        if us is None:
            points = self.codecs.points(spec, move.device, "decode" if move.decodes else "encode")
            us = self._times[key] = time_at(points, nbytes)
        return move.calls * us / move.cuts

    def _plan_moves(self, option: tuple[str, ...], rounds: int) -> list[_Move]:
        cluster, rules = self.cluster, self.rules
        steps = steps_of(option, cluster.nodes, cluster.ranks_per_node, rounds, rules.routing)
        phases = sum(step.traffic is not None for step in steps)
        moves: list[_Move] = []
        phase = 0
        for step in steps:
            what, _, where = step.task.partition(":")
            if step.traffic is not None:
                resource = INTRA if where == "intra" or cluster.nodes == 1 else INTER
                loads = (step.traffic.intra, step.traffic.inter)
                lines = tuple(
                    (load.messages * link.alpha_us, load.factor * us_per_byte(link))
                    for load, link in zip(loads, cluster.links_for(step.task), strict=True)
                )
                moves.append(_Move(resource, AWAITED, phase, step.share * step.parts, step.payload, lines))
                phase += 1
                continue
            decodes = what == "decomp"
            urgency = AWAITED
            if decodes and phase == phases:
                urgency = LATE if rules.decode == "after backward" else LAST
            resource = COMPUTE if where == rules.device and rules.codec_on == "compute" else POOL
            calls = 1 if rules.decode_calls == "one" else step.parts
            share = step.share * step.parts / calls if step.parts else 0.0
            move = _Move(resource, urgency, min(phase, phases - 1), share, decodes=decodes, device=where, calls=calls)
            if not decodes:
                first = all(move.payload >= 0 or move.decodes for move in moves)
                move = move._replace(cuts=rounds or 1, with_decodes=first and rules.decode == "with encode")
            moves.append(move)
        return moves


def least_step_us(
    pricer: Pricer,
    after: Sequence[int],
    tensors: Sequence[tuple[TensorProfile, bool]],
    specs: Sequence[Spec],
    plain: Sequence[tuple[str, ...]],
    coded: Mapping[Spec, Sequence[tuple[str, ...]]],
) -> float:
    """Microseconds that no plan can beat, with any buckets, options, specs and launch order, if no bucket is cut into chunks.

    All bytes that tensor k and later tensors put on a link travel after k's gradient is ready, at the earliest by backward alone;
    a bucket with earlier tensors is ready later still. Each tensor counts with the least link time of all choices. Of all
    latencies only one counts, since fusion can make the others as small as it likes.

    The tasks of a bucket follow each other. So after a tensor's gradient is ready the step takes at least the time of the
    quickest choice for this tensor alone, since no task of a larger bucket is shorter.

    after: femtoseconds until each gradient can be ready, the forward first. tensors: in gradient-ready order, each with whether
    it must stay uncompressed. plain, coded: the options of uncompressed buckets, and of compressed ones by spec.
    """
    ready_us = [time / FS_PER_US for time in after]
    bound = ready_us[-1]
    for link in (INTER, INTRA):
        ways: list[tuple[Spec, float, tuple[float, float, float]]] = []
        for spec in (Identity(), *specs):
            options = coded[spec] if spec.encodes else plain
            ways += [(spec, *way) for way in pricer.link_loads(options, spec.rounds, link)]
        known: dict[tuple[object, ...], float] = {}
        least = []
        for tensor, exempt in tensors:
            key = (tensor.shape, tensor.dtype, exempt)
            if key not in known:
                allowed = [
                    spec for spec in (Identity(), *specs) if not exempt or not spec.encodes or spec.carries_uncompressed
                ]
                sizes = {spec: _least_bytes(tensor, spec, exempt) for spec in allowed}
                known[key] = min(
                    sum(factor * size for factor, size in zip(factors, sizes[spec][:3], strict=True))
                    for spec, _, factors in ways
                    if spec in sizes
                )
            least.append(known[key])
        latency_us = min(latency for _, latency, _ in ways)
        still = list(accumulate(reversed(least)))[::-1]
        bound = max(bound, *(r + s + latency_us for r, s in zip(ready_us[1:], still, strict=True)))
    for place in _latest_and_largest(tensors):
        tensor, exempt = tensors[place]
        quickest = min(pricer.sequence_us(option, Identity(), _least_bytes(tensor, Identity())) for option in plain)
        for spec in [spec for spec in specs if not exempt or spec.carries_uncompressed]:
            size = _least_bytes(tensor, spec, exempt)
            quickest = min([quickest, *(pricer.sequence_us(option, spec, size) for option in coded[spec])])
        bound = max(bound, ready_us[place + 1] + quickest)
    return bound * (1 - 1e-12)


def _latest_and_largest(tensors: Sequence[tuple[TensorProfile, bool]]) -> list[int]:
    """Tensors than which none that is ready later is larger, the last four of them; exempt ones apart."""
    found: dict[bool, list[int]] = {True: [], False: []}
    largest = {True: -1, False: -1}
    for place in reversed(range(len(tensors))):
        tensor, exempt = tensors[place]
        if tensor.nbytes > largest[exempt] and len(found[exempt]) < _LATEST:
            largest[exempt] = tensor.nbytes
            found[exempt].append(place)
    return found[True] + found[False]


def _least_bytes(tensor: TensorProfile, spec: Spec, exempt: bool = False) -> Bytes:
    """What the tensor adds to a bucket's Bytes, at least."""
    size = bytes_of([], spec, [tensor]) if exempt and spec.encodes else bytes_of([tensor], spec)
    first, later = (max(0.0, nbytes - _SHARED_BYTES) for nbytes in (size.first, size.later))
    return size._replace(first=first, later=later)
