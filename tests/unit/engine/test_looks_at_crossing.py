"""How often long steps are looked at for crossed handles, and of how many ranks: the store serves the looks of all of them."""

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradwire.engine import crossing


class CountingStore:
    """A store to which all ranks wrote."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self.asked = ranks, 0

    def get(self, key: str) -> bytes:
        return "".join(f"{rank} " for rank in range(self._ranks)).encode()

    def check(self, keys: list[str]) -> bool:
        self.asked = len(keys)
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [key.encode() for key in keys]


def handle_of(rank: int, ranks: int) -> Any:
    group = SimpleNamespace(rank=rank, world_size=ranks, global_ranks=tuple(range(ranks)))
    return SimpleNamespace(lanes=SimpleNamespace(name="lanes", group=group))


@pytest.mark.parametrize(("ranks", "looked_at"), [(5, 4), (16, 15), (64, 11), (1024, 19)])
def test_a_rank_looks_at_few_of_many_ranks(ranks: int, looked_at: int) -> None:
    store: Any = CountingStore(ranks)
    found = dict(crossing._written(store, handle_of(7 % ranks, ranks), 7 % ranks))
    assert store.asked == len(found) == looked_at
    assert {(7 + 1) % ranks, (7 - 1) % ranks} <= set(found) and all(raw == b"lanes/%d" % rank for rank, raw in found.items())


def test_looks_at_one_step_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "LONG_S", 0.02)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(distributed_c10d, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(dist.HashStore, "clone", lambda self: self, raising=False)
    handles: Any = [mock.Mock(label=f"handle {at}", since=None) for at in range(2)]
    watch, looks = crossing.Crossing(), list[float]()
    monkeypatch.setattr(watch, "_compare", lambda store: looks.append(time.monotonic()))
    handles[0].since = time.monotonic()
    for each in handles:
        watch.add(each)
    time.sleep(1.0)
    before = len(looks)
    handles[0].since = time.monotonic() - 0.1  # another step, which is long already
    until = time.monotonic() + 10
    while len(looks) < before + 3 and time.monotonic() < until:
        time.sleep(0.001)
    watch.remove(handles[0])
    assert 2 <= before <= 8, looks  # after 0.02, 0.03, 0.05, 0.09 s and so on
    assert looks[before + 2] - looks[before] < 0.5
