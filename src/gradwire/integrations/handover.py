"""The state that members which are at a step send to those that are not."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from gradwire.transport import Link

__all__ = ["MemberCard", "MemberState", "hand_over"]

_PIECE_BYTES = 2**22
"""State travels in pieces, so that a wait for one of them is short."""


class MemberState(NamedTuple):
    """The state of a member without residuals: how a donor saves it, and how a joiner loads it."""

    save: Callable[[], dict[str, Any]]
    load: Callable[[dict[str, Any]], None]


class MemberCard(msgspec.Struct):
    """The message of each member to the others when a quorum meets."""

    joins: bool
    """Whether it comes without a part in the step."""
    sends: dict[int, int]
    """The bytes of state that it sends to each joiner."""


def hand_over(link: Link, own: MemberCard, data: bytes) -> tuple[list[MemberCard], bytes]:
    """Send the state to the joiners on the own card. Returns all cards, and the bytes that came. All ranks wait for each piece,
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
