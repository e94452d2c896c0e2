"""From a failed collective to an error that names the bucket and the ranks waited for."""

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d

from gradwire.collectives import Group, LinkError
from gradwire.errors import CommunicationError, GradwireError, StepStateError

__all__ = ["RollCall", "communication_error", "local_error"]


class RollCall:
    """After a failure the ranks that noticed sign in the rendezvous store; who does not sign is who was waited for.

    The store has a connection of its own, made at the start, and is only asked from a thread with a deadline: the rank
    that hosts it may be the one that died.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._prefix = group, f"gradwire/{name}/failed"
        self._store: Any = None
        with contextlib.suppress(Exception):
            store: Any = distributed_c10d._get_default_store()
            self._store = store.clone()

    def missing(self, step: int, patience_s: float) -> list[int]:
        """Global ranks that did not sign within the patience; all others where the store is gone."""
        group = self._group
        present = {group.rank}

        def call() -> None:
            store = self._store
            if store is None:
                return
            deadline = time.monotonic() + patience_s
            with contextlib.suppress(Exception):
                store.set(f"{self._prefix}/{step}/{group.rank}", "here")
                while time.monotonic() < deadline and len(present) < group.world_size:
                    for rank in range(group.world_size):
                        if rank not in present and store.check([f"{self._prefix}/{step}/{rank}"]):
                            present.add(rank)
                    time.sleep(0.05)

        caller = threading.Thread(target=call, name="gradwire-roll-call", daemon=True)
        caller.start()
        caller.join(patience_s + 0.5)
        return [group.global_ranks[rank] for rank in range(group.world_size) if rank not in present]


def communication_error(
    what: str, cause: BaseException, step: int, group: Group, roll_call: RollCall
) -> CommunicationError:
    """What to raise when what was waited for failed."""
    silent = roll_call.missing(step, patience_s=min(2.0, group.timeout.total_seconds() / 10))
    peer = group.global_ranks[cause.peer] if isinstance(cause, LinkError) and cause.peer is not None else None
    others = [rank for rank in silent if rank != peer]
    if peer in silent:
        who = f"rank {peer} did not answer"
        if others:
            who += f", nor, so far, did {_ranks(others)}, which may be busy or wait too"
    elif silent:
        who = f"{_ranks(silent)} did not answer"
    else:
        who = f"all of {_ranks(group.global_ranks)} are alive, so the link between them failed"
    return CommunicationError(
        f"step {step}: rank {group.global_ranks[group.rank]} waited for {what}: {who}. A rank died, stalled, or did not "
        f"run the same number of backward passes; see its own log. This handle cannot go on: restart from a checkpoint. "
        f"(The backend said: {str(cause).strip() or type(cause).__name__})"
    )


def local_error(what: str, cause: BaseException, step: int, group: Group) -> GradwireError:
    """What to raise when this rank could not do its own part."""
    kind = type(cause) if isinstance(cause, GradwireError) else StepStateError
    return kind(
        f"step {step}: rank {group.global_ranks[group.rank]} could not do its part of {what}: {type(cause).__name__}: "
        f"{cause}. The network is not at fault. All other ranks fail in this step too; restart all from a checkpoint."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
