"""Measures the links between ranks: times of exchanges and all-reduces by size, and a line through the times.

Exchanges are those of a step: on the lane's wire, or else announced first and sent without pause, so that the initial burst of a
rate limit does not hide the rate. All ranks exchange at once, as in a step. All ranks get the times of the slowest rank, so all
stop at the same size.

On a machine that is busy with other programs a rank waits for a processor before it can hand more bytes to the link, which
stands still meanwhile: a link of 100 Mb/s then shows half of that. Linux counts these waits, so batches with longer ones do not
count, and a link that was measured with waits alone has a problem.
"""

import hashlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from gradwire.collectives import AllReduce
from gradwire.core import AT_ONCE, FAR_US, Cluster, Made, waited_ns
from gradwire.core import Link as ClusterLink
from gradwire.costs import Fit, fit_line, fit_link, us_per_byte
from gradwire.errors import FormatError, StepStateError
from gradwire.profiler.clock import Clock
from gradwire.transport import Grid, Lane, Link, Meter, Operations, transfer

SIZES = tuple(1024 * 4**power for power in range(8))
"""Bytes of a message: 1 KB to 16 MB."""
DEVICE_SIZES = (*SIZES, 4 * SIZES[-1])
"""Bytes of a message between GPUs, up to 64 MB: on fast links a smaller one takes as long as its launch."""
SECONDS = 1.0
"""Default time for one link, in seconds."""
ENOUGH_BYTES, DEVICE_ENOUGH_BYTES, DDP_ENOUGH_BYTES = 2**20, 2**24, 2**22
PATIENCE = 4
"""Factor by which a link's time may grow until a message of `ENOUGH_BYTES` was sent, of `DEVICE_ENOUGH_BYTES` between GPUs, or of
`DDP_ENOUGH_BYTES` in DistributedDataParallel's all-reduce: only large ones show the rate. Those of DDP are buckets of 25 MB."""
BATCHES = 3
"""Measurements of each size, each of several messages if they are short."""
_FAR_MESSAGES, _FAR_STEPS = 24, 3
"""A far link, whose latency alone would take the whole time for all sizes, gets the time of so many messages more. The next size
is so many sizes larger at most."""
_BATCH_PART = 1 / (4 * BATCHES * len(SIZES))
_MOST_MESSAGES = 50
_SPREAD_BYTES = 2**16
"""The least bytes of a message that is spread over several lanes: the second size of a far link. On one lane that takes so long
that no larger one is measured."""
_PARTS_BYTES, _APART_BYTES = 64 * 2**20, 512
"""The memory for the parts of all ranks, or for one part if that is larger; and the least distance between parts. Parts at one
address would have one checksum, which a wire finds once for all."""
_COPIED_BYTES = 4 * 2**20
"""Bytes of a copy: more than a core's own caches hold, like the gradients of a model."""
SPIN_S = 0.03
"""Processor time for which all ranks compute together, to find how many share a processor."""
_SHARED_FROM = 1.15
"""Elapsed time over processor time from which ranks share processors. Below it is noise."""
_THREADS = 3
"""Threads of a rank that work in a step: the one that computes, and two lanes. Lanes over far links mostly wait."""
_HASHED = bytes(2**17)
"""Bytes that a thread hashes without Python's lock."""
_BURST = 8
"""Messages to each rank that are sent without waiting, to find what a further message takes."""
_BURST_BYTES = 1024
_BURSTS, _BURST_PART = 5, 0.1
"""Most bursts, and their part of the time for a link."""
_DISTURBED = 6.0
"""A size is measured again if it takes more than so many times as long as the quarter of its bytes."""
_WAIT_MARGIN, _WAITED_FROM = 0.1, 0.3
"""The part of its time that a rank may wait for a processor, beyond that of the best batch, in a batch that counts; and the part
from which the link has a problem."""
_TOO_FAST = 2.0
"""An all-reduce that seems so many times as fast as exchanges over the same links was short enough for a buffer of the network.
Then the rate of exchanges counts."""
_TAG = 1_000_000
"""First tag of the measured messages, higher than the tags of steps."""

Times = dict[str, list[tuple[float, float]]]
"""Measured points by link. intra, inter, allreduce, ddp: (bytes that a rank holds before, microseconds). cpu: (bytes,
processor time of an all-reduce, including the copies of its gradients into the bucket's memory and back). ddp cpu: the same of
DistributedDataParallel's all-reduce. intra cpu, inter cpu: (bytes, processor time of an exchange). intra message, inter message:
(0, microseconds of each further message that is sent without waiting). intra waits, inter waits: (bytes, the part of its time
that a rank waited for a processor)."""


