"""The cluster: nodes, ranks and the two links."""

from typing import ClassVar

import msgspec

from gradwire.core.checks import number, only_version, show, whole
from gradwire.core.made import Made
from gradwire.core.strict import Document
from gradwire.errors import FormatError


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link as alpha-beta model: a message of n bytes takes alpha_us + n * 8 / (gbps * 1000) microseconds."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("cpu_us", "cpu_us_per_byte", "shared")

    alpha_us: float
    """Microseconds before the first byte arrives."""
    gbps: float
    """Gigabits per second of one node's share; above 0."""
    cpu_us: float = 0.0
    """Processor time of a rank for one all-reduce, beside that for its bytes. Counts for `Cluster.allreduce` alone."""
    cpu_us_per_byte: float = 0.0
    """Processor time of a rank for each byte of an all-reduce, the copies into the bucket's memory and back included."""
    shared: bool = False
    """Whether all ranks of a node share this link, as GPUs behind one PCIe switch do. Counts for `Cluster.intra` alone; ranks
    always share their node's `inter` link."""

    def __post_init__(self) -> None:
        number("alpha_us", self.alpha_us, "a latency in microseconds")
        number("cpu_us", self.cpu_us, "a time in microseconds")
        number("cpu_us_per_byte", self.cpu_us_per_byte, "a time in microseconds")
        number("gbps", self.gbps, "a rate in gigabits per second", positive=True)
        if not isinstance(self.shared, bool):
            raise FormatError(f"shared is {show(self.shared)}: it must be true or false.")


class Cluster(Document, frozen=True, kw_only=True):
    """Nodes of equal size with an `intra` link inside each and an `inter` link between them.

    >>> cluster = Cluster(nodes=2, ranks_per_node=4, intra=Link(5.0, 400.0), inter=Link(30.0, 25.0))
    >>> cluster.world_size
    8
    """

    what: ClassVar[str] = "cluster"
    remedy: ClassVar[str] = "Write it again from the fields of gradwire.core.Cluster."
    omit_at_default: ClassVar[tuple[str, ...]] = ("allreduce", "launch_us", "made")

    version: int = 1
    nodes: int
    ranks_per_node: int
    intra: Link
    inter: Link
    allreduce: Link | None = None
    """The link as all-reduce sees it, between nodes or inside a single node. The backend's own all-reduce may be faster or
    slower than other exchanges on the link. None: as fast."""
    launch_us: float | None = None
    """Processor time in microseconds that a rank with lanes spends on each exchange beside its codecs: wake-ups of threads,
    calls of the backend, copies. None counts as 0. All-reduces of gradients have `allreduce.cpu_us` instead, if measured."""
    made: Made | None = None

    def __post_init__(self) -> None:
        only_version(self.version)
        whole("nodes", self.nodes, "a number of nodes", low=1)
        whole("ranks_per_node", self.ranks_per_node, "the ranks of one node", low=1)
        for field in ("intra", "inter"):
            if not isinstance(link := getattr(self, field), Link):
                raise FormatError(f"{field} is {show(link)}: it must be a Link.")
        if not isinstance(self.allreduce, (Link, type(None))):
            raise FormatError(f"allreduce is {show(self.allreduce)}: it must be a Link, or be left out.")
        if self.launch_us is not None:
            number("launch_us", self.launch_us, "a time in microseconds")

    def links_for(self, task: str) -> tuple[Link, Link]:
        """The intra and the inter link as a collective, such as `allreduce:inter`, sees them."""
        if self.allreduce is None or task != "allreduce:inter":
            return self.intra, self.inter
        return (self.allreduce, self.inter) if self.nodes == 1 else (self.intra, self.allreduce)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node
