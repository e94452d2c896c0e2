"""Creates and removes network namespaces. Their names contain their owner, so the next run can remove those of a dead run.

A name is `gradwire-<pid>-<start time of pid>-<serial>-<part>`. The start time (field 22 of /proc/PID/stat, in clock ticks
since boot) tells the owner from a later process with its id. Making namespaces takes permission: root, or a user namespace.
"""

import contextlib
import functools
import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gradwire.errors import TestbedError

log = logging.getLogger("gradwire.testbed")

NAMESPACE_FOLDER = Path("/run/netns")
OWNER_VARIABLE = "GRADWIRE_TESTBED_OWNER"  # in the environment of every rank and of its children

_NAME = re.compile(r"gradwire-(\d+)-(\d+)-\d+-(?:hub|node\d+)")
_OWNER = re.compile(r"(\d+)-(\d+)")
_TOOL_SECONDS = 30.0
_KILL_SECONDS = 5.0
_GUARD = "GRADWIRE_IN_USER_NAMESPACE"
_USER_NAMESPACE = ["unshare", "-Urnm", "--map-root-user"]

# All parts of a cluster once, in namespaces that end with the probe.
_PROBE = """
run() { "$@" >/dev/null || { echo "from: $*" >&2; exit 1; }; }
run mount -t tmpfs tmpfs /run
run ip netns add probe
run ip -n probe link add probe0 type veth peer name probe1
run ip -n probe link set probe0 gso_max_size 16384
run ip -n probe link add probe2 type bridge
run tc -n probe qdisc add dev probe0 root tbf rate 1mbit burst 100kb limit 1mb
run ip netns exec probe true
"""


def tool_environment() -> dict[str, str]:
    """Return the environment for `ip` and `tc`: the administrator's folders on PATH, and messages in English."""
    return os.environ | {"PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/bin:/bin", "LC_ALL": "C"}


def find_tool(name: str) -> str | None:
    """Return the path of a program of the administrator; None if it is missing."""
    return shutil.which(name, path=tool_environment()["PATH"])


