"""Builds the links of a cluster, with rates: a bridge for a site, a veth pair to every node, a token bucket (`tbf`) at both
ends.

The bridge has its own namespace, the hub, apart from the host's network stack and firewall. A node's egress is limited
inside the node, its ingress at the bridge's port, so a node sends and receives at the full rate at the same time. The
token bucket counts whole Ethernet frames, so TCP gets 1448/1514 of the rate.
"""

import contextlib
import json
import math
import re
from collections.abc import Mapping

from gradwire.errors import TestbedError
from gradwire.testbed.namespaces import run_tool

INTERFACE = "eth0"

# After a pause, a token bucket lets one bucket through at once, so a bucket holds little more than one packet. Each packet
# costs about 20 us of the ranks' processors, so a packet holds as much as the link carries in a millisecond, within limits.
_PACKET_SECONDS = 0.001
_SMALLEST_PACKET_BYTES = 16 * 1024
_LARGEST_PACKET_BYTES = 64 * 1024  # the kernel's own limit
_HEADER_BYTES = 4 * 1024  # headers of the segments in a packet, and some slack
_BURST_SECONDS = 0.0001  # compensates late timers at high rates
_LOOPBACK_BURST_BYTES = 128 * 1024  # loopback packets have 64 KiB and headers
_QUEUE_BYTES = 32 * 1024 * 1024  # more than many senders to one node have in flight
FREE_BITS_PER_SECOND = 100e9  # instead of no limit: deleting the bucket would drop its packets

_BITS_PER_UNIT = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SLOWEST_BITS_PER_SECOND = 1e3
_FASTEST_BITS_PER_SECOND = 1e12
_EXAMPLES = '"100mbit", "2.5gbit", "800kbit"'