_EXCHANGES = ("intra", "inter")
"""The links of exchanges. The others are of all-reduces."""


class MeasuredLinks(NamedTuple):
    """A cluster, and for each link (intra, inter, allreduce, ddp) the fit."""

    cluster: Cluster
    fits: dict[str, Fit]
    problems: list[str]
    """A warning for each bad fit."""


def measure_links(
    link: Link,
    grid: Grid,
    device: torch.device,
    seconds: float = SECONDS,
    process_group: dist.ProcessGroup | None = None,
    far_lanes: Sequence[Lane] = (),
) -> Times:
    """Measure every kind of link in this cluster for about `seconds` each. Collective, on a lane.

    process_group: the group of DistributedDataParallel. Its all-reduce on CPUs is measured too if it is given. far_lanes: those
    that share a far link with this one. Large messages are spread over all of them.
    """
    times: Times = {}
    if grid.most_ranks > 1:
        _measure_exchanges(times, "intra", link, grid, device, seconds, far_lanes if grid.nodes == 1 else ())
    if grid.nodes > 1:
        _measure_exchanges(times, "inter", link, grid, device, seconds, far_lanes, grid.place_of(link.rank) == 0)
    sums = _spread(lambda each: _AllReduces(each, grid, device), link, far_lanes)
    times["allreduce"], cpu_times, _ = _sweep(link, sums, 1, device, seconds)
    if device.type != "cpu":
        return times
    (copy_us_per_byte,) = _slowest(link, [_copies_us_per_byte()], device)
    times["cpu"] = [(nbytes, us + nbytes * copy_us_per_byte) for nbytes, us in cpu_times]
    if process_group is not None:
        times["ddp"], cpu_times, _ = _sweep(link, _GroupAllReduces(process_group), 1, device, 2 * seconds, DDP_ENOUGH_BYTES)
        times["ddp cpu"] = [(nbytes, us + nbytes * copy_us_per_byte) for nbytes, us in cpu_times]
    return times


