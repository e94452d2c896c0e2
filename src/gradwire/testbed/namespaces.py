"""Network namespaces whose names contain the owner, so that the next run can remove the namespaces of a dead run.

A name is `gradwire-<pid>-<start time of pid>-<serial>-<part>`. The start time (field 22 of /proc/PID/stat, in clock ticks
since boot) distinguishes the owner from a later process with the same id.
"""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gradwire.errors import TestbedError

NAMESPACE_FOLDER = Path("/run/netns")
OWNER_VARIABLE = "GRADWIRE_TESTBED_OWNER"  # in the environment of every rank and of its children

_NAME = re.compile(r"gradwire-(\d+)-(\d+)-\d+-(?:hub|node\d+)")
_OWNER = re.compile(r"(\d+)-(\d+)")
_TOOL_SECONDS = 30.0
_KILL_SECONDS = 5.0


def tool_environment() -> dict[str, str]:
    """The environment for `ip` and `tc`: the administrator's folders on PATH, and messages in English."""
    return os.environ | {"PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/bin:/bin", "LC_ALL": "C"}


def find_tool(name: str) -> str | None:
    """The path of a program of the administrator."""
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
    """The start of a process in clock ticks since boot; None if the process does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


@functools.cache
def _owner_of(pid: int) -> str:
    return f"{pid}-{start_time(pid)}"


def this_owner() -> str:
    """`<pid>-<start time>` of this process."""
    return _owner_of(os.getpid())


def existing(prefix: str = "gradwire-") -> list[str]:
    """The names of gradwire's namespaces that begin with `prefix`."""
    try:
        names = sorted(os.listdir(NAMESPACE_FOLDER))
    except OSError:
        return []
    return [name for name in names if _NAME.fullmatch(name) and name.startswith(prefix)]


def remove(names: Iterable[str]) -> list[str]:
    """Kill the processes in these namespaces and remove the namespaces. Returns one line for each failure."""
    complaints = []
    names = list(names)
    survivors = kill_inside(names)
    if survivors:
        complaints.append(f"processes {survivors} are still in {', '.join(names)} {_KILL_SECONDS:.0f} s after SIGKILL")
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
                complaints.append(f"namespace {name} could not be removed: {error}")
    return complaints


def sweep() -> list[str]:
    """Remove the namespaces and processes of dead owners."""
    kill_marked_orphans()
    return remove(name for name in existing() if (match := _NAME.fullmatch(name)) and not _lives(match[1], match[2]))


def kill_inside(names: Iterable[str]) -> list[int]:
    """SIGKILL every process in these namespaces and wait. Returns the ids of survivors."""
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
    """SIGKILL the processes whose environment names a dead owner."""
    marker = f"{OWNER_VARIABLE}=".encode()
    ours = os.stat("/proc/self/ns/pid").st_ino

    def is_orphan(pid: int) -> bool:
        if os.stat(f"/proc/{pid}/ns/pid").st_ino != ours:
            return False  # a process of a container: the owner's id belongs to another namespace
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(marker):
                match = _OWNER.fullmatch(entry[len(marker) :].decode(errors="replace"))
                return match is not None and not _lives(match[1], match[2])
        return False

    return _kill_where(is_orphan)


def _kill_where(condition: Callable[[int], bool]) -> list[int]:
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        found = [pid for pid in _process_ids() if _kill_if(pid, condition)]
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


def _process_ids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def _lives(pid: str, started: str) -> bool:
    return start_time(int(pid)) == int(started)
