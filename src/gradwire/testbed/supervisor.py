"""Start the ranks, gather what they say, pass signals on, and see that none outlives the run."""

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire.errors import TestbedError
from gradwire.testbed.output import LineCallback, LineSplitter
from gradwire.testbed.signals import Received, recorded

log = logging.getLogger("gradwire.testbed")

TIMED_OUT = 124  # as timeout(1) has it

_TICK_SECONDS = 0.1
_DRAIN_SECONDS = 5.0
_READ_BYTES = 256 * 1024


@dataclass(frozen=True)
class RankCommand:
    """What one rank executes, with which whole environment."""

    rank: int
    argv: list[str]
    environment: dict[str, str]


def rank_variables(
    rank: int, nodes: int, ranks_per_node: int, address: str, port: int, interface: str
) -> dict[str, str]:
    """What torchrun sets for a rank, and the interface that each backend would else guess."""
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
    """Seconds that ranks get: after another rank failed, and between a polite signal and SIGKILL."""

    after_failure: float = 10.0
    after_signal: float = 10.0


@dataclass(frozen=True)
class Outcome:
    """The first non-zero exit code (128 + signal as shells have it), and the stopping signal that was passed on."""

    code: int
    received: int | None


@dataclass
class _Stream:
    rank: int
    name: str
    splitter: LineSplitter = field(default_factory=LineSplitter)


class Supervisor:
    """One run of all ranks. `end_leftovers` kills what ranks leave behind."""

    def __init__(self, on_line: LineCallback, grace: Grace, end_leftovers: Callable[[], object] = lambda: None) -> None:
        self._on_line = on_line
        self._end_leftovers = end_leftovers
        self._grace = grace
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._code = 0
        self._steps: list[tuple[float, int]] | None = None  # the way to the end: (when, signal to send), soonest first
        self._stopping = False  # by a signal, or by the timeout: failures are no news any more

    def run(self, commands: list[RankCommand], timeout: float | None) -> Outcome:
        """Run all commands to their end. The calling thread must live as long: ranks are killed when it ends."""
        with recorded() as received:
            deadline = float("inf") if timeout is None else time.monotonic() + timeout
            try:
                for command in commands:
                    self._start(command)
                while self._running:
                    self._handle_events(_TICK_SECONDS)
                    self._react(received, deadline)
            except BaseException:
                self._on_line = _discard
                raise
            finally:
                self._steps = []
                self._kill(signal.SIGKILL)
                self._end_leftovers()
                self._close()
        return Outcome(self._code, received.first)

    def _start(self, command: RankCommand) -> None:
        try:
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=command.environment,
                start_new_session=True,  # the terminal's Ctrl-C reaches the supervisor alone, which passes it on once
            )
        except OSError as error:
            raise TestbedError(f"rank {command.rank} could not be started: {error}. See `ulimit -a`.") from error
        self._running[command.rank] = process
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, command.rank)
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            self._selector.register(os.dup(pipe.fileno()), selectors.EVENT_READ, _Stream(command.rank, name))
            pipe.close()

    def _handle_events(self, timeout: float) -> bool:
        events = self._selector.select(timeout)
        for key, _ in events:
            if isinstance(key.data, _Stream):
                self._read(key.fd, key.data)
            else:
                self._reap(key.fd, key.data)
        return bool(events)

    def _read(self, descriptor: int, stream: _Stream) -> None:
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
        for line in stream.splitter.feed(data) if data else stream.splitter.finish():
            self._on_line(stream.rank, stream.name, line)

    def _reap(self, descriptor: int, rank: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        status = self._running.pop(rank).wait()
        code = status if status >= 0 else 128 - status
        if code and not self._code:
            self._code = code
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
            log.warning("time is over, and ranks %s still run; they are ended", sorted(self._running))
            self._end_politely(now, signal.SIGTERM)
        if received.insisted:
            self._steps = [(now, signal.SIGKILL)]
        while self._steps and self._steps[0][0] <= now:
            self._kill(self._steps.pop(0)[1])

    def _end_politely(self, when: float, number: int) -> None:
        self._steps = [(when, number), (when + self._grace.after_signal, signal.SIGKILL)]

    def _kill(self, number: int) -> None:
        """Signal each rank's process group: the rank, and helpers that it started as a shell would."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _close(self) -> None:
        """Take in what is still in the pipes, and the dead. Only a process that left its namespace can hold this up."""
        try:
            while self._selector.get_map() and self._handle_events(_DRAIN_SECONDS):
                pass
        finally:
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            for process in self._running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_DRAIN_SECONDS)


def _discard(rank: int, stream: str, line: str) -> None:
    """What ranks say after the caller's own callback has failed."""
