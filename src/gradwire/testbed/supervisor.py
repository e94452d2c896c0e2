"""Starts the ranks, gathers their output, passes signals on, and ends all ranks with the run."""

import contextlib
import logging
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from gradwire.errors import TestbedError

log = logging.getLogger("gradwire.testbed")

TIMED_OUT = 124  # as timeout(1) has it
LineCallback = Callable[[int, str, str], None]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TICK_SECONDS = 0.1
_DRAIN_SECONDS = 5.0
_MOST_LINES = 10_000
_LONGEST_LINE = 16 * 1024 * 1024  # characters; longer lines are split, so that memory stays bounded


class Received:
    """The stopping signals so far: the first one, and whether another one followed later."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.insisted = False
        self._first_at = 0.0

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal. Signals within a second are one request, because timeout(1) sends two."""
        now = time.monotonic()
        if self.first is None:
            self.first, self._first_at = number, now
        elif now - self._first_at > 1.0:
            self.insisted = True


@contextlib.contextmanager
def recorded() -> Iterator[Received]:
    """Record stopping signals instead of acting on them. Ignored signals (nohup) stay ignored. Main thread only."""
    received = Received()
    heeded = [number for number in STOPPING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    with _handled(heeded, received.note):
        yield received


def exit_on_termination() -> contextlib.AbstractContextManager[None]:
    """Return a context in which SIGTERM and SIGHUP raise SystemExit(128 + signal), so that cleanup runs."""
    deadly = [number for number in STOPPING[1:] if signal.getsignal(number) is signal.SIG_DFL]
    return _handled(deadly, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def _handled(numbers: list[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Pass these signals to the handler. Does nothing outside of the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@dataclass(frozen=True)
class RankCommand:
    """The command of one rank and its whole environment."""

    rank: int
    argv: list[str]
    environment: dict[str, str]


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that no process uses now.

    The port is below the kernel's range for connections and for port 0. A port in that range may be given to another
    process between this call and the moment when a rank listens on it.
    """
    first_of_range = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:  # not with `random`, which two processes may have seeded alike
        port = 10_000 + secrets.randbelow(max(first_of_range - 10_000, 1_000))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def rank_variables(rank: int, nodes: int, ranks_per_node: int, address: str, port: int, interface: str) -> dict[str, str]:
    """Return torchrun's variables of a rank, and the network interface for each backend."""
    node, local_rank = divmod(rank, ranks_per_node)
    world_size = str(nodes * ranks_per_node)
    return {
        **dict.fromkeys(("RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        **dict.fromkeys(("GROUP_RANK", "NODE_RANK"), str(node)),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface),
    }


@dataclass(frozen=True)
class Grace:
    """Seconds from a rank's failure to the end of the others, and from a polite signal to SIGKILL."""

    after_failure: float = 10.0
    after_signal: float = 10.0


@dataclass(frozen=True)
class ProcessEnd:
    """The first non-zero exit code (128 + signal, as in shells), and the stopping signal that was passed on."""

    code: int
    received: int | None


class Supervisor:
    """Runs all ranks once. on_line: `print_with_prefix` by default. `end_leftovers` kills what ranks leave behind."""

    def __init__(self, on_line: LineCallback | None, grace: Grace, end_leftovers: Callable[[], object] = lambda: None) -> None:
        self._on_line = on_line or print_with_prefix
        self._end_leftovers = end_leftovers
        self._grace = grace
        self._said: queue.Queue[tuple[int, str, str | None]] = queue.Queue(_MOST_LINES)
        self._watchers = 0  # number of threads that have not ended
        self._running: dict[int, subprocess.Popen[str]] = {}  # by rank
        self._code = 0
        self._steps: list[tuple[float, int]] | None = None  # the planned (time, signal) pairs, soonest first
        self._stopping = False  # by a signal or the timeout: later failures do not count

    def run(self, commands: list[RankCommand], timeout: float | None) -> ProcessEnd:
        """Run all commands to their end. The ranks are killed when the calling thread ends."""
        with recorded() as received:
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            try:
                for command in commands:
                    self._start(command)
                while self._running:
                    self._hand_on(_TICK_SECONDS)
                    self._react(received, deadline)
            except BaseException:
                self._on_line = lambda *line: None  # the callback may have raised
                raise
            finally:
                self._steps = []
                self._kill(signal.SIGKILL)
                self._end_leftovers()
                self._close()
        return ProcessEnd(self._code, received.first)

    def _start(self, command: RankCommand) -> None:
        try:
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="backslashreplace",
                env=command.environment,
                start_new_session=True,  # only the supervisor gets the terminal's Ctrl-C and passes it on
            )
        except OSError as error:
            raise TestbedError(f"rank {command.rank} could not be started: {error}. Check `ulimit -a`.") from error
        self._running[command.rank] = process
        assert process.stdout is not None and process.stderr is not None
        for watch in (
            partial(self._read, command.rank, "stdout", process.stdout),
            partial(self._read, command.rank, "stderr", process.stderr),
            partial(self._await_end, command.rank, process.pid),
        ):
            self._watchers += 1
            threading.Thread(target=watch, daemon=True).start()

    def _read(self, rank: int, name: str, pipe: IO[str]) -> None:
        r"""Read lines, which end at \n, \r\n and \r (progress bars). Bytes that are not UTF-8 become backslash
        escapes."""
        with pipe:
            for line in iter(lambda: pipe.readline(_LONGEST_LINE), ""):
                self._said.put((rank, name, line.removesuffix("\n")))
        self._said.put((rank, name, None))

    def _await_end(self, rank: int, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # keeps the id, so signals reach no other process
        self._said.put((rank, "", None))

    def _hand_on(self, seconds: float) -> bool:
        """Pass lines on for so many seconds or until a rank or all output ends. Returns whether there were any."""
        until, any_line = time.monotonic() + seconds, False
        while self._watchers and (left := until - time.monotonic()) > 0:
            try:
                rank, name, line = self._said.get(timeout=left)
            except queue.Empty:
                break
            any_line = True
            if line is not None:
                self._on_line(rank, name, line)
                continue
            self._watchers -= 1
            if not name and rank in self._running:
                self._reap(rank)
                break
        return any_line

    def _reap(self, rank: int) -> None:
        status = self._running.pop(rank).wait()
        code = status if status >= 0 else 128 - status
        self._code = self._code or code
        if code and self._running and self._steps is None:
            wait = self._grace.after_failure
            log.warning("rank %d ended with exit code %d; the others are ended in %.0f s", rank, code, wait)
            self._end_politely(time.monotonic() + wait, signal.SIGTERM)

    def _react(self, received: Received, deadline: float) -> None:
        now = time.monotonic()
        if received.first is not None and not self._stopping:
            self._stopping = True
            log.warning("%s goes to ranks %s", signal.Signals(received.first).name, sorted(self._running))
            self._end_politely(now, received.first)
        elif now > deadline and not self._stopping:
            self._stopping = True
            self._code = self._code or TIMED_OUT
            log.warning("the timeout has passed; ranks %s still run and are ended", sorted(self._running))
            self._end_politely(now, signal.SIGTERM)
        if received.insisted:
            self._steps = [(now, signal.SIGKILL)]
        while self._steps and self._steps[0][0] <= now:
            self._kill(self._steps.pop(0)[1])

    def _end_politely(self, when: float, number: int) -> None:
        self._steps = [(when, number), (when + self._grace.after_signal, signal.SIGKILL)]

    def _kill(self, number: int) -> None:
        """Signal each rank's process group: the rank and its children."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _close(self) -> None:
        """Read the rest of the pipes and wait for the ranks. Only a process that left its namespace can delay this."""
        while self._watchers and self._hand_on(_DRAIN_SECONDS):
            pass
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DRAIN_SECONDS)


def print_with_prefix(rank: int, stream: str, line: str) -> None:
    """Print `[rank] line` on the stream it came from."""
    target = sys.stderr if stream == "stderr" else sys.stdout
    encoding = getattr(target, "encoding", None) or "utf-8"
    try:
        print(f"[{rank}] {line}".encode(encoding, "backslashreplace").decode(encoding), file=target, flush=True)
    except BrokenPipeError:
        raise  # the reader of the output has ended
    except OSError as error:
        raise TestbedError(f"the output of rank {rank} cannot be printed: {error.strerror or error}.") from error
