"""The network between the sites of an emulated cluster: delay, jitter, loss, a rate in each direction, and one open port.

Many kernels lack the module `netem`. So a relay in user space (csrc/api_relay.cpp) passes frames on between the bridges of sites.
It is a process of the hub's namespace, so it ends with the cluster.
"""

import contextlib
import re
import subprocess
import sys
from typing import NamedTuple

from gradwire.core import LIBRARY
from gradwire.errors import TestbedError
from gradwire.testbed.namespaces import find_tool, run_tool
from gradwire.testbed.network import bridge_of, parse_rate

_RELAY = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).gw_relay(int(sys.argv[2])))"
_ROUTER_SECONDS = 0.1  # what a router's queue holds more than the bytes that are on their way
_EXAMPLE = '"50ms", "50ms 2ms loss 0.1% up 20mbit down 100mbit", "50ms port 51820"'
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class WideArea(NamedTuple):
    """One site's way to all other sites. The round trip between two sites is the mean of their two."""

    round_trip_s: float
    jitter_s: float = 0.0
    """The most that is added to a frame's way between two sites, in each direction. Frames keep their order."""
    loss: float = 0.0
    """The share of segments that are lost, in each direction."""
    up: float | None = None
    """Bits per second that the site sends; None: no limit."""
    down: float | None = None
    """Bits per second that the site receives."""
    port: int | None = None
    """The only port, of TCP or UDP, that the site's firewall has open: packets from it and to it pass. None: all ports are."""


class RelayCounts(NamedTuple):
    """The relay's work so far."""

    frames: int
    """Ethernet frames that it read. A large one holds several segments."""
    lost_segments: int
    """Segments that were lost as ordered."""
    full_queue_segments: int
    """Segments for which a link's queue had no room, as in a router."""
    blocked_frames: int
    """Frames that a firewall kept back."""
    failed_sends: int
    late_frames: int
    """Frames that were sent more than 0.5 ms late: the processors were busy."""
    latest_s: float
    """The longest time by which a frame was late."""
    cpu_s: float
    """Processor seconds of the relay."""
    dropped_frames: int = 0
    """Frames that the kernel dropped because the relay came too late to read them: losses that nobody ordered."""
    wire_bytes: int = 0
    """Bytes that sites sent to each other, with the headers of all segments."""

    def problem(self) -> str | None:
        """Why delays, rates and losses were not as ordered, or None. A frame in a hundred may be late."""
        if self.late_frames * 100 <= self.frames and not self.failed_sends and not self.dropped_frames:
            return None
        return (
            f"the network between sites was not as ordered: {self.late_frames} of {self.frames} frames were late by more than "
            f"0.5 ms, at most by {self.latest_s * 1e3:.1f} ms, {self.failed_sends} could not be sent, and {self.dropped_frames} "
            "were dropped before the relay read them. The relay needs a processor: lower the rates, or run fewer ranks."
        )


def parse_wide_area(text: str) -> WideArea:
    """Read the network between sites: the round trip, then jitter, `loss`, `up`, `down`, `rate` (both), `port` where wanted.

    >>> parse_wide_area("50ms 2ms loss 0.1% up 20mbit down 100mbit")
    WideArea(round_trip_s=0.05, jitter_s=0.002, loss=0.001, up=20000000.0, down=100000000.0, port=None)

    Raises TestbedError for other text.
    """
    times: list[float] = []
    values: dict[str, float] = {}
    words = iter(text.lower().split())
    for word in words:
        if (time_s := _seconds(word)) is not None and len(times) < 2 and not values:
            times.append(time_s)
        elif word in ("loss", "up", "down", "rate", "port"):
            value, names = next(words, ""), ("up", "down") if word == "rate" else (word,)
            if values.keys() & set(names):
                raise TestbedError(
                    f"wan is {text!r}, and {word!r} says again what an earlier word says: rate is up and down. Write each once: "
                    f"{_EXAMPLE}."
                )
            read = _share(value, text) if word == "loss" else _port(value, text) if word == "port" else parse_rate(value)
            values |= dict.fromkeys(names, read)
        else:
            raise TestbedError(
                f"wan is {text!r}, and {word!r} is no part of it. Write the round trip between sites, and what else it has: "
                f"{_EXAMPLE}."
            )
    if not times:
        raise TestbedError(f"wan is {text!r}, without the round trip between sites. Write, for example, {_EXAMPLE}.")
    jitter = times[1] if len(times) > 1 else 0.0
    port = int(values["port"]) if "port" in values else None
    return WideArea(times[0], jitter, values.get("loss", 0.0), values.get("up"), values.get("down"), port)


