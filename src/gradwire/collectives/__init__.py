"""Schemes over torch.distributed, the links they run on, and the lanes that submit to links."""

from gradwire.collectives.grid import Grid, node_name
from gradwire.collectives.hops import Ring, Tree
from gradwire.collectives.lane import Lane
from gradwire.collectives.link import Group, Link, LinkError, SilentLink, transfer
from gradwire.collectives.memory import Memory, share_scratch
from gradwire.collectives.meter import Meter
from gradwire.collectives.piece import Piece, Program, Runs
from gradwire.collectives.route import Route
from gradwire.collectives.schemes import AllGather, AllReduce, OneEncode, Scheme, Summing, TwoPhase
from gradwire.collectives.sharded import ShardedSum
from gradwire.collectives.works import Add, Copy, Decode, Encoding, Transfer, Transfers

__all__ = [
    "Add",
    "AllGather",
    "AllReduce",
    "Copy",
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
    "Ring",
    "Route",
    "Runs",
    "Scheme",
    "ShardedSum",
    "SilentLink",
    "Summing",
    "Transfer",
    "Transfers",
    "Tree",
    "TwoPhase",
    "node_name",
    "share_scratch",
    "transfer",
]
