"""The state that members which are at a step send to those that are not."""

import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import zip_longest
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from gradwire.errors import DisagreementError
from gradwire.transport import Link, LinkError, transfer

__all__ = ["MemberCard", "MemberState", "StateOffer", "fetch", "hand_over", "reach", "state_of"]

log = logging.getLogger(__name__)
_PIECE_BYTES = 2**22
"""State travels in pieces, so that a wait for one of them is short."""
_OFFERED_BYTES = 2**20
"""A piece in a store: it shares a slow link with the steps of the others."""


_LOOK, _AGAIN_S = timedelta(seconds=1), 0.05
"""How long to wait for a piece before looking whether it is still of use, and for a store that does not answer."""


class MemberState(NamedTuple):
    """The state of a member without residuals: how a donor saves it, and how a joiner loads it."""

    save: Callable[[], dict[str, Any]]
    load: Callable[[dict[str, Any]], None]


class MemberCard(msgspec.Struct):
    """The message of each member to the others when a quorum meets."""

    joins: bool
    """Whether it comes without a part in the step."""
    sends: dict[int, int]
    """The bytes that it sends to each joiner before the step."""
    store: str = ""
    """The address of the store where it offers its state."""
    offers: int = 0
    """The bytes of the state that it offers there."""


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
    """Connect to the store of a member. Raises LinkError."""
    place = urlsplit(f"//{address}")
    with transfer():
        return TCPStore(place.hostname or "", place.port or 0, wait_for_workers=False, timeout=timeout)


class StateOffer:
    """A state in this member's own store, where joiners fetch it while the others make steps."""

    def __init__(self, store: TCPStore, key: str, data: bytes) -> None:
        self._store, self._key, self._data = store, key, data
        self._ends = threading.Event()
        self._put_pieces = 0
        self._thread = threading.Thread(target=self._put, name="gradwire-offer", daemon=True) if data else None
        if self._thread is not None:
            self._thread.start()

    def withdraw(self) -> None:
        """Offer the state no more."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(Exception):
            for number in range(self._put_pieces):
                self._store.delete_key(f"{self._key}/{number}")
        self._thread, self._put_pieces = None, 0

    def _put(self) -> None:
        try:
            for number, at in enumerate(range(0, len(self._data), _OFFERED_BYTES)):
                if self._ends.is_set():
                    break
                piece = self._data[at : at + _OFFERED_BYTES]
                self._store.set(f"{self._key}/{number}", zlib.crc32(piece).to_bytes(4, "little") + piece)  # type: ignore[arg-type]  # any bytes
                self._put_pieces = number + 1
        except Exception as error:
            log.warning("the state for joiners could not be offered: %s", error)
        self._data = b""


def fetch(address: str, key: str, size: int, timeout: timedelta, check: Callable[[], None]) -> bytes:
    """Get a state of so many bytes that a member offers. Raises LinkError. timeout: for one piece. check: raises LinkError where
    the state is no longer of use."""
    store, pieces = reach(address, timeout), []
    store.set_timeout(_LOOK)  # for a piece that is not there yet, or no more
    for number in range(-(-size // _OFFERED_BYTES)):
        until = time.monotonic() + timeout.total_seconds()
        while True:
            check()
            try:
                got = bytes(store.get(f"{key}/{number}"))
                break
            except Exception as error:
                if time.monotonic() > until:
                    raise LinkError(None, error) from error
                time.sleep(_AGAIN_S)
        if zlib.crc32(got[4:]).to_bytes(4, "little") != got[:4]:
            raise LinkError(None, ValueError("a piece of the state was changed on its way"))
        pieces.append(got[4:])
    return b"".join(pieces)


def state_of(model: torch.nn.Module, without: Collection[str], others: Sequence[Any]) -> MemberState:
    """The state of a model, without the tensors of these names, and of other objects."""

    def tensors() -> dict[str, torch.Tensor]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: each.detach() for name, each in named if name not in without}

    def labels() -> list[str]:
        names = {id(each): name for name, each in model.named_parameters()}
        return [_label(each, names) for each in others]

    def save() -> dict[str, Any]:
        return {"tensors": tensors(), "others": [each.state_dict() for each in others], "labels": labels()}

    def load(state: dict[str, Any]) -> None:
        if state["labels"] != (own := labels()):
            theirs, mine = next((a, b) for a, b in zip_longest(state["labels"], own, fillvalue="nothing") if a != b)
            raise DisagreementError(
                f"another member sent the state of {theirs}, and this one has {mine} in its place. Pass the same optimizers, "
                "with the same parameters, and the same `also` in the same order on every member."
            )
        for name, each in tensors().items():
            each.copy_(state["tensors"][name])
        for each, saved in zip(others, state["others"], strict=True):
            each.load_state_dict(saved)

    return MemberState(save, load)


def _label(each: Any, names: Mapping[int, str]) -> str:
    """The kind of an object with a state; of an optimizer also its parameters, since its state has them by number."""
    groups = each.param_groups if isinstance(each, torch.optim.Optimizer) else []
    stepped = [[names.get(id(parameter), "?") for parameter in group["params"]] for group in groups]
    return type(each).__name__ + (f" of {stepped}" if groups else "")
