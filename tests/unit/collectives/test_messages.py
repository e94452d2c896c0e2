"""Messages over a connection: their tags, and what is kept of a connection that fails."""

import gc
import socket
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.transport.keys import JobKey
from gradwire.transport.messages import Messages
from gradwire.transport.tls import Tls
from gradwire.transport.wire import DamagedError, LinkError

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


def test_a_wait_that_times_out_names_the_message_that_came_instead(pair: Pair) -> None:
    first, second = pair
    for tag in (9, 8):
        first.send([torch.zeros(4)], 1, tag)
    with pytest.raises(TimeoutError, match="a message with tag 8 came where one with tag 5 was expected"):
        second.recv([torch.zeros(4)], 0, 5).wait(timedelta(seconds=0.05))
    assert second.recv([torch.zeros(4)], 0, 9).wait()
    with pytest.raises(TimeoutError, match=r"for rank 1$"):
        first.recv([torch.zeros(4)], 1, 5).wait(timedelta(seconds=0.05))


def test_a_connection_whose_descriptor_is_gone_is_told(pair: Pair) -> None:
    _, second = pair
    second._peers[0].number = 2**20 - 1
    second._by_number[2**20 - 1] = second._peers[0]
    with pytest.raises(ConnectionError, match="Bad file descriptor"):
        second.recv([torch.zeros(4)], 0, 5).wait(timedelta(seconds=2))


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


def test_a_rank_that_leaves_is_named_without_an_empty_number(pair: Pair) -> None:
    pair[0].shut_down()
    with pytest.raises(ConnectionError) as caught:
        pair[1].recv([torch.zeros(4)], 0, 1).wait()
    assert str(caught.value) == "Connection closed by peer"
    with pytest.raises(LinkError) as collective:
        pair[1].gather(b"own")
    assert str(collective.value) == "Connection closed by peer" and collective.value.peer == 0


@pytest.mark.parametrize("gathers", [False, True])
def test_an_encrypted_record_that_was_changed_is_damage(gathers: bool) -> None:
    ends, encryption = socket.socketpair(), Tls(JobKey(bytes(32)), None)
    for end in ends:
        end.setblocking(False)
    near, far = (encryption.socket(end, calls) for end, calls in zip(ends, (True, False), strict=True))
    steps = [near.handshake(), far.handshake()]
    while steps:
        steps = [each for each in steps if next(each, None) is not None]
    other = Messages({0: far}, 1, 2, timedelta(seconds=10))
    ends[0].send(bytes.fromhex("1703030020") + bytes(32))  # a record of 32 bytes that nobody encrypted
    with pytest.raises(DamagedError, match="bad record mac") as caught:
        if gathers:
            other.gather(b"own")
        else:
            other.recv([torch.zeros(4)], 0, 1).wait()
    assert caught.value.peer == 0
    other.close()
    near.close()


@pytest.mark.parametrize(
    ("sizes", "targets"),
    [([2**20], 5), ([3 * 2**20], 1), ([0, 2**19, *[7 * 2**16] * 6], 1)],
    ids=["few pieces", "many pieces", "many tensors"],
)
def test_a_broadcast_of_few_pieces_passes_few_ranks(sizes: list[int], targets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root sends to log2(ranks) others. Of many pieces it sends each once, and they pass from rank to rank."""
    ranks, sent_to, options = 24, set[int](), dist.BroadcastOptions()
    ends: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for low, high in combinations(range(ranks), 2):
        ends[low][high], ends[high][low] = socket.socketpair()
    made = [Messages(each, rank, ranks, timedelta(seconds=60)) for rank, each in enumerate(ends)]
    send = Messages.send

    def counted(messages: Messages, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Any:
        if messages is made[0]:
            sent_to.add(to)
        return send(messages, tensors, to, tag)

    monkeypatch.setattr(Messages, "send", counted)
    values = [[torch.full((size,), 0 if rank else 7, dtype=torch.uint8) for size in sizes] for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(lambda rank: made[rank].broadcast(values[rank], options), range(ranks)))
    assert all(torch.equal(torch.cat(each), torch.full((sum(sizes),), 7)) for each in values) and len(sent_to) == targets
    for each in made:
        each.close()
