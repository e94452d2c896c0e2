"""The state that a member offers to joiners while it makes steps."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch.distributed import TCPStore

from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.handover import StateOffer, copied, fetch

TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def offer() -> Iterator[StateOffer]:
    made = StateOffer()
    yield made
    made.withdraw()


def fetched(store: TCPStore) -> bytes:
    return fetch(f"127.0.0.1:{store.port}", "state 1", TIMEOUT, lambda: None)


@pytest.mark.parametrize("size", [0, 1, 2**20, 2**21 + 1])
def test_a_joiner_gets_the_bytes_that_are_offered(store: TCPStore, offer: StateOffer, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    offer.begin(store, "state 1", lambda: data[:size])
    assert fetched(store) == data[:size]


def test_a_joiner_gets_the_state_from_before_the_step(store: TCPStore, offer: StateOffer) -> None:
    weight, momenta = torch.arange(6.0).view(2, 3), [torch.ones(3)]
    offer.begin(store, "state 1", partial(to_bytes, copied({"weight": weight, "momenta": momenta, "step": 3})))
    weight.zero_()
    momenta[0].add_(1)
    momenta.append(weight)
    state = from_bytes(fetched(store))
    assert torch.equal(state["weight"], torch.arange(6.0).view(2, 3)) and state["step"] == 3
    assert len(state["momenta"]) == 1 and torch.equal(state["momenta"][0], torch.ones(3))


def test_no_step_waits_until_the_bytes_are_made(store: TCPStore, offer: StateOffer) -> None:
    may, got = threading.Event(), list[bytes]()

    def make() -> bytes:
        assert may.wait(60)
        return b"state"

    offer.begin(store, "state 1", make)  # returns while `make` waits
    joiner = threading.Thread(target=lambda: got.append(fetched(store)), daemon=True)
    joiner.start()
    may.set()
    joiner.join(60)
    assert got == [b"state"]


def test_a_state_that_is_withdrawn_is_in_the_store_no_more(store: TCPStore, offer: StateOffer) -> None:
    offer.begin(store, "state 1", lambda: bytes(2**20 + 1))
    fetched(store)
    assert store.check(["state 1/2"])
    offer.withdraw()
    assert not any(store.check([f"state 1/{number}"]) for number in range(3))
