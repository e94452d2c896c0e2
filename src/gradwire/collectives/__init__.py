"""Schemes over torch.distributed, the links they run on, and the lanes that submit to links."""

from gradwire.collectives.grid import Grid, node_name
from gradwire.collectives.hops import Ring, Tree
from gradwire.collectives.lane import Lane
from gradwire.collectives.link import Group, Link, LinkError, SilentLink, transfer
from gradwire.collectives.meter import Meter
from gradwire.collectives.route import Route
from gradwire.collectives.schemes import (
    AllGather,
    AllReduce,
    Kept,
    Memory,
    Piece,
    Program,
    Runs,
    Scheme,
    Summing,
    TwoPhase,
)

__all__ = [
    "AllGather",
    "AllReduce",
    "Grid",
    "Group",
    "Kept",
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
    "SilentLink",
    "Summing",
    "Tree",
    "TwoPhase",
    "node_name",
    "transfer",
]
