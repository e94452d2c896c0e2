"""The grid of ranks: who shares a node with whom, and which ranks stand at the same place of other nodes."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.errors import PlanError

__all__ = ["Grid", "node_name"]


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
        """From the node that each rank says it is on."""
        by_name: dict[str, list[int]] = {}
        for other, name in enumerate(names):
            by_name.setdefault(name, []).append(other)
        return Grid(tuple(tuple(members) for members in by_name.values()), rank)

    @staticmethod
    def even(nodes: int, ranks_per_node: int, rank: int) -> "Grid":
        """So many nodes of so many ranks each, one node's ranks after the other's."""
        return Grid.of([str(other // ranks_per_node) for other in range(nodes * ranks_per_node)], rank)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.members))

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def ranks_per_node(self) -> int:
        """Raises PlanError where nodes differ in it."""
        sizes = sorted({len(members) for members in self.members})
        if len(sizes) > 1:
            raise PlanError(
                f"nodes have {sizes[0]} and {sizes[-1]} ranks: hierarchical options pair each rank with one on every other node. "
                "Start as many ranks on every node, or choose an option whose tasks are all on the inter link."
            )
        return sizes[0]

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return next(number for number, members in enumerate(self.members) if rank in members)

    def place_of(self, rank: int) -> int:
        """A rank's place among those of its node."""
        return self.members[self.node_of(rank)].index(rank)

    def groups(self, link: str) -> tuple[tuple[int, ...], ...]:
        """The ranks that exchange over a link: 'all' is everybody, 'intra' a node's, 'inter' those at one place of all nodes."""
        if link == "all":
            return (tuple(range(self.world_size)),)
        if link == "intra":
            return self.members
        return tuple(tuple(members[place] for members in self.members) for place in range(self.ranks_per_node))

    def group(self, link: str) -> tuple[int, ...]:
        """The one of `groups` that this rank is in."""
        return next(group for group in self.groups(link) if self.rank in group)

    def root_of(self, group: tuple[int, ...], root: int) -> int:
        """The member of a group that does what `root` does in its own: at its place inside a node, on its node between."""
        if root in group:
            return root
        same_place = [rank for rank in group if self.place_of(rank) == self.place_of(root)]
        same_node = [rank for rank in group if self.node_of(rank) == self.node_of(root)]
        return (same_place or same_node)[0]

    def split(self, bytes_to: Sequence[int]) -> tuple[int, int]:
        """Of the bytes that go to each rank: how many stay inside the node, and how many leave it."""
        own = self.members[self.node_of(self.rank)]
        inside = sum(bytes_to[rank] for rank in own)
        return inside, sum(bytes_to) - inside


def node_name() -> str:
    """What this process calls its node: torchrun's number of it, else the host's name."""
    number = os.environ.get("GROUP_RANK")
    # both are there under torchrun; one alone may be left over from another launcher
    return f"torchrun {number}" if number is not None and "LOCAL_WORLD_SIZE" in os.environ else socket.gethostname()
