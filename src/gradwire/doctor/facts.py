"""Gathers the facts of one process: versions, backends, kernels, cores, variables, interfaces, gloo's and NCCL's choices."""

import ipaddress
import os
import platform
import re
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from gradwire._version import __version__

SITE, TLS = "GRADWIRE_SITE", "GRADWIRE_TLS"
VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", SITE, TLS,
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT",
)  # fmt: skip
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_GLOO_")
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_OF_CONTAINERS = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc")


class Interface(msgspec.Struct, frozen=True):
    """A network interface of this machine or container."""

    name: str
    address: str | None
    """The interface's IPv4 address, or else an IPv6 address; None if it has neither."""
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
    """The address; None if gloo would raise an error."""
    interface: str | None
    said_by: str
    """The reason for the choice: GLOO_SOCKET_IFNAME or the host name."""
    problem: str | None = None


def is_loopback(address: str | None) -> bool:
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
    """Return the first address of a host name at which this machine can listen, as gloo chooses it; None if there is none."""
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
    """Return gloo's address: from GLOO_SOCKET_IFNAME (names with commas) if set, else from the host name, else 127.0.0.1."""
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
    """Return the interfaces that NCCL_SOCKET_IFNAME admits: prefixes with commas; `=` means exact names, `^` means exclusions.

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


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one rank. Every field has a default, so that ranks of different versions can read each other's facts."""

    rank: int = 0
    local_world_size: int = 1
    host: str = ""
    gradwire: str = ""
    python: str = ""
    torch: str | None = None
    torch_problem: str | None = None
    """The reason why torch does not load; None if it loads."""
    torch_needed: str | None = None
    """The oldest torch version that gradwire supports."""
    backends: dict[str, bool] = {}
    cuda: str | None = None
    """The CUDA version that torch was built for."""
    cuda_devices: tuple[str, ...] = ()
    nccl: str | None = None
    triton: str | None = None
    kernel_level: str | None = None
    """The SIMD level of the C++ kernels; None if the plain-torch reference runs."""
    kernel_problem: str | None = None
    gpu_kernels: bool = False
    encode_gbytes_s: float | None = None
    """Speed of 4-bit QSGD encodes: 1e9 bytes of float32 per second, for 1 MiB at once, on one thread."""
    cores: int = 1
    """Number of cores that this process may use."""
    core_quota: float | None = None
    """A container's limit in cores; None without a limit."""
    threads: int = 1
    """Number of torch's compute threads."""
    long_control: str = ""
    """TCP's congestion control on long connections, such as bbr; '' if it is unknown."""
    gloo_timeout_s: float | None = None
    nccl_timeout_s: float | None = None
    interfaces: tuple[Interface, ...] = ()
    gloo: GlooChoice | None = None
    variables: dict[str, str] = {}

    @property
    def node(self) -> tuple[str, str]:
        """A key that is equal for all ranks of one launcher on one machine."""
        return self.host, self.variables.get("GROUP_RANK", "")


def gather_facts(environ: Mapping[str, str] = os.environ) -> Facts:
    """Gather the facts of this process. Takes a second or two, because it imports torch."""
    known, host = interfaces(), socket.gethostname()
    facts = Facts(
        rank=_number(environ.get("RANK"), 0),
        local_world_size=_number(environ.get("LOCAL_WORLD_SIZE"), 1),
        host=host,
        gradwire=__version__,
        python=platform.python_version(),
        torch_needed=_torch_needed(),
        triton=_version_of("triton") or _version_of("pytorch-triton"),
        cores=len(os.sched_getaffinity(0)),
        core_quota=_core_quota(),
        interfaces=known,
        gloo=gloo_choice(environ.get("GLOO_SOCKET_IFNAME"), host, known),
        variables={name: value for name, value in sorted(environ.items()) if name in VARIABLES or name.startswith(PREFIXES)},
    )
    try:
        return _with_torch(facts)
    except Exception as error:  # a broken installation may raise anything
        return msgspec.structs.replace(facts, torch_problem=f"{type(error).__name__}: {error}")


def _with_torch(facts: Facts) -> Facts:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        absent = "it was built without torch.distributed"
        return msgspec.structs.replace(facts, torch=str(torch.__version__), torch_problem=absent)

    from torch.distributed import constants

    from gradwire.core import QSGD
    from gradwire.kernels import cpu, kernels_for, reference
    from gradwire.profiler import measure_codecs
    from gradwire.transport import long_control

    has_nccl = dist.is_nccl_available()
    nccl_timeout = getattr(constants, "default_pg_nccl_timeout", None) if has_nccl else None
    problem = cpu.available()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with warnings.catch_warnings(action="ignore"):
        gpu_kernels = bool(devices) and kernels_for("cuda") is not reference
        (codec,) = measure_codecs([QSGD(bits=4)], torch.device("cpu"), [2**20]).codecs
    ((nbytes, microseconds),) = codec.encode
    return msgspec.structs.replace(
        facts,
        torch=str(torch.__version__),
        long_control=long_control(),
        backends={
            "gloo": dist.is_gloo_available(),
            "nccl": has_nccl,
            "mpi": dist.is_mpi_available(),
            "ucc": dist.is_ucc_available(),
        },
        cuda=torch.version.cuda,
        cuda_devices=tuple(torch.cuda.get_device_name(index) for index in devices),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        kernel_level=None if problem else cpu.levels()[-1],
        kernel_problem=problem,
        gpu_kernels=gpu_kernels,
        encode_gbytes_s=nbytes / microseconds / 1e3,
        threads=torch.get_num_threads(),
        gloo_timeout_s=constants.default_pg_timeout.total_seconds(),
        nccl_timeout_s=None if nccl_timeout is None else nccl_timeout.total_seconds(),
    )


def _torch_needed() -> str | None:
    try:
        wanted = metadata.requires("gradwire") or []
    except metadata.PackageNotFoundError:  # run from its source
        return None
    found = (re.match(r"torch\s*>=\s*([\d.]+)", line) for line in wanted)
    return next((match[1] for match in found if match), None)


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _core_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.strip().isdecimal() else otherwise
