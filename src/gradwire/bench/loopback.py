"""Runs ranks as plain processes over loopback, for machines on which network namespaces cannot be made."""

import os
import signal
from contextlib import AbstractContextManager

from gradwire.errors import TestbedError
from gradwire.testbed import Grace, LineCallback, RankCommand, Supervisor, exit_on_termination, free_port, rank_variables

LOOPBACK = "lo"


class Loopback(AbstractContextManager["Loopback"]):
    """`world_size` ranks on this machine as one node, with the interface of `gradwire.testbed.EmulatedCluster`.

    The ranks share no memory unless `env` allows it, because loopback stands for a network.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __exit__(self, *error: object) -> None: ...

    def set_inter(self, rate: str | None) -> None:
        """Do nothing without a limit. Raises `TestbedError` for any limit, because loopback has none."""
        if rate is not None:
            raise TestbedError(f"link {rate} cannot be measured: plain loopback cannot limit the rate.")

    def run(
        self, argv: list[str], *, env: dict[str, str] | None = None, on_line: LineCallback, timeout: float | None = None
    ) -> int:
        """Run `argv` once per rank, as `EmulatedCluster.run` does."""
        commands, port = [], free_port()
        for rank in range(self.world_size):
            variables = rank_variables(rank, 1, self.world_size, "127.0.0.1", port, LOOPBACK)
            no_memory = {"GRADWIRE_SHARED_MEMORY": "off"}
            commands.append(RankCommand(rank, argv, os.environ | no_memory | (env or {}) | variables))
        with exit_on_termination():
            outcome = Supervisor(on_line, Grace()).run(commands, timeout)
            if outcome.received is not None:
                signal.raise_signal(outcome.received)
        return outcome.code
