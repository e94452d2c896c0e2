"""Weights of steps with gradients of a script's own, compared through the store: no rank waits for another."""

import time
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.engine.control import OwnSteps
from gradwire.transport.keys import JobKey


class Rank:
    """One of two ranks that share a store."""

    def __init__(self, rank: int, store: Any) -> None:
        met = SimpleNamespace(key=JobKey(bytes(32)))
        group = SimpleNamespace(rank=rank, world_size=2, global_ranks=(0, 1), store=lambda name: store, met=met)
        self.steps = OwnSteps(1, group, "lanes")  # type: ignore[arg-type]
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def step(self) -> str | None:
        return self.steps.step([weakref.ref(self.weight)], ["weight"], after=0)


@pytest.fixture
def store() -> dist.Store:
    found = dist.HashStore()
    found.set_timeout(timedelta(seconds=60))
    return found


def test_only_the_same_step_is_compared(store: dist.Store) -> None:
    first, second = Rank(0, store), Rank(1, store)
    assert first.step() is None and first.step() is None
    second.weight.data.fill_(1.0)
    assert second.step() is None, "the other rank has gone on"
    words = second.step()
    assert words is not None and "the weights of this rank and rank 0 are not the same, after 2 optimizer steps" in words
    assert second.step() is None, "said once"


@pytest.mark.parametrize("place", ["0", "another handle's"])
def test_others_than_ranks_make_nobody_warn(store: dist.Store, place: str) -> None:
    """Whoever reaches the store writes checksums as of rank 0, without the key, or sealed by rank 0 for another handle."""
    first, second = Rank(0, store), Rank(1, store)
    if place != "0":
        first.steps._name = place
    first.weight.data.fill_(1.0)
    first.step()
    written = store.get("0")
    store.set("0", written[32:] if place == "0" else written)
    assert second.step() is None
    assert not second.steps._told


def test_a_rank_that_goes_on_while_another_looks_keeps_nobody_waiting(store: dist.Store) -> None:
    second = Rank(1, store)

    class GoesOn:
        """The other rank makes a step between `check` and `get`."""

        set, get = store.set, store.get

        def check(self, keys: list[str]) -> bool:
            found = store.check(keys)
            second.step()
            return found

    first = Rank(0, GoesOn())
    second.step()
    began = time.monotonic()
    assert first.step() is None
    # with keys that are deleted, `get` waited here until the store's timeout
    assert time.monotonic() - began < 30 and not first.steps._told
