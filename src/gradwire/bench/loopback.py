"""Plain processes over loopback: what the bench uses where no network namespaces may be made."""

import os
import signal
import socket
from types import TracebackType
from typing import Self

from gradwire.errors import TestbedError
from gradwire.testbed.output import LineCallback
from gradwire.testbed.signals import exit_on_termination
from gradwire.testbed.supervisor import Grace, RankCommand, Supervisor, rank_variables

__all__ = ["LOOPBACK", "Loopback"]

LOOPBACK = "lo"


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
        """As `Cluster.run`: `argv` once per rank; 0, or the exit code of the first rank that failed, 124 on timeout."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = os.environ | (env or {})
        variables = [
            rank_variables(rank, 1, self.world_size, "127.0.0.1", port, LOOPBACK) for rank in range(self.world_size)
        ]
        commands = [RankCommand(rank, argv, environment | own) for rank, own in enumerate(variables)]
        with exit_on_termination():
            outcome = Supervisor(on_line, Grace()).run(commands, timeout)
            if outcome.received is not None:
                signal.raise_signal(outcome.received)
        return outcome.code
