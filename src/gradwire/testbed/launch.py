"""Ties this process to its supervisor, then becomes the rank: `python -I -S launch.py SUPERVISOR HOST HOSTS PROCESSORS
...`.

SUPERVISOR is a process id, HOST the name of the node, HOSTS the text of its /etc/hosts, PROCESSORS a list of processor
numbers with commas. The program and its arguments follow. This code is a separate program, because code between fork and
exec is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUTS = 0x04000000
_MS_BIND = 4096
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: object) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def _name_node(name: str, hosts: str) -> None:
    """Set the node's host name and a hosts file with all nodes, because programs distinguish machines by host name.

    `ip netns exec` made a mount namespace for this process, so no other process sees the file.
    """
    _call("unshare", _CLONE_NEWUTS)
    socket.sethostname(name)
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None)
    try:
        with open("/tmp/hosts", "w") as file:
            file.write(hosts)
        _call("mount", b"/tmp/hosts", b"/etc/hosts", None, ctypes.c_ulong(_MS_BIND), None)
    finally:
        _call("umount2", b"/tmp", _MNT_DETACH)


def main() -> None:
    """Ask for SIGKILL at the supervisor's death, check that the supervisor still lives, and exec."""
    supervisor, name, hosts, processors, *argv = sys.argv[1:]
    _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(supervisor):
        sys.exit("gradwire: the supervisor died before its rank began")
    try:
        _name_node(name, hosts)
    except OSError as error:  # addresses work without names
        print(f"gradwire: {name} keeps this machine's name and hosts file: {error.strerror}", file=sys.stderr)
    os.sched_setaffinity(0, map(int, processors.split(",")))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and an ignored signal stays so across exec
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"gradwire: cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(126 if isinstance(error, PermissionError) else 127)


if __name__ == "__main__":
    main()
