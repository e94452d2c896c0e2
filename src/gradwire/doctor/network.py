"""The network interfaces, and the choices of gloo and NCCL among them."""

import ipaddress
import socket
from collections.abc import Callable, Sequence

import msgspec
import psutil

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_OF_CONTAINERS = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc")


class Interface(msgspec.Struct, frozen=True):
    """A network interface of this machine or container."""

    name: str
    address: str | None
    """Its IPv4 address, else an IPv6 address."""
    up: bool = True

    @property
    def usable_across_nodes(self) -> bool:
        return self.up and self.address is not None and not is_loopback(self.address)

    @property
    def likely_across_nodes(self) -> bool:
        """Whether the interface is no container bridge and its address is not link-local."""
        if self.address is None or not self.usable_across_nodes or self.name.startswith(_OF_CONTAINERS):
            return False
        return not ipaddress.ip_address(self.address.partition("%")[0]).is_link_local


class GlooChoice(msgspec.Struct, frozen=True):
    """The address at which a gloo group of this process would listen."""

    address: str | None
    """None if gloo would raise."""
    interface: str | None
    said_by: str
    """The reason for the choice: GLOO_SOCKET_IFNAME or the host name."""
    problem: str | None = None


def is_loopback(address: str | None) -> bool:
    """Whether an address is a loopback address."""
    if address is None:
        return False
    plain = ipaddress.ip_address(address.partition("%")[0])
    mapped = plain.ipv4_mapped if isinstance(plain, ipaddress.IPv6Address) else None
    return (mapped or plain).is_loopback


def interfaces() -> tuple[Interface, ...]:
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        of_link = {entry.address: entry.address.startswith("fe80:") for entry in entries if entry.family in _INTERNET}
        addresses = sorted(of_link, key=lambda address: (":" in address, of_link[address]))
        found.append(Interface(name, addresses[0].partition("%")[0] if addresses else None, name in up))
    return tuple(found)


def bindable_address(host: str) -> str | None:
    """The first address of a host name at which this machine can listen, as gloo chooses; None if there is none."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: an invalid name
        return None
    for family, kind, protocol, _, place in answers:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(place)
        except OSError:
            continue
        return str(place[0])
    return None


def gloo_choice(
    variable: str | None, host: str, known: Sequence[Interface], resolve: Callable[[str], str | None] = bindable_address
) -> GlooChoice:
    """The address of gloo: GLOO_SOCKET_IFNAME (names with commas) if set, else the host name, else 127.0.0.1."""
    by_name = {each.name: each for each in known}
    if variable:
        said_by = f"GLOO_SOCKET_IFNAME={variable}"
        for name in variable.split(","):
            if name not in by_name:
                return GlooChoice(None, None, said_by, f"there is no interface {name!r} here")
            if by_name[name].address is None:
                return GlooChoice(None, name, said_by, f"the interface {name!r} has no address")
        first = by_name[variable.split(",")[0]]
        return GlooChoice(first.address, first.name, said_by)
    address = resolve(host)
    if address is None:
        loopback = next((each.name for each in known if is_loopback(each.address)), None)
        return GlooChoice("127.0.0.1", loopback, f"the host name {host!r} does not resolve, so gloo takes loopback")
    plain = address.partition("%")[0]
    holder = next((each.name for each in known if each.address == plain), None)
    if holder is None and is_loopback(address):
        holder = next((each.name for each in known if is_loopback(each.address)), None)
    return GlooChoice(address, holder, f"the host name {host!r} resolves to it")


def nccl_choice(variable: str, names: Sequence[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME admits: prefixes with commas; `=` means exact names, `^` means exclusions.

    >>> nccl_choice("^docker,lo", ["lo", "eth0", "docker0"]), nccl_choice("=eth", ["eth0"]), nccl_choice("eth", ["eth0"])
    (['eth0'], [], ['eth0'])
    """
    excluded = variable.startswith("^")
    rest = variable.removeprefix("^")
    exact = rest.startswith("=")
    words = [word for word in rest.removeprefix("=").split(",") if word]

    def listed(name: str) -> bool:
        return name in words if exact else name.startswith(tuple(words))

    return [name for name in names if listed(name) != excluded]