def run_tool(arguments: list[str], lines: Iterable[str] = ()) -> str:
    """Run `ip` or `tc` with `lines` as standard input and return the output. Raises TestbedError with the tool's message.

    The tool gets its own session, so that a Ctrl-C cannot interrupt a cleanup.
    """
    text = "".join(f"{line}\n" for line in lines)
    said = f"`{' '.join(arguments)}`" + (f" with the lines {text!r}" if text else "")
    try:
        finished = subprocess.run(
            arguments,
            input=text,
            env=tool_environment(),
            capture_output=True,
            text=True,
            timeout=_TOOL_SECONDS,
            check=False,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise TestbedError(f"{said} cannot start: {arguments[0]} is not installed. Install iproute2.") from error
    except subprocess.TimeoutExpired as error:
        raise TestbedError(f"{said} did not end within {_TOOL_SECONDS:.0f} s. Is the machine overloaded?") from error
    if finished.returncode != 0:
        raise TestbedError(f"{said} failed with exit code {finished.returncode}: {finished.stderr.strip()}")
    return finished.stdout


def start_time(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if the process does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def this_owner() -> str:
    """Return `<pid>-<start time>` of this process."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def existing(prefix: str = "gradwire-") -> list[str]:
    """Return the names of gradwire's namespaces that begin with `prefix`."""
    try:
        names = sorted(os.listdir(NAMESPACE_FOLDER))
    except OSError:
        return []
    return [name for name in names if _NAME.fullmatch(name) and name.startswith(prefix)]


def remove(names: Iterable[str]) -> None:
    """Kill the processes in these namespaces and remove the namespaces. Logs each failure."""
    names = list(names)
    if survivors := kill_inside(names):
        log.warning("processes %s are still in %s %.0f s after SIGKILL", survivors, ", ".join(names), _KILL_SECONDS)
    for name in names:
        path = NAMESPACE_FOLDER / name
        if not path.exists():
            continue
        try:
            run_tool(["ip", "netns", "delete", name])
        except TestbedError as error:
            with contextlib.suppress(OSError):  # a name without a mount, of a run that died in between
                path.unlink()
            if path.exists():
                log.warning("namespace %s could not be removed: %s", name, error)


def sweep() -> None:
    """Remove the namespaces and processes of dead owners."""
    kill_marked_orphans()
    remove(name for name in existing() if _is_dead(_NAME.fullmatch(name)))


def kill_inside(names: Iterable[str]) -> list[int]:
    """Send SIGKILL to every process in these namespaces and wait. Returns the ids of survivors."""
    inodes = set()
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(NAMESPACE_FOLDER / name)
            inodes.add((status.st_dev, status.st_ino))

    def is_inside(pid: int) -> bool:
        status = os.stat(f"/proc/{pid}/ns/net")
        return (status.st_dev, status.st_ino) in inodes

    return _kill_where(is_inside) if inodes else []


def kill_marked_orphans() -> list[int]:
    """Send SIGKILL to processes in network namespaces whose environment names a dead owner. Returns the ids of survivors.

    A process that a rank started and that left the run's network does not belong to the run any more: a tmux server,
    and every shell that the server starts later, have the environment too. Inside gradwire's user namespace nothing is
    killed, because there the host's network looks like a run's network.
    """
    marker = f"{OWNER_VARIABLE}=".encode()
    ours, network = os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/net").st_ino

    def is_orphan(pid: int) -> bool:
        if os.stat(f"/proc/{pid}/ns/pid").st_ino != ours:
            return False  # a process of a container: the owner's id belongs to another namespace
        if os.stat(f"/proc/{pid}/ns/net").st_ino == network:
            return False
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(marker):
                return _is_dead(_OWNER.fullmatch(entry[len(marker) :].decode(errors="replace")))
        return False

    return [] if os.environ.get(_GUARD) else _kill_where(is_orphan)


def _kill_where(condition: Callable[[int], bool]) -> list[int]:
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        others = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()} - {os.getpid()}
        found = [pid for pid in others if _kill_if(pid, condition)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def _kill_if(pid: int, condition: Callable[[int], bool]) -> bool:
    """Kill a process if the condition holds. A pidfd protects a later process with the same id."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if start_time(pid) is None or not condition(pid):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _is_dead(owner: re.Match[str] | None) -> bool:
    """Return whether a name or a mark has an owner, and the owner has ended."""
    return owner is not None and start_time(int(owner[1])) != int(owner[2])


def permission_problem() -> str | None:
    """Return why namespaces cannot be made here, or None if they can. The first call tries; later calls return its answer."""
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if find_tool(tool) is None]
    if missing:
        package = "iproute2" if {"ip", "tc"} & set(missing) else "util-linux"
        return f"the program{'s' * (len(missing) > 1)} {' and '.join(missing)} cannot be found (install {package})"
    direct = _failure_of_direct_use()
    if direct is None:
        return None
    in_user_namespace = _probe(*_USER_NAMESPACE)
    if in_user_namespace is None:
        return None
    if "from: " in in_user_namespace:
        return (
            f"namespaces can be made, but not the links in them ({in_user_namespace}); does the kernel have the modules veth, "
            "bridge and sch_tbf, and may this process mount?"
        )
    return (
        f"this process (user id {os.geteuid()}) lacks CAP_SYS_ADMIN and CAP_NET_ADMIN ({direct}), and the kernel "
        f"allows it no user namespace of its own ({in_user_namespace})"
    )


def needs_user_namespace() -> bool:
    """Return whether namespaces can be made only after `reexec_in_user_namespace_if_needed`."""
    return permission_problem() is None and _failure_of_direct_use() is not None


def reexec_in_user_namespace_if_needed(argv: list[str]) -> None:
    """Return if this process can make network namespaces; else replace it with `argv` in a user namespace.

    `argv` is the whole command, program first, for example `[sys.executable, *sys.orig_argv[1:]]`. The process id stays
    the same. Raises TestbedError where the kernel allows neither.
    """
    problem = permission_problem()
    if problem is not None:
        raise TestbedError(f"no emulated cluster can be made here: {problem}. {_CURE}")
    if not needs_user_namespace():
        return
    if os.environ.get(_GUARD):
        raise TestbedError(
            f"no network namespace can be made even inside gradwire's user namespace ({_GUARD} is set): "
            f"{_failure_of_direct_use()}. Unset {_GUARD} if you set it yourself. {_CURE}"
        )
    kill_marked_orphans()  # out of reach from inside the new user namespace
    environment = tool_environment() | {_GUARD: "1"}
    in_fresh_run = ["sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh"]
    program = find_tool("unshare") or "unshare"
    os.execve(program, [*_USER_NAMESPACE, *in_fresh_run, *argv], environment)


_CURE = (
    "Run as root (sudo); in a container, start it with `docker run --privileged` or `--cap-add SYS_ADMIN --cap-add "
    "NET_ADMIN --security-opt apparmor=unconfined`; or allow user namespaces: `sysctl -w "
    "user.max_user_namespaces=10000`, on Debian also `kernel.unprivileged_userns_clone=1`, on Ubuntu also "
    "`kernel.apparmor_restrict_unprivileged_userns=0`. "
    "Without an emulated network, plain `torchrun` runs the same script over loopback."
)


def _failure_of_direct_use() -> str | None:
    return "not root" if os.geteuid() != 0 else _probe("unshare", "-nm")


@functools.cache
def _probe(*prefix: str) -> str | None:
    """Run the trial under `prefix`, once. Returns its error, or None."""
    command, environment = [*prefix, "sh", "-c", _PROBE], tool_environment()
    try:
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "the trial did not end within 20 s"
    if finished.returncode == 0:
        return None
    return " ".join(finished.stderr.split()) or f"exit code {finished.returncode}"
