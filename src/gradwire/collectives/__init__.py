"""Schemes over torch.distributed, the links they run on, and the lanes that submit to links."""

from gradwire.collectives.grid import Grid, node_name
from gradwire.collectives.lane import Lane
from gradwire.collectives.link import DamagedError, Group, Link, LinkError, SilentLink, transfer
from gradwire.collectives.memory import Memory, share_scratch
from gradwire.collectives.meter import Meter
from gradwire.collectives.piece import Piece, Program
from gradwire.collectives.route import Route
from gradwire.collectives.schemes import AllReduce, OneEncode, Scheme, ShardedSum, TwoPhase
from gradwire.collectives.works import Add, Copy, Decode, Encoding, Transfer, Transfers, in_c

__all__ = [
    "Add",
    "AllReduce",
    "Copy",
    "DamagedError",
    "Decode",
    "Encoding",
    "Grid",
    "Group",
    "Lane",
    "Link",
    "LinkError",
    "Memory",
    "Meter",
    "OneEncode",
    "Piece",
    "Program",
    "Route",
    "Scheme",
    "ShardedSum",
    "SilentLink",
    "Transfer",
    "Transfers",
    "TwoPhase",
    "in_c",
    "node_name",
    "share_scratch",
    "transfer",
]
