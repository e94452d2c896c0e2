"""The grid of ranks: the ranks of each node, and the ranks at the same place of all nodes."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gradwire.errors import PlanError

SITE = "GRADWIRE_SITE"
"""The variable that names the site of a rank. Where there are several sites, the machines of each are one node."""


@dataclass(frozen=True)
class Grid:
    """The ranks of a group by node, seen from one of them.

    >>> grid = Grid.of(["a", "a", "b", "b"], rank=1)
    >>> grid.nodes, grid.ranks_per_node, grid.group("intra"), grid.group("inter")
    (2, 2, (0, 1), (1, 3))
    """

    members: tuple[tuple[int, ...], ...]
    """Ranks of each node, ascending; nodes in the order of their first ranks."""
    rank: int

    @staticmethod
    def of(names: Sequence[str], rank: int) -> "Grid":
        """The grid from the name of each rank's node."""
        by_name: dict[str, list[int]] = {}
        for other, name in enumerate(names):
            by_name.setdefault(name, []).append(other)
        return Grid(tuple(tuple(members) for members in by_name.values()), rank)

    @staticmethod
    def even(nodes: int, ranks_per_node: int, rank: int) -> "Grid":
        """A grid of nodes with equally many ranks. The ranks of a node are consecutive."""
        return Grid.of([str(other // ranks_per_node) for other in range(nodes * ranks_per_node)], rank)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.members))

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def ranks_per_node(self) -> int:
        """Raises PlanError if nodes have different numbers of ranks."""
        sizes = sorted({len(members) for members in self.members})
        if len(sizes) > 1:
            raise PlanError(
                f"nodes have {sizes[0]} and {sizes[-1]} ranks, but this option pairs each rank with one on every node. Start "
                "equally many ranks on every node, or choose scheme='leaders', where one rank of each node exchanges."
            )
        return sizes[0]

    @property
    def least_ranks(self) -> int:
        """The number of ranks of the smallest node."""
        return min(map(len, self.members))

    @property
    def most_ranks(self) -> int:
        """The number of ranks of the largest node."""
        return max(map(len, self.members))

    @property
    def ranks_per_node_if_even(self) -> int | None:
        """`ranks_per_node`; None if nodes have different numbers of ranks."""
        return self.most_ranks if self.most_ranks == self.least_ranks else None

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """The node of each rank, and the rank's place on it."""
        return {rank: (node, at) for node, members in enumerate(self.members) for at, rank in enumerate(members)}

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return self._places[rank][0]

    def place_of(self, rank: int) -> int:
        """A rank's place among those of its node."""
        return self._places[rank][1]

    def groups(self, link: str) -> tuple[tuple[int, ...], ...]:
        """The groups that exchange over a link: 'all' ranks, 'intra' those of a node, 'inter' those at one place of all nodes. A
        rank at a place that smaller nodes do not have is a group of its own.

        >>> Grid.of(["a", "a", "b"], rank=1).groups("inter")
        ((0, 2), (1,))
        """
        if link == "all":
            return (tuple(range(self.world_size)),)
        if link == "intra":
            return self.members
        least = self.least_ranks
        pairs = tuple(tuple(members[place] for members in self.members) for place in range(least))
        return (*pairs, *((rank,) for members in self.members for rank in members[least:]))

    def group(self, link: str) -> tuple[int, ...]:
        """The group of this rank among `groups`."""
        return next(group for group in self.groups(link) if self.rank in group)

    def root_of(self, group: tuple[int, ...], root: int) -> int:
        """The root of a group: `root` itself, or the member at the same place or on the same node as `root`. If nodes have
        different numbers of ranks, the place is one that all nodes have."""
        place = self.place_of(root)
        if root in group and place < self.least_ranks:
            return root
        same_place = [rank for rank in group if self.place_of(rank) == place % self.least_ranks]
        same_node = [rank for rank in group if self.node_of(rank) == self.node_of(root)]
        return (same_place or same_node)[0]

    def split(self, bytes_to: Sequence[int]) -> tuple[int, int]:
        """The sum of bytes to ranks on this node, and to ranks on other nodes."""
        own = self.members[self.node_of(self.rank)]
        inside = sum(bytes_to[rank] for rank in own)
        return inside, sum(bytes_to) - inside


def machine_name() -> str:
    """The name of this process's machine: by torchrun's number, or else the host name."""
    number = os.environ.get("GROUP_RANK")
    # torchrun sets both variables; one alone may be left over from another launcher
    return f"torchrun {number}" if number is not None and "LOCAL_WORLD_SIZE" in os.environ else socket.gethostname()


def site_name() -> str:
    """The name of this process's site; '' if nobody named it."""
    return os.environ.get(SITE, "").strip()
