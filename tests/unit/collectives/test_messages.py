"""Messages over a connection: their tags, and what is kept of a connection that fails."""

import gc
import socket
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from gradwire.transport.messages import Messages

Pair = tuple[Messages, Messages]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    made = Messages({1: near}, 0, 2, timedelta(seconds=10)), Messages({0: far}, 1, 2, timedelta(seconds=10))
    yield made
    for each in made:
        each.close()


def test_a_message_waits_for_who_asks_for_its_tag(pair: Pair) -> None:
    first, second = pair
    for tag in (7, 3, 7):
        first.send([torch.full((4,), float(tag))], 1, tag)
    found = {}
    for tag in (3, 7):
        found[tag] = torch.zeros(4)
        second.recv([found[tag]], 0, tag).wait()
    assert all(values.tolist() == [tag] * 4 for tag, values in found.items())
    with pytest.raises(TimeoutError):
        second.recv([torch.zeros(4)], 0, 5).wait(timedelta(seconds=0.05))


class Job:
    """Something large that a lane's job uses."""


def wait_for_a_rank_that_leaves(pair: Pair) -> "weakref.ref[Job]":
    job = Job()
    pair[0].shut_down()
    with pytest.raises(ConnectionError, match="closed by peer"):
        pair[1].recv([torch.zeros(4)], 0, 1).wait()
    return weakref.ref(job)


def test_a_connection_that_failed_keeps_no_job(pair: Pair) -> None:
    job = wait_for_a_rank_that_leaves(pair)
    gc.collect()
    assert job() is None
