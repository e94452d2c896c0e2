"""Measures the links between ranks: times of exchanges and all-reduces by size, and a line through the times.

Exchanges are announced first and sent without pause, as in a step, so that the initial burst of a rate limit does not
hide the rate. All ranks get the times of the slowest rank, so all stop at the same size.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

from gradwire.collectives import AllReduce
from gradwire.core import Cluster, Made
from gradwire.core import Link as ClusterLink
from gradwire.costs import Fit, fit_line, fit_link
from gradwire.errors import FormatError, StepStateError
from gradwire.profiler.clock import Clock
from gradwire.transport import Grid, Link, Meter, transfer

SIZES = tuple(1024 * 4**power for power in range(8))
"""Bytes of a message: 1 KB to 16 MB."""
SECONDS = 1.0
"""Default time for one link, in seconds."""
ENOUGH_BYTES = 2**20
PATIENCE = 4
"""Factor by which a link's time may grow until a message of `ENOUGH_BYTES` was sent: only large ones show the rate."""
BATCHES = 3
"""Measurements of each size, each of several messages if they are short."""
_BATCH_PART = 1 / (4 * BATCHES * len(SIZES))
_MOST_MESSAGES = 50
_COPIED_BYTES = 4 * 2**20
"""Bytes of a copy: more than a core's own caches hold, like the gradients of a model."""
_SPIN_S = 0.03
"""Processor time for which all ranks compute together, to find how many share a processor."""
_SHARED_FROM = 1.15
"""Elapsed time over processor time from which ranks share processors. Below it is noise."""
_TAG = 1_000_000
"""First tag of the measured messages, higher than the tags of steps."""

Times = dict[str, list[tuple[float, float]]]
"""Measured points by link. intra, inter, allreduce: (bytes that a rank holds before, microseconds). cpu: (bytes,
processor time of an all-reduce, including the copies of its gradients into the bucket's memory and back)."""


class MeasuredLinks(NamedTuple):
    """A cluster, and for each link (intra, inter, allreduce) the fit."""

    cluster: Cluster
    fits: dict[str, Fit]
    problems: list[str]
    """A warning for each bad fit."""


def measure_links(link: Link, grid: Grid, device: torch.device, seconds: float = SECONDS) -> Times:
    """Measure every kind of link in this cluster for about `seconds` each. Collective, on a lane."""
    times: Times = {}
    if grid.ranks_per_node > 1:
        exchanges = _Exchanges(link, grid.group("intra"), device)
        times["intra"], _ = _sweep(link, exchanges, grid.ranks_per_node, device, seconds)
    if grid.nodes > 1:
        # one rank of each node: all ranks of a node share the rate of one flow
        group = grid.group("inter") if grid.place_of(link.rank) == 0 else ()
        times["inter"], _ = _sweep(link, _Exchanges(link, group, device), grid.nodes, device, seconds)
    times["allreduce"], cpu_times = _sweep(link, _AllReduces(link, grid, device), 1, device, seconds)
    if device.type == "cpu":
        (us_per_byte,) = _slowest(link, [_copies_us_per_byte()], device)
        times["cpu"] = [(nbytes, us + nbytes * us_per_byte) for nbytes, us in cpu_times]
    return times


def measure_processors(link: Link, ranks_per_node: int) -> float | None:
    """Measure how many processors a node's ranks share: all ranks compute at the same time. Collective, on a lane.

    Returns None if each rank has one to itself.
    """
    device = torch.device("cpu")
    _slowest(link, [0.0], device)  # wait for all ranks
    began, until = time.perf_counter(), time.thread_time() + _SPIN_S
    while time.thread_time() < until:
        pass
    (longer,) = _slowest(link, [(time.perf_counter() - began) / _SPIN_S], device)
    return ranks_per_node / longer if longer > _SHARED_FROM else None


