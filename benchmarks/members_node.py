"""What runs on each emulated node of `python -m benchmarks members`: `python -m benchmarks.members_node FOLDER ARM ADDRESS`.

The last node serves the lighthouse at ADDRESS. Every other one starts a member, and starts it again where it ends, until the file
FOLDER/end is there. This process imports nothing large.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["LEAST", "MEMBERS", "PORT", "await_"]

MEMBERS = 4
LEAST = 2
"""Members of a step, at least."""
PORT = 29600
"""Of the lighthouse, on the node after those of the members."""
RESTART_S = 3.0
"""From a member's end to its next start."""
SILENCE_S = 1.0
"""Of the lighthouse, for all arms."""


def await_(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    while not condition():
        time.sleep(0.1)


def serve(end: Path, address: str) -> None:
    """Serve the lighthouse."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind=f"{address}:{PORT}",
        min_replicas=LEAST,
        join_timeout_ms=600_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=round(1e3 * SILENCE_S),
    )
    await_(end.exists)
    lighthouse.shutdown()


def keep_a_member(end: Path, address: str, command: list[str]) -> None:
    """Start a member again and again."""
    await_(lambda: end.exists() or _listens(address))
    while not end.exists():
        with subprocess.Popen(command) as member:
            await_(lambda member=member: end.exists() or member.poll() is not None)  # type: ignore[misc]
            if end.exists():
                member.send_signal(signal.SIGKILL)
                return
        time.sleep(RESTART_S)


def _listens(address: str) -> bool:
    try:
        socket.create_connection((address, PORT), 1.0).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    place, arm, host = sys.argv[1:]
    rank, over = int(os.environ["RANK"]), Path(place) / "end"
    if rank == MEMBERS:
        serve(over, host)
    else:
        keep_a_member(over, host, [sys.executable, "-u", "-m", "benchmarks.members_worker", place, arm, str(rank)])
