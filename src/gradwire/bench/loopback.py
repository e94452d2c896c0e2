"""Plain processes over loopback: what the bench uses where no network namespaces may be made."""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Self

from gradwire.errors import TestbedError
from gradwire.testbed.signals import ExitOnTermination

__all__ = ["LOOPBACK", "LineCallback", "Loopback"]

LineCallback = Callable[[int, str, str], None]
"""rank, stream ("stdout" or "stderr"), line without its newline."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TIMED_OUT = 124
TICK_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""What the other ranks get after one has failed, and between SIGTERM and SIGKILL."""


class Loopback:
    """`world_size` ranks on this machine as one node, with the interface of `gradwire.testbed.Cluster`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing outlives `run`."""

    def set_inter(self, rate: str | None) -> None:
        """Raises `TestbedError` for any limit: loopback has none."""
        if rate is not None:
            raise TestbedError(f"plain loopback has no limit, so the link {rate} cannot be measured on it.")

    def run(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        on_line: LineCallback,
        timeout: float | None = None,
    ) -> int:
        """Execute `argv` once per rank and wait; 0, or the exit code of the first rank that failed, 124 on timeout.

        Where SIGTERM or SIGHUP would end this process they end the ranks first.
        """
        port = _free_port()
        lines: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
        ranks: list[subprocess.Popen[str]] = []
        readers: list[threading.Thread] = []
        terminations = ExitOnTermination()
        terminations.install()
        try:
            for rank in range(self.world_size):
                process = _start(argv, os.environ | (env or {}) | self._variables(rank, port))
                ranks.append(process)
                readers += _readers(rank, process, lines)
            return _wait(ranks, lambda: _hand_on(lines, on_line), timeout)
        finally:
            for process in ranks:
                _signal(process, signal.SIGKILL)
                process.wait()
            for reader in readers:
                reader.join(TICK_SECONDS)
            _hand_on(lines, on_line)
            terminations.restore()

    def _variables(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun sets on a machine of one node."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": LOOPBACK,
        }


def _start(argv: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        start_new_session=True,
    )


def _readers(
    rank: int, process: subprocess.Popen[str], lines: queue.SimpleQueue[tuple[int, str, str]]
) -> list[threading.Thread]:
    """Threads that put what a rank says on the queue, so that the caller's callback runs in the caller's thread."""

    def read(name: str, pipe: IO[str]) -> None:
        for line in pipe:
            lines.put((rank, name, line.rstrip("\n")))

    assert process.stdout is not None and process.stderr is not None
    threads = [
        threading.Thread(target=read, args=(name, pipe), daemon=True)
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr))
    ]
    for thread in threads:
        thread.start()
    return threads


def _wait(ranks: list[subprocess.Popen[str]], hand_on: Callable[[], None], timeout: float | None) -> int:
    """Wait for all ranks; once one has failed, or time is over, the others are ended after a grace."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    code = 0
    terminate = kill = float("inf")
    while any(process.poll() is None for process in ranks):
        hand_on()
        now = time.monotonic()
        failed = next((p.returncode for p in ranks if p.returncode), 0)
        if code == 0 and (failed or now > deadline):
            code = failed or TIMED_OUT
            terminate = now + (GRACE_SECONDS if failed else 0.0)
            kill = terminate + GRACE_SECONDS
        if now >= terminate:
            for process in ranks:
                _signal(process, signal.SIGKILL if now >= kill else signal.SIGTERM)
        time.sleep(TICK_SECONDS)
    code = code or next((p.returncode for p in ranks if p.returncode), 0)
    return code if code >= 0 else 128 - code


def _signal(process: subprocess.Popen[str], number: int) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _hand_on(lines: queue.SimpleQueue[tuple[int, str, str]], on_line: LineCallback) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            on_line(*lines.get_nowait())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
