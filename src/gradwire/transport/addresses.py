"""The address at which other ranks reach this one, and how many descriptors a process has left."""

import fcntl
import math
import os
import resource
import socket
import struct
from contextlib import suppress
from typing import Any

_SIOCGIFADDR = 0x8915
_SPARE = 48
"""Descriptors that are left to the script, and to strangers who call while ranks connect."""


def own_address(store: Any) -> str:
    """The address to listen at.

    GLOO_SOCKET_IFNAME names the interface. Without it, it is the address from which this rank reaches the store's host. On the
    host itself that is loopback, so there the host name decides, as in gloo. Raises OSError for an interface without an address.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return address_of_interface(names.split(",")[0])
    return _towards(store) or _of_host_name() or "127.0.0.1"


def address_of_interface(name: str) -> str:
    """The IPv4 address of an interface, else its IPv6 address.

    >>> address_of_interface("lo")
    '127.0.0.1'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError as error:
            problem = error
    with suppress(OSError), open("/proc/net/if_inet6") as lines:
        for digits, _, _, scope, _, device in (line.split() for line in lines):
            if device == name and scope != "20":  # addresses of one link alone need a scope
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    raise OSError(problem.errno, f"GLOO_SOCKET_IFNAME names the interface {name!r}, which has no address: {problem.strerror}")


def _towards(store: Any) -> str | None:
    """The own address on the way to the store's host; None for loopback, and for stores without a host."""
    with suppress(Exception):
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        family, kind, _, _, place = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(place)  # which sends nothing
            return _unless_loopback(str(asking.getsockname()[0]))
    return None


def _of_host_name() -> str | None:
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as trying:
                trying.bind(place)
                return str(place[0])
    return None


def _unless_loopback(address: str) -> str | None:
    return None if address.startswith("127.") or address == "::1" else address


def why_too_few(needed: int, wanted: int = 0) -> str:
    """Why a process cannot open so many descriptors more; '' if it can. Where the soft limit is too low, it is raised, as far as
    the hard limit allows. `wanted`: so many more are good to have.

    >>> why_too_few(1)
    ''
    """
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    enough = opened + needed + _SPARE
    limit = _raised(enough + wanted)
    if enough <= limit:
        return ""
    return (
        f"{needed} connections to other ranks need {needed} descriptors, {opened} are open, and the limit is {limit}. Raise it "
        f"to at least {enough} on every rank (`ulimit -n {enough}`) before the script starts"
    )


def _raised(enough: int) -> float:
    """The limit of descriptors, raised towards this one."""
    soft, hard = (math.inf if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    if enough > soft and hard > soft:
        more = int(min(enough, hard))
        with suppress(OSError, ValueError):  # a system with a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            return more
    return soft