def parse_rate(text: str) -> float:
    """Read a rate in bits per second. Units are powers of 1000; case does not matter.

    >>> parse_rate("500mbit"), parse_rate("1.5Gbit")
    (500000000.0, 1500000000.0)

    Raises TestbedError for other text, also for tc's ambiguous `mbps`, which means megabytes per second.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z/]*)\s*", text)
    if match is None:
        raise TestbedError(f"{text!r} is not a link rate, a number with a unit. Write, for example, {_EXAMPLES}.")
    number, unit = float(match[1]), match[2].lower()
    if unit not in _BITS_PER_UNIT:
        reason = f"has the unit {match[2]!r}" if unit else "has no unit"
        raise TestbedError(
            f"link rate {text!r} {reason}; the units are {', '.join(_BITS_PER_UNIT)} (bits per second). Write, for example, "
            f"{_EXAMPLES}."
        )
    bits_per_second = number * _BITS_PER_UNIT[unit]
    if not math.isfinite(bits_per_second) or bits_per_second < _SLOWEST_BITS_PER_SECOND:
        raise TestbedError(f"link rate {text!r} is below the minimum of 1kbit. Write, for example, {_EXAMPLES}.")
    if bits_per_second > _FASTEST_BITS_PER_SECOND:
        raise TestbedError(f"link rate {text!r} is above 1000gbit, the limit of tc. Leave out the rate for an unlimited link.")
    return bits_per_second


def address_of(node: int) -> str:
    """Return the IPv4 address of a node, counted from 0.

    >>> address_of(0), address_of(255)
    ('10.218.0.1', '10.218.1.0')
    """
    return f"10.218.{(node + 1) // 256}.{(node + 1) % 256}"


def hosts_file(nodes: int) -> str:
    """Return the text of the ranks' /etc/hosts. The IPv4-mapped lines avoid a warning of c10d's IPv6 sockets."""
    lines = ["127.0.0.1 localhost"]
    for node in range(nodes):
        lines += [f"{address_of(node)} node{node}", f"::ffff:{address_of(node)} node{node}-mapped"]
    return "".join(f"{line}\n" for line in lines)


def bridge_of(site: int) -> str:
    """Return the name of a site's bridge in the hub's namespace."""
    return f"bridge{site}"


def site_of(node: int, nodes: int, sites: int) -> int:
    """Return the site of a node: neighbours are together, and sites differ by one node at most.

    >>> [site_of(node, 5, 2) for node in range(5)]
    [0, 0, 0, 1, 1]
    """
    return node * sites // nodes


def build(hub: str, nodes: list[str], sites: int = 1) -> None:
    """Make the namespaces and the links between those of one site, without limits. Sites are apart."""
    run_tool(["ip", "-batch", "-"], [f"netns add {name}" for name in (hub, *nodes)])
    silence = "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6"  # announcements of IPv6 would count as traffic
    for name in (hub, *nodes):
        with contextlib.suppress(TestbedError):  # read-only in some containers: then a few hundred bytes count
            run_tool(["ip", "netns", "exec", name, "sh", "-c", silence])
    lines = []
    for site in range(sites):
        bridge = bridge_of(site)
        lines += [f"link add {bridge} type bridge mcast_snooping 0", f"link set {bridge} addrgenmode none up"]
    for index, node in enumerate(nodes):
        bridge = bridge_of(site_of(index, len(nodes), sites))
        lines += [
            f"link add port{index} type veth peer name {INTERFACE} netns {node}",
            f"link set port{index} addrgenmode none master {bridge} up",
        ]
    run_tool(["ip", "-n", hub, "-batch", "-"], lines)
    for index, node in enumerate(nodes):
        lines = [
            f"link set {INTERFACE} addrgenmode none up",
            f"address add {address_of(index)}/16 dev {INTERFACE}",
            "link set lo up",
        ]
        run_tool(["ip", "-n", node, "-batch", "-"], lines)


def limit_node(hub: str, nodes: Mapping[int, str], down: float, up: float) -> None:
    """Limit what these nodes, by number, receive and send, in bits per second. Keeps packets in flight."""
    lines = [f"qdisc replace dev port{index} {_link_bucket(down)}" for index in nodes]
    run_tool(["tc", "-n", hub, "-batch", "-"], lines)
    for node in nodes.values():
        run_tool(["tc", "-n", node, "qdisc", "replace", "dev", INTERFACE, *_link_bucket(up).split()])
        # open connections use the new size after a new route lookup
        lines = [f"link set {INTERFACE} gso_max_size {_packet(up)}", "route flush cache"]
        run_tool(["ip", "-n", node, "-batch", "-"], lines)


def set_link(hub: str, node: int, up: bool) -> None:
    """Take the bridge's end of a node's link down or up. The node keeps its address."""
    run_tool(["ip", "-n", hub, "link", "set", f"port{node}", "up" if up else "down"])


def limit_intra(nodes: list[str], bits_per_second: float) -> None:
    """Limit the loopback of every node, for both directions together."""
    burst = max(_LOOPBACK_BURST_BYTES, int(bits_per_second / 8 * _BURST_SECONDS))
    for node in nodes:
        run_tool(["tc", "-n", node, "qdisc", "replace", "dev", "lo", *_bucket(bits_per_second, burst).split()])


def read_counters(hub: str, nodes: int) -> list[tuple[int, int]]:
    """Read the (sent, received) bytes of each node's interface, at the other end of its pair."""
    links = json.loads(run_tool(["ip", "-n", hub, "-json", "-statistics", "link", "show"]))
    at_hub = {link["ifname"]: link["stats64"] for link in links}
    try:
        ports = [at_hub[f"port{index}"] for index in range(nodes)]
    except KeyError as error:
        raise TestbedError(f"the link {error} of {hub} is gone. Did another program remove it?") from error
    return [(port["rx"]["bytes"], port["tx"]["bytes"]) for port in ports]


def _packet(bits_per_second: float) -> int:
    """Return the bytes of a packet at this rate."""
    return min(max(int(bits_per_second / 8 * _PACKET_SECONDS), _SMALLEST_PACKET_BYTES), _LARGEST_PACKET_BYTES)


def _link_bucket(bits_per_second: float) -> str:
    burst = max(_packet(bits_per_second) + _HEADER_BYTES, int(bits_per_second / 8 * _BURST_SECONDS))
    return _bucket(bits_per_second, burst)


def _bucket(bits_per_second: float, burst_bytes: int) -> str:
    return f"root tbf rate {int(bits_per_second)}bit burst {burst_bytes} limit {_QUEUE_BYTES}"
