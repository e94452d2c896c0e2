"""The facts of one process: versions, backends, kernels, cores, interfaces, variables. No judgement."""

import os
import platform
import re
import socket
import warnings
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from gradwire._version import __version__
from gradwire.doctor.network import GlooChoice, Interface, gloo_choice, interfaces

VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT",
)  # fmt: skip
PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_GLOO_")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. Every field has a default, so that ranks of different versions can read each other's facts."""

    rank: int = 0
    local_world_size: int = 1
    host: str = ""
    gradwire: str = ""
    python: str = ""
    torch: str | None = None
    torch_problem: str | None = None
    """Why torch does not load."""
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
    """float32 bytes that 4-bit QSGD encodes in a second, in units of 1e9."""
    cores: int = 1
    """Cores that this process may use."""
    core_quota: float | None = None
    """A container's limit in cores; None: no limit."""
    threads: int = 1
    """torch's compute threads."""
    gloo_timeout_s: float | None = None
    nccl_timeout_s: float | None = None
    interfaces: tuple[Interface, ...] = ()
    gloo: GlooChoice | None = None
    variables: dict[str, str] = {}

    @property
    def node(self) -> tuple[str, str]:
        """Equal for all ranks of one launcher on one machine."""
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
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        core_quota=_core_quota(),
        interfaces=known,
        gloo=gloo_choice(environ.get("GLOO_SOCKET_IFNAME"), host, known),
        variables={
            name: value for name, value in sorted(environ.items()) if name in VARIABLES or name.startswith(PREFIXES)
        },
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

    from gradwire.kernels import cpu

    has_nccl = dist.is_nccl_available()
    nccl_timeout = getattr(constants, "default_pg_nccl_timeout", None) if has_nccl else None
    problem = cpu.available()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return msgspec.structs.replace(
        facts,
        torch=str(torch.__version__),
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
        gpu_kernels=bool(devices) and _is_fast("cuda"),
        encode_gbytes_s=_encode_gbytes_s(),
        threads=torch.get_num_threads(),
        gloo_timeout_s=constants.default_pg_timeout.total_seconds(),
        nccl_timeout_s=None if nccl_timeout is None else nccl_timeout.total_seconds(),
    )


def _is_fast(device_type: str) -> bool:
    from gradwire.kernels import kernels_for, reference

    with warnings.catch_warnings(action="ignore"):
        return kernels_for(device_type) is not reference


def _encode_gbytes_s() -> float:
    """The encode rate for 1 MB on one thread."""
    import torch

    from gradwire.core.specs import QSGD
    from gradwire.profiler.codecs import measure_codecs

    with warnings.catch_warnings(action="ignore"):
        (codec,) = measure_codecs([QSGD(bits=4)], torch.device("cpu"), [2**20]).codecs
    ((nbytes, microseconds),) = codec.encode
    return nbytes / microseconds / 1e3


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


def _core_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.strip().isdecimal() else otherwise
