"""Measures the speed of links: round trip and rate between each rank and the next rank of the ring.

One rank of a pair leads: it sends a header (a ping, a number of bytes, or the end), and the other rank answers each message.
The rate of a long message excludes one round trip.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import msgspec

SECONDS = 0.5
"""Time for measuring one direction, in seconds."""
ALL_SECONDS = 20.0
"""Limit for all directions together, in seconds, if the links are fast enough."""
FIRST_BYTES, MOST_BYTES = 64 * 1024, 64 * 2**20
_ROUND_TRIPS = 6
"""A measured message takes at least so many round trips: TCP finds the rate of a far link in the first ones."""
_PING, _END = -1, 0


class Direction(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement of one direction of a link, by its source. `problem` is the reason of a failed measurement."""

    source: int
    destination: int
    round_trip_us: float | None = None
    gbps: float | None = None
    """The payload rate, without headers."""
    problem: str | None = None


def rate_text(gbps: float) -> str:
    """
    >>> rate_text(0.4781), rate_text(12.34), rate_text(0.0098)
    ('478 Mb/s', '12.3 Gb/s', '9.8 Mb/s')
    """
    if gbps >= 0.9995:
        return f"{gbps:.0f} Gb/s" if gbps >= 99.95 else f"{gbps:.3g} Gb/s"
    mbps = 1e3 * gbps
    return f"{mbps:.0f} Mb/s" if mbps >= 9.95 else f"{mbps:.2g} Mb/s"


class MeasuredLink:
    """Messages between this rank and a peer, in the default group. Every call ends within its timeout or raises."""

    def __init__(self, peer: int) -> None:
        import torch
        import torch.distributed as dist

        self._send, self._receive = partial(dist.send, dst=peer), partial(dist.recv, src=peer)
        self._header = torch.zeros(1, dtype=torch.int64)
        self._bytes = torch.zeros(MOST_BYTES, dtype=torch.uint8)

    def put(self, number: int) -> None:
        self._header[0] = number
        self._send(self._header)

    def take(self) -> int:
        self._receive(self._header)
        return int(self._header)

    def send(self, size: int) -> None:
        self._send(self._bytes[:size])

    def receive(self, size: int) -> None:
        self._receive(self._bytes[:size])


def lead(wire: MeasuredLink, seconds: float) -> tuple[float, float]:
    """Measure the link to a following peer: medians of the round trip (us) and of the rate (Gb/s)."""

    def ping() -> None:
        wire.put(_PING)
        wire.take()

    def transfer(size: int) -> None:
        wire.put(size)
        wire.send(size)
        wire.take()

    ping()
    transfer(FIRST_BYTES)
    round_trip_s = statistics.median(_times(ping, seconds / 10, 3))
    size, enough_s = FIRST_BYTES, max(seconds / 4, _ROUND_TRIPS * round_trip_s)
    while (taken_s := _times(partial(transfer, size), 0, 1)[0]) < enough_s and size < MOST_BYTES:
        size = min(MOST_BYTES, int(size * min(8.0, max(2.0, enough_s / taken_s))))
    least = 2 if enough_s > seconds / 4 else 0
    long_s = statistics.median([taken_s, *_times(partial(transfer, size), seconds - taken_s, least)])
    wire.put(_END)
    return round_trip_s * 1e6, size * 8 / max(long_s - round_trip_s, 1e-9) / 1e9


def follow(wire: MeasuredLink) -> None:
    """Answer a leading peer until its end message."""
    number = wire.take()
    while number != _END:
        if number != _PING:
            wire.receive(number)
        wire.put(_PING)
        number = wire.take()


def _times(call: Callable[[], None], seconds: float, least: int = 0) -> list[float]:
    """Return the times of calls that take about `seconds` together."""
    times: list[float] = []
    while len(times) < least or (sum(times) < seconds and len(times) < 1000):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def ring_links(world_size: int) -> list[tuple[int, int]]:
    """Return the links of the ring: (0, 1), (1, 2), ..., and with three ranks or more, the link back to 0."""
    if world_size < 3:
        return [(0, 1)] * (world_size - 1)
    return [(rank, (rank + 1) % world_size) for rank in range(world_size)]


def seconds_each(world_size: int) -> float:
    """Return the time for measuring one direction, in seconds. It is shorter in large worlds."""
    return min(SECONDS, ALL_SECONDS / (2 * max(1, len(ring_links(world_size)))))


def measure_link(peer: int, first: bool, seconds: float) -> tuple[float, float]:
    """Measure the round trip (us) and the rate (Gb/s) to a peer. Both ranks call this; one of them is `first`.

    Raises the backend's error if a message does not arrive in time.
    """
    wire = MeasuredLink(peer)
    if not first:
        follow(wire)
    measured = lead(wire, seconds)
    if first:
        follow(wire)
    return measured
