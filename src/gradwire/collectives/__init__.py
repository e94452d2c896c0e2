"""Schemes over torch.distributed, the links they run on, and the lanes that submit to links."""

from gradwire.collectives.lane import Lane
from gradwire.collectives.link import Group, Link, LinkError, SilentLink, transfer
from gradwire.collectives.memory import Memory, share_scratch
from gradwire.collectives.meter import Meter
from gradwire.collectives.schemes import AllGather, AllReduce, Piece, Program, Scheme, Summing, TwoPhase

__all__ = [
    "AllGather",
    "AllReduce",
    "Group",
    "Lane",
    "Link",
    "LinkError",
    "Memory",
    "Meter",
    "Piece",
    "Program",
    "Scheme",
    "SilentLink",
    "Summing",
    "TwoPhase",
    "share_scratch",
    "transfer",
]