def measured_links(times: Times, grid: Grid, unknown_gbps: float | None = None) -> MeasuredLinks:
    """Fit lines to the times. A missing kind of link gets the numbers of the other kind.

    unknown_gbps: the rate of a link that is too fast to show a rate. Without it such a link raises StepStateError.
    """
    links: dict[str, ClusterLink] = {}
    fits: dict[str, Fit] = {}
    problems: list[str] = []
    for name, points in times.items():
        if name == "cpu":
            continue
        ranks = {"intra": grid.ranks_per_node, "inter": grid.nodes, "allreduce": grid.world_size}[name]
        word, per_node = ("allreduce", grid.ranks_per_node) if name == "allreduce" else ("alltoall", 1)
        try:
            links[name], fits[name] = fit_link(points, word, ranks, "wires" if "cpu" in times else "direct", per_node)
        except FormatError as error:
            if unknown_gbps is not None:
                links[name] = ClusterLink(min(us for _, us in points), unknown_gbps)
                continue
            raise StepStateError(f"latency and rate of the {name} link cannot be found from its times: {error}") from error
        if fits[name].problem:
            fit = fits[name]
            problems.append(
                f"the times of the {name} link do not follow {fit.alpha_us:.0f} us + bytes at {fit.gbps:.3g} Gb/s "
                f"(R2 {fit.r2:.3f}, worst error {100 * fit.worst_relative_error:.0f} %): {fit.problem}. Predictions will have "
                "errors of this size. Profile again while nothing else uses the link and the processors."
            )
    with suppress(FormatError):  # a slow machine measured one size only, which leaves this time unknown
        cpu = fit_line(times.get("cpu", []))
        links["allreduce"] = replace(links["allreduce"], cpu_us=cpu.alpha_us, cpu_us_per_byte=cpu.us_per_byte)
    cluster = Cluster(
        nodes=grid.nodes,
        ranks_per_node=grid.ranks_per_node,
        intra=links.get("intra") or links["inter"],
        inter=links.get("inter") or links["intra"],
        allreduce=links["allreduce"],
        made=Made.now(),
    )
    return MeasuredLinks(cluster, fits, problems)


class _Exchanges:
    """Exchanges among the ranks of a group. Other ranks take part without sending."""

    def __init__(self, link: Link, group: Sequence[int], device: torch.device) -> None:
        self._link, self._group, self._device = link, group, device

    def announce(self, nbytes: int, messages: int) -> None:
        """Announce `messages` messages of `nbytes` bytes."""
        received, self._sent = self._parts(nbytes), self._parts(nbytes)
        self._exchanges = iter([self._link.expect(_TAG + number, received, checked=False) for number in range(messages)])

    def _parts(self, nbytes: int) -> list[torch.Tensor]:
        link, member = self._link, self._link.rank in self._group
        sizes = [nbytes * (member and rank in self._group and rank != link.rank) for rank in range(link.world_size)]
        return [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def perform(self) -> None:
        """Perform the next exchange. Returns when it has ended on this rank."""
        exchange = next(self._exchanges)
        exchange.send(self._sent)
        for rank in self._group:
            exchange.wait(rank)
        exchange.finish()


class _AllReduces:
    """All-reduces over all ranks, performed like a plan's all-reduces. Same interface as `_Exchanges`."""

    def __init__(self, link: Link, grid: Grid, device: torch.device) -> None:
        self._link, self._grid, self._device = link, grid, device

    def announce(self, nbytes: int, messages: int) -> None:
        self._tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=self._device)
        self._sum = AllReduce(self._tensor, self._grid)

    def perform(self) -> None:
        if self._device.type == "cpu":
            self._sum.run(0, self._link, Meter(), None)
            return
        with transfer():
            self._link.all_reduce(self._tensor).wait()


_Traffic = _Exchanges | _AllReduces


def _sweep(
    link: Link, traffic: _Traffic, held: int, device: torch.device, seconds: float
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Measure messages of ascending size until the next size would take too long.

    Returns two lists of (bytes held, microseconds of a message): of elapsed time and of processor time.
    """
    points: list[tuple[float, float]] = []
    cpu_points: list[tuple[float, float]] = []
    spent_us, expected_us = 0.0, min(_run(link, traffic, SIZES[0], 1, device)[0])
    for nbytes in SIZES:
        messages = min(_MOST_MESSAGES, max(1, round(1e6 * seconds * _BATCH_PART / expected_us)))
        measured, cpu_us = _run(link, traffic, nbytes, messages, device)
        points += [(float(held * nbytes), us) for us in measured]
        cpu_points += [(float(held * nbytes), us) for us in cpu_us]
        spent_us += (1 + BATCHES * messages) * statistics.median(measured)
        expected_us = 4 * min(measured)
        if spent_us + (1 + BATCHES) * expected_us > 1e6 * seconds * (1 if nbytes >= ENOUGH_BYTES else PATIENCE):
            break
    return points, cpu_points


def _run(link: Link, traffic: _Traffic, nbytes: int, messages: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Return a message's elapsed and processor microseconds in each batch, on the slowest rank, without the first message."""
    clock = Clock(device)
    traffic.announce(nbytes, 1 + BATCHES * messages)
    _slowest(link, [0.0], device)  # wait for all ranks
    traffic.perform()
    moments, cpu_ns = [clock.mark()], [time.process_time_ns()]
    for _ in range(BATCHES):
        for _ in range(messages):
            traffic.perform()
        moments.append(clock.mark())
        cpu_ns.append(time.process_time_ns())
    own = [clock.us(*both) / messages for both in pairwise(moments)]
    own += [max(1, end - start) / 1e3 / messages for start, end in pairwise(cpu_ns)]
    most = _slowest(link, own, device)
    return most[:BATCHES], most[BATCHES:]


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
