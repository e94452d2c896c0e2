"""Schemes over torch.distributed, the links they run on, and the lanes that submit to links."""

from gradwire.collectives.grid import Grid, node_name
from gradwire.collectives.hops import Ring, Tree
from gradwire.collectives.lane import Lane
from gradwire.collectives.link import Group, Link, LinkError, SilentLink, transfer
from gradwire.collectives.memory import Memory, share_scratch
from gradwire.collectives.meter import Meter
from gradwire.collectives.piece import Piece, Program, Runs
from gradwire.collectives.route import Route
from gradwire.collectives.schemes import AllGather, AllReduce, Scheme, Summing, TwoPhase
from gradwire.collectives.sharded import ShardedSum

__all__ = [
    "AllGather",
    "AllReduce",
    "Grid",
    "Group",
    "Lane",
    "Link",
    "LinkError",
    "Memory",
    "Meter",
    "Piece",
    "Program",
    "Ring",
    "Route",
    "Runs",
    "Scheme",
    "ShardedSum",
    "SilentLink",
    "Summing",
    "Tree",
    "TwoPhase",
    "node_name",
    "share_scratch",
    "transfer",
]