def _seconds(word: str) -> float | None:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(us|ms|s)", word)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def _share(word: str, text: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)%", word)
    if match is None or not 0 <= float(match[1]) < 100:
        raise TestbedError(f"wan is {text!r}, and the loss {word!r} is no share of segments. Write, for example, loss 0.1%.")
    return float(match[1]) / 100


def _port(word: str, text: str) -> int:
    if not (word.isascii() and word.isdecimal() and 0 < int(word) < 2**16):
        raise TestbedError(f"wan is {text!r}, and {word!r} is no port. Write, for example, port 51820.")
    return int(word)


class Relay:
    """The process between the sites' bridges. It begins with the first `set`, and ends with `close` or the hub's namespace."""

    def __init__(self, hub: str, sites: int) -> None:
        """Make the interfaces in the hub's namespace, where every site has its bridge already, and start the relay.

        Raises TestbedError if it does not start.
        """
        if not LIBRARY.exists():
            raise TestbedError(
                f"a network between sites needs {LIBRARY.name}, which was not built: this is an installation without a compiler. "
                "Install gradwire with g++, or leave out sites."
            )
        lines = []
        for site in range(sites):
            lines += [
                f"link add wan{site} type veth peer name site{site}up",
                f"link set site{site}up addrgenmode none master {bridge_of(site)} up",
                f"link set wan{site} addrgenmode none up",
            ]
        run_tool(["ip", "-n", hub, "-batch", "-"], lines)
        entering = [find_tool("ip") or "ip", "netns", "exec", hub, sys.executable, "-I", "-S"]
        self._process = subprocess.Popen(
            [*entering, "-c", _RELAY, str(LIBRARY), str(sites)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the ranks
        )
        if (said := self._line()) != "ready":
            code = self._process.wait()
            errors = self._process.stderr.read() if self._process.stderr is not None else ""
            raise TestbedError(f"the relay between sites did not start: exit code {code}. {said} {errors.strip()}")

    def set(self, site: int, wide_area: WideArea) -> None:
        """Change a site's way to the others. Frames on their way keep theirs, but wait no longer than the new queues hold."""
        rates = [rate for rate in (wide_area.up, wide_area.down) if rate is not None]
        queue_s = wide_area.round_trip_s + max(_ROUTER_SECONDS, 8 * 128 * 1024 / min(rates) if rates else 0.0)
        numbers = [(wide_area.up or 0) / 8, (wide_area.down or 0) / 8, wide_area.round_trip_s / 4, wide_area.jitter_s / 2]
        order = [site, *numbers, wide_area.loss, queue_s, wide_area.port or 0]
        self._ask(" ".join(map(repr, order)), f"changed {site}")

    def counts(self) -> RelayCounts:
        """Return what the relay did so far."""
        *counts, latest_s, cpu_s = self._ask("counts").split()
        frames, lost, full, blocked, failed, late, dropped, sent = map(int, counts)
        return RelayCounts(frames, lost, full, blocked, failed, late, float(latest_s), float(cpu_s), dropped, sent)

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # the relay has ended before it read an order
                self._process.stdin.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _ask(self, order: str, expected: str | None = None) -> str:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
            answer = self._line()
        except OSError:
            answer = ""
        if not answer:
            raise TestbedError(
                f"the relay between sites ended with exit code {self._process.wait()}: nothing reaches another site."
            )
        if expected not in (None, answer):
            raise TestbedError(f"the relay between sites answered {answer!r} to {order!r}.")
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()