def _together(ranks: int) -> int:
    """How many of these ranks exchange with each other: all, or parts of them, since more ranks have few connections.

    >>> [_together(ranks) for ranks in (2, 16, 17, 32, 100)]
    [2, 16, 9, 16, 15]
    """
    return -(-ranks // -(-ranks // AT_ONCE))


def _measure_exchanges(
    times: Times,
    name: str,
    link: Link,
    grid: Grid,
    device: torch.device,
    seconds: float,
    far_lanes: Sequence[Lane] = (),
    takes_part: bool = True,
) -> None:
    """`takes_part`: whether this rank sends. Between nodes one rank of each does: ranks of a node share the rate of one flow."""
    group, ranks = grid.group(name), _together(max(map(len, grid.groups(name))))
    first = group.index(link.rank) // ranks * ranks
    own = group[first : first + ranks] if takes_part else ()
    exchanges = _spread(lambda each: _Exchanges(each, own, device), link, far_lanes)
    times[name], cpu_times, times[f"{name} waits"] = _sweep(link, exchanges, ranks, device, seconds)
    if device.type == "cpu":
        times[f"{name} cpu"] = cpu_times
        first_us = min(us for _, us in times[name])
        repeats = max(1, min(_BURSTS, round(1e6 * seconds * _BURST_PART / first_us)))
        times[f"{name} message"] = [(0.0, _message_us(link, exchanges, ranks, device, repeats))]


def measure_processors(link: Link, ranks_per_node: int, seconds: float = SPIN_S) -> float | None:
    """Measure how many processors a node's ranks share: all ranks compute at the same time. Collective, on a lane.

    If each rank has a processor, more threads of each rank compute. Returns None if a rank has one to itself, and its other
    threads have none. seconds: processor time of each thread.
    """
    longer = _longer(link, 1, seconds)
    if longer > _SHARED_FROM:
        return ranks_per_node / longer
    processors = _THREADS / _longer(link, _THREADS, seconds)
    return ranks_per_node * processors if processors > _SHARED_FROM else None


def _longer(link: Link, threads: int, seconds: float) -> float:
    """How many times as long as alone a thread computes if so many threads of each rank do, on the slowest rank."""
    device = torch.device("cpu")
    _slowest(link, [0.0], device)  # wait for all ranks
    began = time.perf_counter()
    others = [threading.Thread(target=_hash_for, args=(seconds,)) for _ in range(threads - 1)]
    for other in others:
        other.start()
    _hash_for(seconds)
    for other in others:
        other.join()
    (longer,) = _slowest(link, [(time.perf_counter() - began) / seconds], device)
    return longer


def _hash_for(seconds: float) -> None:
    """Compute for so much processor time of this thread, without Python's lock."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.sha256(_HASHED)


def measured_links(times: Times, grid: Grid, unknown_gbps: float | None = None) -> MeasuredLinks:
    """Fit lines to the times. A missing kind of link gets the numbers of the other kind.

    unknown_gbps: the rate of a link that is too fast to show a rate. Without it such a link raises StepStateError.
    """
    links: dict[str, ClusterLink] = {}
    fits: dict[str, Fit] = {}
    problems: list[str] = []
    most = grid.most_ranks
    of_ranks = {"intra": _together(most), "inter": _together(grid.nodes)}
    of_ranks |= dict.fromkeys(("allreduce", "ddp"), grid.nodes * most)  # as prices count them
    last = "inter" if grid.nodes > 1 else "intra"
    """The link of the messages of all-reduces. Exchanges come first in the times."""
    for name, points in times.items():
        if name not in of_ranks:
            continue
        ranks, exchange = of_ranks[name], name in _EXCHANGES
        word, per_node = ("alltoall", 1) if exchange else ("allreduce", most)
        routing = "wires" if "cpu" in times and name != "ddp" else "direct"
        message_us = _message_of(times, name if exchange else last)
        try:
            links[name], fits[name] = fit_link(points, word, ranks, routing, per_node)
            if message_us is not None:  # without its bytes
                message_us = max(0.0, message_us - _BURST_BYTES * us_per_byte(links.get(last, links[name])))
                with suppress(FormatError):  # the rest is noise: all messages wait
                    links[name], fits[name] = fit_link(points, word, ranks, routing, per_node, message_us)
            if exchange:
                most_gbps = _gbps_of_largest(points, 1 - 1 / ranks)
                links[name] = replace(links[name], gbps=min(links[name].gbps, most_gbps))
        except FormatError as error:
            if name == "ddp":
                continue  # then it counts as gradwire's all-reduce
            if unknown_gbps is not None:
                links[name] = ClusterLink(min(us for _, us in points), unknown_gbps)
                continue
            raise StepStateError(f"latency and rate of the {name} link cannot be found from its times: {error}") from error
        if (waits := times.get(f"{name} waits")) and waits[-1][1] >= _WAITED_FROM:
            problems.append(
                f"while the {name} link was measured, a rank waited for a processor for {100 * waits[-1][1]:.0f} % of the time, "
                "so the link may be faster than what was measured. Profile again while nothing else uses the processors."
            )
        if fits[name].problem:
            fit = fits[name]
            problems.append(
                f"the times of the {name} link do not follow {fit.alpha_us:.0f} us + bytes at {fit.gbps:.3g} Gb/s "
                f"(R2 {fit.r2:.3f}, worst error {100 * fit.worst_relative_error:.0f} %): {fit.problem}. Predictions will have "
                "errors of this size. Profile again while nothing else uses the link and the processors."
            )
    for name in ("allreduce", "ddp") if "inter" in links and most == 1 else ():
        if name in links and links[name].gbps > _TOO_FAST * links["inter"].gbps:
            links[name] = replace(links[name], gbps=links["inter"].gbps)
    for name, key in {"allreduce": "cpu", "ddp": "ddp cpu", **{each: f"{each} cpu" for each in _EXCHANGES}}.items():
        with suppress(FormatError):  # a slow machine measured one size only, which leaves this time unknown
            cpu = fit_line(times.get(key, []))
            if name not in links:
                continue
            messages, sent = (of_ranks[name] - 1, 1 - 1 / of_ranks[name]) if name in _EXCHANGES else (1, 1.0)
            links[name] = replace(links[name], cpu_us=cpu.alpha_us / messages, cpu_us_per_byte=cpu.us_per_byte / sent)
    cluster = Cluster(
        nodes=grid.nodes,
        ranks_per_node=most,
        uneven=grid.ranks_per_node_if_even is None,
        intra=links.get("intra") or links["inter"],
        inter=links.get("inter") or links["intra"],
        allreduce=links["allreduce"],
        ddp=links.get("ddp"),
        made=Made.now(),
    )
    return MeasuredLinks(cluster, fits, problems)


def _gbps_of_largest(points: Sequence[tuple[float, float]], sent: float) -> float:
    """The rate of the largest exchanges, in gigabits per second: their shortest time, less that of the smallest ones. The higher
    one of the two largest sizes, since the link may have stood still in one.

    Most bytes of a step are in large messages, and a line through noisy times may promise these a rate that no link had.
    sent: the part of the bytes held that a rank sends.

    >>> round(_gbps_of_largest([(0, 50.0), (1000, 51.0), (1000, 53.0)], sent=0.5), 9)
    4.0
    """
    (least, *larger), times = sorted({nbytes for nbytes, _ in points}), dict[float, float]()
    for nbytes, us in points:
        times[nbytes] = min(us, times.get(nbytes, us))
    longer_us = {nbytes: times[nbytes] - times[least] for nbytes in larger[-2:]}
    return max((8 * sent * (n - least) / (1000 * us) if us > 0 else math.inf for n, us in longer_us.items()), default=math.inf)


def _message_of(times: Times, name: str) -> float | None:
    points = times.get(f"{name} message")
    return points[0][1] if points else None


class _Exchanges:
    """Exchanges among the ranks of a group. Other ranks take part without sending."""

    def __init__(self, link: Link, group: Sequence[int], device: torch.device) -> None:
        self._link, self._device = link, device
        others = [rank for rank in group if rank != link.rank] if link.rank in group else []
        # begin with the next rank, so that not all send to the first one first
        self._others = sorted(others, key=lambda rank: (rank - link.rank) % link.world_size)
        self._on_wire = link.wire is not None and device.type == "cpu"

    def announce(self, nbytes: int, messages: int, at_once: int = 1) -> None:
        """Announce `messages` exchanges of `nbytes` bytes, each of `at_once` messages to each rank."""
        received, self._sent = self._parts(nbytes), self._parts(nbytes)
        if self._on_wire:
            self._operations = made = Operations()
            for rank in self._others * at_once:
                made.send(rank, self._sent[rank], _TAG)
            for rank in self._others * at_once:
                made.receive(rank, received[rank], _TAG)
            made.flush()
            return
        # a host-staged lane keeps a list of operations for each tag
        numbers = [_TAG if self._link.pinned is not None else _TAG + at for at in range(messages * at_once)]
        expected = [self._link.expect(number, received, checked=False) for number in numbers]
        self._exchanges = iter([expected[at : at + at_once] for at in range(0, len(expected), at_once)])

    def _parts(self, nbytes: int) -> list[torch.Tensor]:
        """The part of each rank, in one memory. Their values do not matter, so parts overlap where they would take too much."""
        others = len(self._others)
        apart = max(1, min(nbytes, (_PARTS_BYTES - nbytes) // max(1, others - 1)) // _APART_BYTES) * _APART_BYTES
        memory = torch.zeros(nbytes + apart * (others - 1) if others else 0, dtype=torch.uint8, device=self._device)
        parts = [memory[:0]] * self._link.world_size
        for at, rank in enumerate(self._others):
            parts[rank] = memory[apart * at :][:nbytes]
        return parts

    def perform(self) -> None:
        """Perform the next exchange. Returns when it has ended on this rank."""
        if self._on_wire:
            assert self._link.wire is not None
            if self._others:
                self._link.wire.run(self._operations, Meter())
            return
        exchanges = next(self._exchanges)
        for exchange in exchanges:
            exchange.send(self._sent)
        for exchange in exchanges:
            for rank in self._others:
                exchange.wait(rank)
            exchange.finish()


def _message_us(link: Link, exchanges: "_Traffic", ranks: int, device: torch.device, repeats: int) -> float:
    """Return what each further message takes that a rank sends without waiting, in microseconds, on the slowest rank."""
    clock, medians = Clock(device), []
    for at_once in (1, _BURST):
        exchanges.announce(_BURST_BYTES, repeats, at_once)
        times = []
        for _ in range(repeats):
            _slowest(link, [0.0], device)  # wait for all ranks
            began = clock.mark()
            exchanges.perform()
            times.append(clock.us(began, clock.mark()))
        medians.append(statistics.median(times))
    (us,) = _slowest(link, [(medians[1] - medians[0]) / ((_BURST - 1) * (ranks - 1))], device)
    return max(0.0, us)


class _GroupAllReduces:
    """All-reduces by a process group, as DistributedDataParallel's. Same interface as `_Exchanges`."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group

    def announce(self, nbytes: int, messages: int, at_once: int = 1) -> None:
        self._tensor = torch.zeros(nbytes // 4, dtype=torch.float32)

    def perform(self) -> None:
        with transfer():
            dist.all_reduce(self._tensor, group=self._group)


class _AllReduces:
    """All-reduces over all ranks, performed like a plan's all-reduces. Same interface as `_Exchanges`."""

    def __init__(self, link: Link, grid: Grid, device: torch.device) -> None:
        self._link, self._grid, self._device = link, grid, device

    def announce(self, nbytes: int, messages: int, at_once: int = 1) -> None:
        self._tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=self._device)
        self._sum = AllReduce(self._tensor, self._grid)

    def perform(self) -> None:
        if self._device.type == "cpu":
            self._sum.run(0, self._link, Meter(), None)
            return
        if self._link.pinned is not None:
            streams = self._link.streams
            self._sum.run(0, self._link, Meter(), streams.mark())
            with streams.decoding():
                done = streams.mark()
            streams.wait(done)
            return
        with transfer():
            self._link.all_reduce(self._tensor).wait()


class _Spread:
    """Large messages in parts, one on each lane at the same time, as pieces of a step are. Same interface as `_Exchanges`.

    BBR learns the rate of a connection from the time in which others share the link. Of eight lanes over 100 Mb/s one alone then
    sends at 60."""

    def __init__(self, own: _Exchanges | _AllReduces, others: Sequence[tuple[Lane, _Exchanges | _AllReduces]]) -> None:
        """own: on this thread's lane. others: on further lanes."""
        self._own, self._others, self._used = own, others, others

    def announce(self, nbytes: int, messages: int, at_once: int = 1) -> None:
        self._used = self._others if nbytes >= _SPREAD_BYTES else ()
        for traffic in (self._own, *(traffic for _, traffic in self._used)):
            traffic.announce(nbytes // (1 + len(self._used)), messages, at_once)

    def perform(self) -> None:
        under_way = [lane.submit(partial(_perform, traffic)) for lane, traffic in self._used]
        try:
            self._own.perform()
        finally:
            wait(under_way)  # after an error too: no lane is still at work for a measurement that is over
        for each in under_way:
            each.result()


def _perform(traffic: _Exchanges | _AllReduces, link: Link) -> None:
    traffic.perform()


def _spread(make: Callable[[Link], _Exchanges | _AllReduces], link: Link, far_lanes: Sequence[Lane]) -> "_Traffic":
    """Traffic on a lane, or over this lane and others that share a far link with it."""
    return _Spread(make(link), [(lane, make(lane.link)) for lane in far_lanes]) if far_lanes else make(link)


_Traffic = _Exchanges | _AllReduces | _GroupAllReduces | _Spread


def _sweep(
    link: Link, traffic: _Traffic, held: int, device: torch.device, seconds: float, enough_bytes: int | None = None
) -> tuple[list[tuple[float, float]], list[tuple[float, float]], list[tuple[float, float]]]:
    """Measure messages of ascending size until the next size would take too long.

    On a far link few sizes are measured, since each takes its latency. The smallest and the largest one count: TCP sends what is
    between them in several round trips until it knows the rate. Messages come in pairs there: a rank that begins late waits less
    for one of a pair, and more for the other.

    Returns three lists. Two are of (bytes held, microseconds of a message), of elapsed time and of processor time. The third is
    of (bytes held, the part of its time that a rank waited for a processor).
    """
    points: list[tuple[float, float]] = []
    cpu_points: list[tuple[float, float]] = []
    waits: list[tuple[float, float]] = []
    sizes, enough = (SIZES, ENOUGH_BYTES) if device.type == "cpu" else (DEVICE_SIZES, DEVICE_ENOUGH_BYTES)
    enough = enough_bytes or enough
    first_us = min(_run(link, traffic, sizes[0], 1, device).us)
    is_far = first_us >= FAR_US and (1 + BATCHES) * len(sizes) * first_us > 1e6 * seconds
    latency_us, fewest = (first_us, 2) if is_far else (0.0, 1)
    spent_us, expected_us, at = latency_us, first_us, 0
    before_us, again = math.inf, False
    while at < len(sizes):
        nbytes = sizes[at]
        messages = min(_MOST_MESSAGES, max(fewest, round(1e6 * seconds * _BATCH_PART / expected_us)))
        measured = _run(link, traffic, nbytes, messages, device)
        if not (is_far or again) and min(measured.us) > _DISTURBED * before_us:
            spent_us, again = spent_us + (1 + BATCHES * messages) * statistics.median(measured.us), True
            continue
        before_us, again = min(measured.us), False
        points += [(float(held * nbytes), us) for us in (measured.us if is_far else measured.calm_us)]
        cpu_points += [(float(held * nbytes), us) for us in measured.cpu_us]
        waits.append((float(held * nbytes), min(measured.waits)))
        if is_far and not at:
            latency_us = min(measured.us)
        spent_us += (1 + BATCHES * messages) * statistics.median(measured.us)
        left_us = 1e6 * seconds * (1 if nbytes >= enough else PATIENCE) + _FAR_MESSAGES * latency_us - spent_us
        most = max(1, min(_FAR_STEPS, sizes.index(enough) - at)) if is_far else 1
        for steps in range(most, 0, -1):
            expected_us = latency_us + 4**steps * max(0.0, min(measured.us) - latency_us)
            if (1 + BATCHES * fewest) * expected_us <= left_us:
                break
        else:
            break
        at += steps
    if is_far:
        ends = {float(held * sizes[0]), float(held * nbytes)}
        points, cpu_points, waits = ([each for each in of if each[0] in ends] for of in (points, cpu_points, waits))
    return points, cpu_points, waits


class _Batches(NamedTuple):
    """For each batch, the numbers of the slowest rank."""

    us: list[float]
    """Elapsed microseconds of a message."""
    cpu_us: list[float]
    """Processor microseconds of a message."""
    waits: list[float]
    """The part of its time that a rank waited for a processor."""

    @property
    def calm_us(self) -> list[float]:
        """The elapsed times of the batches in which ranks waited for processors about as little as in the best one.

        >>> _Batches([5.0, 9.0, 6.0], [], [0.1, 0.5, 0.15]).calm_us
        [5.0, 6.0]
        """
        most = min(self.waits) + _WAIT_MARGIN
        return [us for us, waited in zip(self.us, self.waits, strict=True) if waited <= most]


def _run(link: Link, traffic: _Traffic, nbytes: int, messages: int, device: torch.device) -> _Batches:
    """Measure batches of messages, without the first message."""
    clock = Clock(device)
    traffic.announce(nbytes, 1 + BATCHES * messages)
    _slowest(link, [0.0], device)  # wait for all ranks
    traffic.perform()
    moments, cpu_ns, waits_ns = [clock.mark()], [time.process_time_ns()], [waited_ns()]
    for _ in range(BATCHES):
        for _ in range(messages):
            traffic.perform()
        moments.append(clock.mark())
        cpu_ns.append(time.process_time_ns())
        waits_ns.append(waited_ns())
    us = [max(1e-3, clock.us(*both)) for both in pairwise(moments)]
    own = [each / messages for each in us]
    own += [max(1, end - start) / 1e3 / messages for start, end in pairwise(cpu_ns)]
    own += [(end - start) / 1e3 / each for (start, end), each in zip(pairwise(waits_ns), us, strict=True)]
    most = _slowest(link, own, device)
    return _Batches(most[:BATCHES], most[BATCHES : 2 * BATCHES], most[2 * BATCHES :])


def _copies_us_per_byte() -> float:
    """Return the processor time of copying gradients into a bucket and back, in microseconds per byte."""
    gradient, bucket = (torch.ones(_COPIED_BYTES // 4) for _ in range(2))
    began = time.perf_counter()
    bucket.copy_(gradient)
    gradient.copy_(bucket)
    return 1e6 * (time.perf_counter() - began) / _COPIED_BYTES


def _slowest(link: Link, times: list[float], device: torch.device) -> list[float]:
    """Return the maximum of each time over ranks."""
    most = torch.tensor(times, dtype=torch.float64, device=device)
    with transfer():
        link.all_reduce(most, dist.ReduceOp.MAX).wait()
    return [float(us) for us in most]
