"""The links: a bridge, a veth pair to every node, and a token bucket (`tbf`) at both ends of each pair.

The bridge has its own namespace, the hub, apart from the host's network stack and firewall. A node's egress is limited
inside the node, its ingress at the bridge's port, so a node sends and receives at the full rate at the same time. The
token bucket counts whole Ethernet frames, so TCP gets 1448/1514 of the rate.
"""

import contextlib
import json

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
_FREE_BITS_PER_SECOND = 100e9  # instead of no limit: deleting the bucket would drop its packets


def address_of(node: int) -> str:
    """The IPv4 address of a node, counted from 0.

    >>> address_of(0), address_of(255)
    ('10.218.0.1', '10.218.1.0')
    """
    return f"10.218.{(node + 1) // 256}.{(node + 1) % 256}"


def hosts_file(nodes: int) -> str:
    """The text of the ranks' /etc/hosts. The IPv4-mapped lines avoid a warning of c10d, whose sockets are IPv6."""
    lines = ["127.0.0.1 localhost"]
    for node in range(nodes):
        lines += [f"{address_of(node)} node{node}", f"::ffff:{address_of(node)} node{node}-mapped"]
    return "".join(f"{line}\n" for line in lines)


def build(hub: str, nodes: list[str]) -> None:
    """Make the namespaces and the links between them, without limits."""
    run_tool(["ip", "-batch", "-"], [f"netns add {name}" for name in (hub, *nodes)])
    for name in (hub, *nodes):
        _silence_version_6(name)
    lines = ["link add bridge0 type bridge mcast_snooping 0", "link set bridge0 addrgenmode none up"]
    for index, node in enumerate(nodes):
        lines += [
            f"link add port{index} type veth peer name {INTERFACE} netns {node}",
            f"link set port{index} addrgenmode none master bridge0 up",
        ]
    run_tool(["ip", "-n", hub, "-batch", "-"], lines)
    for index, node in enumerate(nodes):
        lines = [
            f"link set {INTERFACE} addrgenmode none up",
            f"address add {address_of(index)}/16 dev {INTERFACE}",
            "link set lo up",
        ]
        run_tool(["ip", "-n", node, "-batch", "-"], lines)


def limit_inter(hub: str, nodes: list[str], bits_per_second: float | None) -> None:
    """Limit every node's link in both directions; None removes the limit. Keeps packets in flight."""
    rate = _FREE_BITS_PER_SECOND if bits_per_second is None else bits_per_second
    packet = min(max(int(rate / 8 * _PACKET_SECONDS), _SMALLEST_PACKET_BYTES), _LARGEST_PACKET_BYTES)
    bucket = _bucket(rate, max(packet + _HEADER_BYTES, int(rate / 8 * _BURST_SECONDS)))
    run_tool(
        ["tc", "-n", hub, "-batch", "-"], [f"qdisc replace dev port{index} {bucket}" for index in range(len(nodes))]
    )
    for node in nodes:
        run_tool(["tc", "-n", node, "qdisc", "replace", "dev", INTERFACE, *bucket.split()])
        # open connections use the new size after a new route lookup
        lines = [f"link set {INTERFACE} gso_max_size {packet}", "route flush cache"]
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
    """The (sent, received) bytes of each node's interface, read at the other end of its pair."""
    links = json.loads(run_tool(["ip", "-n", hub, "-json", "-statistics", "link", "show"]))
    at_hub = {link["ifname"]: link["stats64"] for link in links}
    try:
        ports = [at_hub[f"port{index}"] for index in range(nodes)]
    except KeyError as error:
        raise TestbedError(f"the link {error} of {hub} is gone. Did another program remove it?") from error
    return [(port["rx"]["bytes"], port["tx"]["bytes"]) for port in ports]


def _silence_version_6(name: str) -> None:
    """Disable IPv6 on new interfaces, because its announcements would count as traffic."""
    with contextlib.suppress(TestbedError):  # read-only in some containers: then a few hundred bytes count
        setting = "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6"
        run_tool(["ip", "netns", "exec", name, "sh", "-c", setting])


def _bucket(bits_per_second: float, burst_bytes: int) -> str:
    return f"root tbf rate {int(bits_per_second)}bit burst {burst_bytes} limit {_QUEUE_BYTES}"
