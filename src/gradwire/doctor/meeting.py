"""The ranks of a job meet at the store at MASTER_ADDR:MASTER_PORT. Each tells notes there; every call has an end.

The store's own timeouts do not hold when the process that hosts it is stopped, so calls are made on a thread that is
left behind when it does not come back. Notes travel over the store, so that rank 0 hears of a rank even when gloo cannot
reach it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from gradwire.doctor.differences import rank_list

T = TypeVar("T")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MARGIN_S = 5.0
_SLICE_S = 0.5


@dataclass(frozen=True)
class Job:
    """The variables that torchrun, or whoever starts the ranks, sets for each."""

    rank: int
    world_size: int
    address: str
    port: int
    store_is_launchers: bool
    """torchrun hosts the store itself; otherwise rank 0 does."""
    attempt: str

    @staticmethod
    def of(environ: Mapping[str, str]) -> "Job | None":
        """The job of this process, None outside of one. Raises ValueError where the variables cannot be meant."""
        present = [name for name in _NEEDED if environ.get(name)]
        if not {"RANK", "WORLD_SIZE"} & set(present):
            return None
        if missing := [name for name in _NEEDED if name not in present]:
            raise ValueError(f"{', '.join(present)} set, but not {', '.join(missing)}")
        rank, world_size, port = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks count from 0")
        if not 0 < port < 2**16:
            raise ValueError(f"MASTER_PORT is {port}, which is no port")
        launchers = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Job(rank, world_size, environ["MASTER_ADDR"], port, launchers, attempt)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}, which is no number")
    return int(text)


def bounded(function: Callable[[], T], seconds: float) -> T:
    """What the function returns or raises; TimeoutError when it takes longer. Its thread is then left behind, a daemon."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="gradwire-doctor", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no end after {seconds:.0f} s")
    return future.result()


class Meeting:
    """One rank's side of the meeting. Its calls raise ConnectionError with the reason when the host of the store is gone."""

    def __init__(self, job: Job, timeout_s: float) -> None:
        """Reach the store within the timeout; rank 0 hosts it where the launcher does not."""
        self.job, self.timeout_s = job, timeout_s
        self._host = "torchrun on the first node" if job.store_is_launchers else "rank 0"
        self._place = f"the meeting point of the ranks at {job.address}:{job.port}"
        hosts = job.rank == 0 and not job.store_is_launchers
        try:
            self.store = bounded(lambda: self._reach(hosts), timeout_s + _MARGIN_S)
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
            place = f"{self._place} (MASTER_ADDR:MASTER_PORT)"
            said = next(iter(str(error).strip().splitlines()), "no reason was given")
            raise ConnectionError(
                f"rank 0 cannot open {place}. Is that an address of this machine, and does another program, or a second "
                f"rank 0, hold the port? ({said})"
                if hosts
                else f"rank {job.rank} did not reach {place} within {timeout_s:g} s: {self._host} did not come, or the "
                f"address is wrong or behind a firewall. ({said})"
            ) from error

    def _reach(self, hosts: bool) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its __all__

        limit, job = timedelta(seconds=self.timeout_s), self.job
        store = TCPStore(job.address, job.port, job.world_size, hosts, limit, wait_for_workers=False)
        return PrefixStore(f"gradwire-doctor/{job.attempt}", store)

    def count(self, name: str, more: int = 1) -> int:
        """Add to a number that begins at 0; the sum."""
        return self._ask(lambda: int(self.store.add(name, more)))

    def tell(self, what: str, note: object, number: int | None = None) -> None:
        """Leave a note under this rank's number, or another one."""
        name = f"{what}/{self.job.rank if number is None else number}"
        self._ask(lambda: self.store.set(name, msgspec.json.encode(note)))

    def hear(
        self,
        what: str,
        ranks: Iterable[int],
        kind: type[T],
        patience_s: float,
        say: Callable[[str], None] = lambda text: None,
    ) -> dict[int, T]:
        """What ranks told about something, by rank, without those that told nothing in time."""
        from torch.distributed import DistStoreError

        names = {rank: f"{what}/{rank}" for rank in ranks}
        told: dict[int, T] = {}
        deadline = time.monotonic() + patience_s

        def look(missing: list[int], seconds: float) -> dict[int, bytes]:
            with suppress(DistStoreError):  # not all are there yet
                self.store.wait([names[rank] for rank in missing], timedelta(seconds=seconds))
            return {rank: self.store.get(names[rank]) for rank in missing if self.store.check([names[rank]])}

        while missing := [rank for rank in names if rank not in told]:
            say(f"waiting for {rank_list(missing)} of {self.job.world_size}")
            seconds = min(_SLICE_S, max(0.01, deadline - time.monotonic()))  # the store takes 0 for no limit
            notes = self._ask(lambda missing=missing, seconds=seconds: look(missing, seconds))  # type: ignore[misc]
            told |= {rank: msgspec.json.decode(note, type=kind) for rank, note in notes.items()}
            if time.monotonic() > deadline:
                break
        return told

    def hear_rank_0(self, what: str, kind: type[T], patience_s: float) -> T:
        """What rank 0 told about something."""
        told = self.hear(what, [0], kind, patience_s)
        if not told:
            raise ConnectionError(
                f"rank {self.job.rank} heard nothing from rank 0 for {patience_s:.0f} s. See rank 0's own log."
            )
        return told[0]

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return bounded(call, self.timeout_s + _SLICE_S)
        except (TimeoutError, RuntimeError) as error:
            how = "hangs" if isinstance(error, TimeoutError) else "has ended"
            raise ConnectionError(
                f"rank {self.job.rank}: {self._place} does not answer any more: the process that hosts it ({self._host}) "
                f"{how}. See its own log."
            ) from error
