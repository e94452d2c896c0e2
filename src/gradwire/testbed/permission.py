"""The permission to make network namespaces, as root or inside a user namespace."""

import functools
import os
import subprocess

from gradwire.errors import TestbedError
from gradwire.testbed.namespaces import find_tool, kill_marked_orphans, tool_environment

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


def permission_problem() -> str | None:
    """Why namespaces cannot be made here, or None if they can. The first call tries; later calls return its answer."""
    missing = [tool for tool in ("ip", "tc", "unshare", "mount") if find_tool(tool) is None]
    if missing:
        package = "iproute2" if {"ip", "tc"} & set(missing) else "util-linux"
        return f"the program{'s' * (len(missing) > 1)} {' and '.join(missing)} cannot be found (install {package})"
    direct = _failure_of_direct_use()
    if direct is None:
        return None
    in_user_namespace = _failure_in_user_namespace()
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
    """True if namespaces can be made, but only after `reexec_in_user_namespace_if_needed`."""
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


@functools.cache
def _failure_of_direct_use() -> str | None:
    if os.geteuid() != 0:
        return "not root"
    return _probe(["unshare", "-nm"])


@functools.cache
def _failure_in_user_namespace() -> str | None:
    return _probe(_USER_NAMESPACE)


def _probe(prefix: list[str]) -> str | None:
    """Run the trial under `prefix`. Returns its error, or None."""
    command, environment = [*prefix, "sh", "-c", _PROBE], tool_environment()
    try:
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "the trial did not end within 20 s"
    if finished.returncode == 0:
        return None
    return " ".join(finished.stderr.split()) or f"exit code {finished.returncode}"
