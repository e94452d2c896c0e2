"""Finding handles that ranks use in different orders: each of two ranks is in a step of one and waits for the other's step.

Such ranks would wait until the timeout, as two DDP models do. While a process has several handles, a thread looks every now and
then whether one of their steps takes long. Then it writes to the rendezvous store which step of each handle this rank is in or
comes to next, and reads what other ranks wrote, of many ranks those near it. Ranks A and B have crossed if A is in a step of
handle 1 to which B has yet to come, and B in one of handle 2 to which A has yet to come. What was written earlier is then true
still: neither step ends without both.
"""

import itertools
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from torch.distributed import distributed_c10d

from gradwire.core import AT_ONCE
from gradwire.engine.reducer import Reducer
from gradwire.errors import StepStateError
from gradwire.transport import neighbours, waits_for_store

LONG_S = 1.0
"""A step that takes longer is looked at. Larger: crossed handles are found later, and slow steps cost less."""
_MOST_PAUSE_S = 10.0
"""Looks at one step become rarer, as far as this: whoever comes to a step last looks soon, and finds what others wrote."""


class StepPlace(NamedTuple):
    """Where a rank is with one handle."""

    loads: int
    """How many states it has loaded, each of which may set the step back."""
    step: int
    """The number of the step that it is in, or comes to next."""
    beside: int
    """How many exchanges between steps are over. It makes each place unlike all earlier ones."""
    inside: bool

    def has_yet_to_come_to(self, other: "StepPlace | None") -> bool:
        """Whether another rank is inside at a place that this one has not reached. The other one may be some broadcasts ahead,
        since their root does not wait."""
        return other is not None and other.inside and not self.inside and self[:3] <= other[:3]


_HANDLES = itertools.count(1)


class Whereabouts:
    """Where this rank is with one handle."""

    def __init__(self, reducer: Reducer, model: str) -> None:
        self._reducer, self.lanes = reducer, reducer.lanes
        self.since: float | None = None
        """When it came into the step, or the exchange between steps, that it is in (time.monotonic)."""
        self._loads = self._beside = 0
        self.label = f"handle {next(_HANDLES)} (of a {model})"
        """A name that is equal on ranks that made their handles in the same order."""
        self.lanes.place = weakref.WeakMethod(self._in_words)
        CROSSING.add(self)

    def _in_words(self) -> str:
        return f"step {self._reducer.step} of {self.label}"

    @property
    def place(self) -> StepPlace:
        """For other ranks."""
        return StepPlace(self._loads, self._reducer.step, self._beside, self.since is not None)

    def enter(self) -> None:
        """Enter a step, or an exchange between steps."""
        self.since = time.monotonic()

    def leave(self, beside: bool = False) -> None:
        """Leave it. `beside`: an exchange between steps is over."""
        self.since = None
        self._beside += beside

    def loaded(self) -> None:
        """All ranks have loaded a state of the handle: what they wrote before is of earlier places."""
        self._loads += 1

    def forget(self) -> None:
        """The handle is used no more."""
        self.leave()
        CROSSING.remove(self)


def _own_store() -> Any:
    default: Any = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore("gradwire/crossing", default.clone())


class Crossing:
    """Watches the handles of this process."""

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Whereabouts] = weakref.WeakSet()
        self._users: set[int] = set()
        """Threads that run models. With several, one may come to a step while another waits."""
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()
        self._store: Any = None
        """The thread's, once it has asked."""
        self._listed: set[str] = set()
        """The lanes for which this rank is in the store's list of ranks that wrote."""

    def add(self, handle: Whereabouts) -> None:
        """Watch a handle as long as it lives, until `remove`."""
        self._watched.add(handle)
        if len(self._watched) == 1:
            self._users.clear()
        if len(self._watched) > 1 and (self._thread is None or not self._thread.is_alive()):
            self._changed.clear()
            self._thread = threading.Thread(target=self._look, name="gradwire-crossing", daemon=True)
            self._thread.start()

    def remove(self, handle: Whereabouts) -> None:
        """Watch it no more."""
        self._watched.discard(handle)
        if len(self._watched) < 2:
            self._changed.set()

    def uses(self) -> None:
        """This thread runs models."""
        self._users.add(threading.get_ident())

    def _look(self) -> None:
        before, pause, due = dict[str, float | None](), 0.0, 0.0
        while len(self._watched) > 1 and not self._changed.wait(LONG_S / 2):
            now, since = time.monotonic(), {each.label: each.since for each in list(self._watched)}
            if since != before:
                before, pause, due = since, LONG_S / 2, now
            late = now - LONG_S
            if now < due or len(self._users) > 1 or not any((each or late) < late for each in since.values()):
                continue
            due, pause = now + pause, min(2 * pause, _MOST_PAUSE_S)
            # the store may be gone with its rank, or not have been there: then the timeout ends it
            with suppress(Exception), waits_for_store():
                if self._store is None:
                    self._store = _own_store()
                self._compare(self._store)
        with suppress(RuntimeError), waits_for_store():  # else it stays: whoever frees it returns from C++
            self._store = None

    def _compare(self, store: Any) -> None:
        handles = {each.lanes.name: each for each in list(self._watched)}
        places = {name: each.place for name, each in handles.items()}
        own, told = distributed_c10d.get_rank(), msgspec.json.encode(places).decode()
        for name, handle in handles.items():
            place = f"{name}/{own}"
            store.set(place, handle.lanes.group.met.key.seal(place, told))
            if name not in self._listed:
                store.append(f"{name}/ranks", f"{own} ")
                self._listed.add(name)
        inside = [handle for name, handle in handles.items() if places[name].inside]
        for rank, handle, raw in [(rank, each, raw) for each in inside for rank, raw in _written(store, each, own)]:
            said = handle.lanes.group.met.key.unseal(f"{handle.lanes.name}/{rank}", raw)
            if said is None:  # no rank wrote it
                continue
            theirs = msgspec.json.decode(said, type=dict[str, StepPlace])
            mine = places[handle.lanes.name]
            others = [name for name, at in places.items() if at.has_yet_to_come_to(theirs.get(name))]
            if others and (there := theirs.get(handle.lanes.name)) is not None and there.has_yet_to_come_to(mine):
                words = (
                    f"handles crossed: rank {own} is in step {mine.step} of {handle.label}, and rank {rank} is in step "
                    f"{places[others[0]].step} of {handles[others[0]].label}. Each waits for the other. Run the backwards of "
                    "several models in the same order on all ranks."
                )
                for each in (handles[others[0]], handle):  # the rank that waits in the other one gets the words too
                    each.lanes.end(StepStateError(words))
                return


def _written(store: Any, handle: Whereabouts, own: int) -> list[tuple[int, bytes]]:
    """Some ranks of a handle that wrote to the store, and the bytes of each, by three requests however many ranks there are.

    Of many ranks these are neighbours in a ring, since all ranks look: where ranks wait in different steps, two that follow each
    other do.
    """
    group, name = handle.lanes.group, handle.lanes.name
    listed = set(bytes(store.get(f"{name}/ranks")).decode().split())
    near = range(group.world_size) if group.world_size <= AT_ONCE else sorted(neighbours(group.rank, group.world_size))
    ranks = [rank for rank in (group.global_ranks[other] for other in near) if rank != own and str(rank) in listed]
    keys = [f"{name}/{rank}" for rank in ranks]
    if not ranks or not store.check(keys):  # somebody else listed a rank: a wait for its key would not end
        return []
    return list(zip(ranks, map(bytes, store.multi_get(keys)), strict=True))


CROSSING = Crossing()
