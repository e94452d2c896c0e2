"""The control exchange: at the end of a step every rank tells every other what became of its backward."""

import struct
from enum import IntEnum
from typing import NamedTuple

import torch

from gradwire.collectives import Link

__all__ = ["Report", "State", "exchange_bytes", "exchange_reports"]

_HEADER = struct.Struct("<qqQq?Q")


class State(IntEnum):
    """What became of a rank's backward."""

    DONE = 0
    LEFT = 1
    """It was left in the middle; what was missing was sent as zeros."""
    OUT = 2
    """The rank has no batch any more and took part with zeros."""


class Report(NamedTuple):
    """What one rank says at the end of a step."""

    step: int
    state: State
    plan: int
    """The first 8 bytes of the plan's digest."""
    came: int
    """Gradients that came in this backward."""
    joining: bool
    """Whether the rank is inside `handle.join()`."""
    weights: int
    """A checksum of the weights, in the steps that compare them; 0 in others."""
    used: int
    """Bit i: parameter i got a gradient since the last synchronised step."""


def exchange_reports(own: Report, parameters: int, link: Link) -> list[Report]:
    """Everybody's report, by rank of the group. `parameters` is how many bits `used` has. Raises LinkError."""
    packed = _HEADER.pack(*own[:-1]) + own.used.to_bytes(-(-parameters // 8), "little")
    reports = []
    for raw in exchange_bytes(packed, link):
        step, state, plan, came, joining, weights = _HEADER.unpack_from(raw)
        used = int.from_bytes(raw[_HEADER.size :], "little")
        reports.append(Report(step, State(state), plan, came, joining, weights, used))
    return reports


def exchange_bytes(own: bytes, link: Link) -> list[bytes]:
    """Everybody's bytes, as many from each, by rank of the group. Raises LinkError."""
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = [sent if rank == link.rank else torch.empty_like(sent) for rank in range(link.world_size)]
    # one hop and point to point, so that a transfer that fails tells with whom
    exchange = link.expect(0, rows)
    exchange.send([sent] * link.world_size)
    for rank in range(link.world_size):
        exchange.wait(rank)
    exchange.finish()
    return [bytes(row.tolist()) for row in rows]
