"""The roll call of many ranks: what a rank reads, and how often."""

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from gradwire.transport.keys import JobKey
from gradwire.transport.lanes import RollCall


class PageOfMany:
    """A store in which ranks sign while one of them looks: at each look some more."""

    def __init__(self) -> None:
        self.page, self.later, self.looks = b"", list[RollCall](), 0

    def append(self, key: str, words: str) -> None:
        self.page += words.encode()

    def get(self, key: str) -> bytes:
        self.looks += 1
        for call in self.later[:100]:
            call._set(self)
        self.later = self.later[100:]
        return self.page


def roll_call(rank: int, ranks: int, store: PageOfMany, key: JobKey) -> RollCall:
    group: Any = SimpleNamespace(rank=rank, world_size=ranks, global_ranks=range(ranks), process_group=None)
    group.met, group.store = SimpleNamespace(key=key), lambda name: store
    return RollCall(group, "job")


@pytest.mark.parametrize(("ranks", "pause_s"), [(8, 0.05), (350, 0.27)])
def test_each_signature_is_read_once(ranks: int, pause_s: float) -> None:
    store, key = PageOfMany(), JobKey(bytes(32))
    store.later = [roll_call(rank, ranks, store, key) for rank in range(1, ranks)]
    store.later[6]._signed = "no memory is left" if ranks == 8 else "here 3"
    pauses, unsealed, usual, sleep = list[float](), list[str](), JobKey.unseal, time.sleep

    def noted(self: JobKey, place: str, raw: Any) -> Any:
        unsealed.append(place)
        return usual(self, place, raw)

    def short(seconds: float) -> None:
        pauses.append(seconds)
        sleep(0.001)

    asking = roll_call(0, ranks, store, key)
    with mock.patch.object(JobKey, "unseal", noted), mock.patch("gradwire.transport.lanes.time.sleep", short):
        found = asking.missing(20.0)
    assert found.silent == [] and found.told == ({7: "no memory is left"} if ranks == 8 else {})
    assert sorted(int(rank) for rank in unsealed if rank) == [*range(ranks)] and store.looks == -(-(ranks - 1) // 100)
    assert {round(pause, 2) for pause in pauses} == {pause_s}


def test_the_store_is_connected_when_a_call_begins() -> None:
    """Its host has a connection of each rank; a second one of each would be idle as long as nothing fails."""
    clones = list[PageOfMany]()

    def clone(self: PageOfMany) -> PageOfMany:
        clones.append(self)
        return self

    with mock.patch.object(PageOfMany, "clone", clone, create=True):
        store, key = PageOfMany(), JobKey(bytes(32))
        first, second = (roll_call(rank, 2, store, key) for rank in range(2))
        for each in (first, second):
            each._group.process_group = mock.MagicMock()  # type: ignore[misc]
        assert not clones
        second.sign("no memory is left", 5.0)
        assert first.missing(5.0).told == {1: "no memory is left"} and first.missing(5.0).is_known
        assert len(clones) == 2
        first.close()
        assert not first.missing(0.1).is_known and len(clones) == 2
