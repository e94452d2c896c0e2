"""A board that all ranks see: notes under names, in the store at MASTER_ADDR:MASTER_PORT. Every call has an end.

The store's own timeouts do not hold when the process that hosts it is stopped, so calls are made on a thread that is
left behind when it does not come back.
"""

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from gradwire.doctor.job import Job

__all__ = ["Board", "bounded"]

T = TypeVar("T")
_MARGIN_S = 5.0


def bounded(function: Callable[[], T], seconds: float) -> T:
    """What the function returns or raises; TimeoutError when it takes longer. Its thread is then left behind, a daemon."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="gradwire-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no end after {seconds:.0f} s")
    return outcome[0]


class Board:
    """One rank's view of the board. Its calls raise ConnectionError in words when the host of the store is gone."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        """Reach the store within the timeout; rank 0 hosts it where the launcher does not."""
        self._job, self._timeout_s = job, timeout_s
        hosts = job.rank == 0 and not job.store_is_launchers
        limit_s = timeout_s if hosts else self._await_listener()
        try:
            self.store = bounded(lambda: self._connect(hosts, limit_s), limit_s + _MARGIN_S)
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
            raise ConnectionError(self._not_open(str(error)) if hosts else self._not_reached(str(error))) from error

    def _await_listener(self) -> float:
        """Until somebody listens; the seconds that are left then. Quiet, unlike the store's own attempts."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                socket.create_connection((self._job.address, self._job.port), timeout=2.0).close()
                return max(1.0, deadline - time.monotonic())
            except (OSError, UnicodeError) as error:  # the second of what can be no host name
                if time.monotonic() > deadline or isinstance(error, UnicodeError):
                    raise ConnectionError(self._not_reached(str(error))) from error
            time.sleep(0.1)

    def _connect(self, hosts: bool, limit_s: float) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its __all__

        store = TCPStore(
            self._job.address,
            self._job.port,
            self._job.world_size,
            is_master=hosts,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )
        return PrefixStore(f"gradwire-doctor/{self._job.attempt}", store)

    def put(self, name: str, note: bytes) -> None:
        self._ask(lambda: self.store.set(name, note))

    def take(self, name: str) -> bytes | None:
        """The note of this name, None if there is none yet."""

        def look() -> bytes | None:
            return self.store.get(name) if self.store.check([name]) else None

        return self._ask(look)

    def count(self, name: str, more: int = 1) -> int:
        """Add to a number that begins at 0; the sum."""
        return self._ask(lambda: int(self.store.add(name, more)))

    def wait(self, name: str, patience_s: float) -> bytes | None:
        """The note of this name as soon as it is there; None when patience is at its end."""
        from torch.distributed import DistStoreError

        deadline = time.monotonic() + patience_s
        while (left_s := deadline - time.monotonic()) > 0:
            slice_s = min(left_s, self._timeout_s)
            try:
                self._ask(lambda slice_s=slice_s: self.store.wait([name], timedelta(seconds=slice_s)), slice_s)  # type: ignore[misc]
            except DistStoreError:  # not yet
                continue
            return self.take(name)
        return None

    def _ask(self, call: Callable[[], T], seconds: float = 0.0) -> T:
        try:
            return bounded(call, seconds + self._timeout_s)
        except TimeoutError as error:
            raise self._lost("does not answer any more: the process that hosts it hangs") from error
        except RuntimeError as error:
            if "timeout" in str(error).lower():
                raise
            raise self._lost("is gone: the process that hosts it has ended") from error

    def _lost(self, how: str) -> ConnectionError:
        host = "torchrun on the first node" if self._job.store_is_launchers else "rank 0"
        return ConnectionError(
            f"rank {self._job.rank}: the meeting point of the ranks at {self._job.place} {how} ({host}). See its own log."
        )

    def _not_open(self, said: str) -> str:
        return (
            f"rank 0 cannot open the meeting point of the ranks at {self._job.place} (MASTER_ADDR:MASTER_PORT). Is that an "
            f"address of this machine, and does another program, or a second rank 0, hold the port? ({_first_line(said)})"
        )

    def _not_reached(self, said: str) -> str:
        who = "torchrun on the first node" if self._job.store_is_launchers else "rank 0"
        return (
            f"rank {self._job.rank} did not reach the meeting point of the ranks at {self._job.place} "
            f"(MASTER_ADDR:MASTER_PORT) within {self._timeout_s:g} s: {who} did not come, or the address is wrong or "
            f"behind a firewall. ({_first_line(said)})"
        )


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no reason was given")
