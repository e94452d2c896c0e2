"""Measures the errors of the emulated network between sites: round trip, rate in each direction, and loss.

    python -m benchmarks laboratory [--seconds 6]

Needs network namespaces. Two nodes, one at each site, and no library between: sockets alone. A round trip is the median of small
packets that come back, a rate that of one TCP connection after its start, loss that of small packets that are counted.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.common import RESULTS, collected, write
from gradwire.testbed import EmulatedCluster, WideArea, parse_wide_area, permission_problem

PAYLOAD = 1448 / 1514
"""The part of a rate that TCP has for payload."""
CASES = (
    "2ms", "10ms", "50ms", "100ms", "50ms 4ms", "2ms rate 20mbit", "20ms rate 100mbit", "50ms rate 100mbit", "100ms rate 20mbit",
    "10ms rate 500mbit", "20ms up 20mbit down 100mbit", "20ms loss 0.1%", "20ms loss 1%", "20ms loss 5%",
)  # fmt: skip
_PORT = 5555
_START_S = 2.0
"""A connection finds its rate in this time."""


class Found(NamedTuple):
    """One measured value beside what was ordered."""

    wan: str
    what: str
    ordered: float
    measured: float
    late: float
    """The share of frames that the relay sent more than 0.5 ms late."""
    cpu: float
    """Processors that the relay took."""

    @property
    def error(self) -> float:
        return self.measured / self.ordered - 1


def run(arguments: list[str]) -> int:
    """Measure, print and write benchmarks/results/laboratory.json. Returns 1 if an error is larger than promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks laboratory")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each rate")
    options = parser.parse_args(arguments)
    if problem := permission_problem():
        print(f"laboratory: not measured, {problem}")
        return 0
    found = [measured(wan, options.seconds) for wan in CASES]
    table = Table(title="The network between two sites")
    for name in ("ordered", "value", "wanted", "measured", "error", "late frames", "processors"):
        table.add_column(name, justify="left" if name in ("ordered", "value") else "right")
    for each in found:
        numbers = (f"{each.ordered:.4g}", f"{each.measured:.4g}", f"{each.error:+.1%}", f"{each.late:.1%}", f"{each.cpu:.2f}")
        table.add_row(each.wan, each.what, *numbers)
    Console().print(table)
    write(RESULTS / "laboratory.json", {"cases": [each._asdict() | {"error": each.error} for each in found]})
    return max(map(too_far, found))


def too_far(found: Found) -> bool:
    """Whether the error is larger than promised: a round trip's 5 % or 0.5 ms, a rate's 3 %, a loss's 10 %."""
    off = abs(found.measured - found.ordered)
    promised = {
        "round trip, ms": max(0.05 * found.ordered, 0.5),
        "rate, Mb/s": 0.03 * found.ordered,
        "loss, %": 0.1 * found.ordered,
    }
    return off > promised[found.what]


def measured(wan: str, seconds: float = 6.0) -> Found:
    """Measure what this network has last: its loss, its rate from the second site to the first one, or its round trip."""
    ordered = parse_wide_area(wan)
    what, value = _wanted(ordered)
    packets = round(max(40_000, 400 / ordered.loss)) if ordered.loss else 0  # 400 that are lost are counted to 5 %
    with EmulatedCluster(2, sites=2, wan=wan) as cluster:
        began = time.monotonic()
        told = collected(cluster, "benchmarks.laboratory", (what, seconds, packets), wan, timeout=120.0)
        counts, wall_s = cluster.wan_counts(), time.monotonic() - began
    return Found(wan, what, value, told["value"], counts.late_frames / max(1, counts.frames), counts.cpu_s / wall_s)


def _wanted(ordered: WideArea) -> tuple[str, float]:
    if ordered.loss:
        return "loss, %", 100 * ordered.loss
    if ordered.up is not None and ordered.down is not None:
        return "rate, Mb/s", min(ordered.up, ordered.down) * PAYLOAD / 1e6
    return "round trip, ms", 1e3 * (ordered.round_trip_s + ordered.jitter_s)


def _receive(host: str, what: str, packets_sent: int) -> float:
    """Receive as rank 0. Returns the value."""
    if what == "rate, Mb/s":
        with socket.create_server((host, _PORT)) as server, server.accept()[0] as connection:
            began, first, total = time.perf_counter(), (0.0, 0), 0
            while received := len(connection.recv(1 << 20)):
                now, total = time.perf_counter() - began, total + received
                if not first[1] and now > _START_S:
                    first = now, total
                last = now, total
            return (last[1] - first[1]) * 8e-6 / (last[0] - first[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
        packets.bind((host, _PORT))
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        _, sender = packets.recvfrom(64)
        packets.sendto(b"begin", sender)
        if what == "loss, %":
            numbers = set[int]()
            while (number := _number(packets.recv(64))) < packets_sent:
                numbers.add(number)
            value = 100 * (1 - len(numbers - {-1}) / packets_sent)
        else:
            times = []
            for _ in range(100):
                began = time.perf_counter()
                packets.sendto(b"ping", sender)
                while packets.recv(64) != b"ping":  # what was asked before `begin` came
                    pass
                times.append(time.perf_counter() - began)
                time.sleep(0.005)
            value = 1e3 * statistics.median(times)
        for _ in range(20):  # some may be lost
            packets.sendto(b"enough", sender)
        return value


def _number(packet: bytes) -> int:
    return -1 if packet == b"here" else int.from_bytes(packet, "big")


def _send(host: str, what: str, seconds: float, packets_sent: int) -> None:
    """Send, or answer, as rank 1."""
    if what == "rate, Mb/s":
        with _connected(host) as connection:
            end, chunk = time.perf_counter() + _START_S + seconds, bytes(1 << 16)
            while time.perf_counter() < end:
                connection.sendall(chunk)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packets:
        packets.connect((host, _PORT))
        packets.settimeout(0.5)
        _ask(packets, b"here")
        if what == "loss, %":
            for number in range(packets_sent):
                packets.send(number.to_bytes(3, "big"))
                if number % 20 == 19:
                    time.sleep(0.001)
            _ask(packets, packets_sent.to_bytes(3, "big"))
            return
        while (got := packets.recv(64)) != b"enough":
            if got == b"ping":
                packets.send(got)


def _ask(packets: socket.socket, question: bytes) -> None:
    """Send until there is an answer."""
    while True:
        with contextlib.suppress(TimeoutError, ConnectionRefusedError):  # rank 0 does not listen yet
            packets.send(question)
            packets.recv(64)
            return
        time.sleep(0.01)


def _connected(host: str) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection((host, _PORT))
        except OSError:
            time.sleep(0.05)
    raise SystemExit("rank 0 does not listen")


def _rank(what: str, seconds: float, packets_sent: int) -> None:
    host: Any = os.environ["MASTER_ADDR"]
    if os.environ["RANK"] == "0":
        print(json.dumps({"value": _receive(host, what, packets_sent)}), flush=True)
    else:
        _send(host, what, seconds, packets_sent)


if __name__ == "__main__":
    _rank(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
