"""The state that members which are at a step send to those that are not."""

import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore
from torch.utils import _pytree as pytree

from gradwire.integrations.member_watch import host_and_port
from gradwire.transport import Link, LinkError, start_store_thread, transfer

__all__ = ["MemberCard", "StateOffer", "copied", "fetch", "hand_over", "reach", "training_ranks"]

log = logging.getLogger(__name__)
_PIECE_BYTES = 2**22
"""State travels in pieces, so that a wait for one of them is short."""
_OFFERED_BYTES = 2**20
"""A piece in a store: it shares a slow link with the steps of the others."""
_TRY = timedelta(seconds=1)
"""For the first attempt to connect with a store. A TCPStore tries as long as its timeout, also where nobody listens any more."""
_LOOK, _AGAIN_S = timedelta(seconds=1), 0.05
"""How long to wait for a piece before looking whether it is still of use, and for a store that does not answer."""


class MemberCard(msgspec.Struct):
    """The message of each member to the others when a quorum meets."""

    joins: bool
    """Whether it comes without a part in the step."""
    sends: dict[int, int]
    """The bytes that it sends to each joiner before the step."""
    store: str = ""
    """The address of the store where it offers its state."""
    at: tuple[int, int] | None = 0, 0
    """Its step, and the iterations of its script since that did not count; None where it gets the state of another member."""


def training_ranks(cards: list[MemberCard], max_step: int) -> set[int]:
    """The members whose gradients count in the step: those that come with a part in it, or with a checkpoint of it."""
    training = {rank for rank, each in enumerate(cards) if not each.joins}
    behind = {joiner for each in cards for joiner in each.sends}
    if max_step and not training and behind:  # all have begun anew, some of them from a checkpoint
        return {*range(len(cards))} - behind
    return training


def hand_over(link: Link, own: MemberCard, data: bytes) -> tuple[list[MemberCard], bytes]:
    """Send the data to the joiners on the own card. Returns all cards, and the bytes that came. All ranks wait for each piece,
    so that nobody waits longer than for one. Collective, on the control lane."""
    cards = [msgspec.json.decode(each, type=MemberCard) for each in link.gather(msgspec.json.encode(own))]
    sent = torch.frombuffer(bytearray(data or b"-"), dtype=torch.uint8)[: len(data)]
    sizes = [each.sends.get(link.rank, 0) for each in cards]
    got = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    most = max((size for each in cards for size in each.sends.values()), default=0)
    for number, at in enumerate(range(0, most, _PIECE_BYTES)):
        piece = slice(at, at + _PIECE_BYTES)
        moving = link.expect(number, [each[piece] for each in got])
        moving.send([sent[piece] if rank in own.sends else sent[:0] for rank in range(link.world_size)])
        for source in range(link.world_size):
            moving.wait(source)
        moving.finish()
        link.gather(b"")
    return cards, b"".join(each.numpy().tobytes() for each in got)


def reach(address: str, timeout: timedelta) -> TCPStore:
    """Connect to the store of a member. Raises LinkError, at once where nobody listens."""
    place, until, attempt = host_and_port(address), time.monotonic() + timeout.total_seconds(), _TRY
    while True:
        with transfer():
            socket.create_connection(place, timeout.total_seconds()).close()
        try:
            store = TCPStore(*place, wait_for_workers=False, timeout=min(attempt, timeout))
        except Exception as error:
            if time.monotonic() > until:
                raise LinkError(None, error) from error
            attempt *= 2  # the way there may be long
            continue
        store.set_timeout(timeout)
        return store


class StateOffer:
    """A state in this member's own store, where joiners fetch it while the others make steps."""

    def __init__(self) -> None:
        self._ends = threading.Event()
        self._end: Callable[[], None] = lambda: None
        """Ends the present offer."""

    def begin(self, store: TCPStore, key: str, make: Callable[[], bytes]) -> None:
        """Offer these bytes, and no others. make: called in a thread, so that no step waits for it."""
        self.withdraw()
        put: list[str] = []
        thread = start_store_thread(partial(self._put, store, key, make, put), "gradwire-offer")

        def end() -> None:
            self._ends.set()
            thread.join()
            self._ends.clear()
            with suppress(Exception):
                for each in put:
                    store.delete_key(each)

        self._end = end

    def withdraw(self) -> None:
        """Offer the state no more."""
        self._end()
        self._end = lambda: None

    def _put(self, store: TCPStore, key: str, make: Callable[[], bytes], put: list[str]) -> None:
        try:
            data = make()
            pieces = [data[at : at + _OFFERED_BYTES] for at in range(0, len(data), _OFFERED_BYTES)]
            for number, piece in enumerate([str(len(pieces)).encode(), *pieces]):
                if self._ends.is_set():
                    break
                put.append(f"{key}/{number}")
                store.set(put[-1], zlib.crc32(piece).to_bytes(4, "little") + piece)  # type: ignore[arg-type]  # any bytes
        except Exception as error:
            log.warning("the state for joiners could not be offered: %s", error)


def fetch(address: str, key: str, timeout: timedelta, check: Callable[[], None]) -> bytes:
    """Get the state that a member offers. Raises LinkError. timeout: for one piece. check: raises LinkError where the state is no
    longer of use."""
    store = reach(address, timeout)
    store.set_timeout(_LOOK)  # for a piece that is not there yet, or no more
    count = int(_fetch_piece(store, f"{key}/0", timeout, check))
    return b"".join(_fetch_piece(store, f"{key}/{number}", timeout, check) for number in range(1, count + 1))


def _fetch_piece(store: TCPStore, key: str, timeout: timedelta, check: Callable[[], None]) -> bytes:
    until = time.monotonic() + timeout.total_seconds()
    while True:
        check()
        try:
            got = bytes(store.get(key))
            break
        except Exception as error:
            if time.monotonic() > until:
                raise LinkError(None, error) from error
            time.sleep(_AGAIN_S)
    if zlib.crc32(got[4:]).to_bytes(4, "little") != got[:4]:
        raise LinkError(None, ValueError("a piece of the state was changed on its way"))
    return got[4:]


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state in the host's memory: later steps do not change it."""
    copy: dict[str, Any] = pytree.tree_map_only(torch.Tensor, lambda each: each.detach().to("cpu", copy=True), state)
    return copy
