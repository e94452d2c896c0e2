"""The cluster: nodes, ranks and their links."""

from typing import ClassVar

import msgspec

from gradwire.core.checks import each, flags, freeze, numbers, only_version, show, whole
from gradwire.core.provenance import Made
from gradwire.core.strict import Document
from gradwire.errors import FormatError

FAR_US = 2_000.0
"""The latency in microseconds from which a link may count as far: a message waits longer than it takes."""
LANES = 2
"""How many pieces a rank exchanges at a time on CPUs. A lane blocks in its collectives: while one waits for the wire the other
encodes."""
_FAR_LANES = (FAR_US, 4), (20_000.0, 8), (80_000.0, 16)
"""Over a far link most of the time is waiting, so more are under way: from each of these latencies so many."""
_FEW_RANKS, _MOST_LANES = 16, 8
"""More ranks have at most so many lanes, each of which is a thread with connections of its own."""
MOST_RANKS = 100_000
"""The most ranks of a cluster."""


def lanes_over(latency_us: float, ranks: int) -> int:
    """The number of lanes of each rank, for the latency of the longest way between two ranks.

    >>> [lanes_over(latency_us, ranks=2) for latency_us in (1_900, 2_000, 25_000, 100_000)], lanes_over(100_000, ranks=40)
    ([2, 4, 8, 16], 8)
    """
    lanes = max((lanes for least_us, lanes in _FAR_LANES if latency_us >= least_us), default=LANES)
    return lanes if ranks <= _FEW_RANKS else min(lanes, _MOST_LANES)


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A link as alpha-beta model: a message of n bytes takes alpha_us + n * 8 / (gbps * 1000) microseconds."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("cpu_us", "cpu_us_per_byte", "shared", "up_gbps", "flow_gbps", "message_us")

    alpha_us: float
    """Microseconds before the first byte arrives."""
    gbps: float
    """Gigabits per second of one node's share, in either direction; above 0."""
    cpu_us: float = 0.0
    """A rank's processor time in microseconds for one message, without that for bytes. On `Cluster.allreduce` for a whole
    all-reduce."""
    cpu_us_per_byte: float = 0.0
    """Processor time in microseconds of a rank for each byte that the rank sends: sending, receiving, and copies. On
    `Cluster.allreduce` for each byte that the rank holds, with the sums, and with copies into the bucket's memory and back."""
    shared: bool = False
    """Whether all ranks of a node share this link, as GPUs behind one PCIe switch do. `Cluster.intra` alone uses this field;
    ranks always share their node's `inter` link."""
    up_gbps: float | None = None
    """Gigabits per second at which a node sends, for links between nodes; it then receives at `gbps`. None: both are `gbps`."""
    flow_gbps: float | None = None
    """Gigabits per second of one flow from a rank to another rank, for links between nodes. Less than the node's rate if the node
    has several NICs, or if the network limits each connection. None: one flow may have the whole rate."""
    message_us: float | None = None
    """Microseconds of each further message that does not wait for the message before, as in a direct exchange with several ranks;
    at most `alpha_us`. The rest of `alpha_us` is latency: the link is free meanwhile. None: as `alpha_us`."""

    def __post_init__(self) -> None:
        numbers(self, "a latency in microseconds", "alpha_us")
        numbers(self, "a time in microseconds", "message_us", "cpu_us", "cpu_us_per_byte")
        numbers(self, "a rate in gigabits per second", "gbps", *_BETWEEN_NODES, positive=True)
        flags(self, "shared")
        if self.message_us is not None and self.message_us > self.alpha_us:
            raise FormatError(
                f"message_us is {show(self.message_us)}, and alpha_us is {show(self.alpha_us)}: a further message takes no "
                "longer than the first one. Write at most alpha_us, or leave message_us out."
            )

    @property
    def free_us(self) -> float:
        """The part of `alpha_us` in which the link is free for other messages."""
        return 0.0 if self.message_us is None else self.alpha_us - self.message_us

    def latency_us(self, messages: float, rounds: float) -> float:
        """Microseconds of an exchange of no bytes. messages: of one rank. rounds: those that wait for the message before.

        >>> Link(100.0, 1.0).latency_us(7, 1), Link(100.0, 1.0, message_us=20.0).latency_us(7, 1)
        (700.0, 220.0)
        """
        if self.message_us is None:
            return messages * self.alpha_us
        return messages * self.message_us + rounds * self.free_us

    @property
    def least_gbps(self) -> float:
        """The rate of a single flow in the slower direction."""
        return min(rate for rate in (self.gbps, self.up_gbps, self.flow_gbps) if rate is not None)

    def scaled(self, part: float, whole: float = 1.0) -> "Link":
        """The link of a node with `part` / `whole` of the rate in both directions. `flow_gbps` does not change."""
        up_gbps = None if self.up_gbps is None else self.up_gbps * part / whole
        return msgspec.structs.replace(self, gbps=self.gbps * part / whole, up_gbps=up_gbps)


_BETWEEN_NODES = ("up_gbps", "flow_gbps")
"""Fields of links between nodes."""


class Cluster(Document, frozen=True, kw_only=True):
    """Nodes with an `intra` link inside each, and an `inter` link of each to the others.

    >>> cluster = Cluster(nodes=2, ranks_per_node=4, intra=Link(5.0, 400.0), inter=Link(30.0, 25.0))
    >>> cluster.world_size
    8
    """

    what: ClassVar[str] = "cluster"
    remedy: ClassVar[str] = (
        "A cluster file is made by `gradwire profile` or `handle.profile(FOLDER)`, or by hand: see docs/how-to/plan-a-cluster.md."
    )
    omit_at_default: ClassVar[tuple[str, ...]] = (
        "allreduce",
        "ddp",
        "launch_us",
        "processors",
        "staging_gbps",
        "slow_nodes",
        "slow_at",
        "uneven",
        "made",
    )

    version: int = 1
    nodes: int
    ranks_per_node: int
    intra: Link
    inter: Link
    allreduce: Link | None = None
    """The link for the backend's own all-reduce, which may be faster or slower than other exchanges: between nodes, or inside a
    single node. The measured rate is that of all nodes together, slow nodes included. None: as fast as other exchanges."""
    ddp: Link | None = None
    """The link of the all-reduce that DistributedDataParallel runs, if another library than gradwire performs it: on CPUs torch's
    own process group. Times are those of a ring. None: as `allreduce`."""
    launch_us: float | None = None
    """Processor time in microseconds that a rank with lanes spends on each exchange, without its codecs and without `cpu_us` and
    `cpu_us_per_byte` of the links: threads that wake, calls of the backend. None counts as 0. All-reduces of gradients have
    `allreduce.cpu_us` instead, if measured."""
    processors: float | None = None
    """The number of processors that the ranks of a node share. If ranks are more, codecs on CPUs and launches take longer, since
    all ranks do them at about the same time. If there are two or more for each rank, codecs on CPUs run while the rank computes.
    Nodes that are emulated on one machine have a part of its processors each. None: a rank has one to itself."""
    staging_gbps: float | None = None
    """Gigabits per second of copies between a GPU and the host's memory, if payloads travel through it. None: they do not."""
    slow_nodes: tuple[Link, ...] = ()
    """The inter links of nodes that are slower than `inter`, one for each of these nodes. It makes no difference which nodes they
    are, because every exchange waits for the slowest."""
    slow_at: tuple[int, ...] = ()
    """The nodes of the links in `slow_nodes`, counted from 0. With it the planner gives nodes with slow uplinks smaller shards.
    Empty: unknown, and shards are equal."""
    uneven: bool = False
    """Whether nodes have different numbers of ranks. Then `ranks_per_node` is that of the largest, times and accuracy are
    predicted as if all had as many, and plans pair no ranks of different nodes."""
    made: Made | None = None

    def __post_init__(self) -> None:
        only_version(self.version)
        whole("nodes", self.nodes, "a number of nodes", low=1)
        whole("ranks_per_node", self.ranks_per_node, "the ranks of one node", low=1)
        if self.world_size > MOST_RANKS:
            raise FormatError(
                f"nodes times ranks_per_node is {self.world_size}: memory and time of a prediction grow with the ranks, so there "
                f"are at most {MOST_RANKS:,}. Write fewer nodes, or fewer ranks of each."
            )
        for field in ("intra", "inter"):
            if not isinstance(link := getattr(self, field), Link):
                raise FormatError(f"{field} is {show(link)}: it must be a Link.")
        for field in ("allreduce", "ddp"):
            if not isinstance(link := getattr(self, field), (Link, type(None))):
                raise FormatError(f"{field} is {show(link)}: it must be a Link, or be left out.")
        numbers(self, "a time in microseconds", "launch_us")
        numbers(self, "a number of processors", "processors", positive=True)
        flags(self, "uneven")
        numbers(self, "a rate in gigabits per second", "staging_gbps", positive=True)
        freeze(self, "slow_nodes")
        each("slow_nodes", self.slow_nodes, Link)
        if len(self.slow_nodes) > self.nodes:
            raise FormatError(
                f"slow_nodes has {len(self.slow_nodes)} links, but nodes is {self.nodes}: each link is that of one node. Leave "
                "out links, or correct nodes."
            )
        freeze(self, "slow_at")
        for place, node in enumerate(self.slow_at):
            whole(f"slow_at[{place}]", node, "a node, counted from 0", high=self.nodes - 1)
        if self.slow_at and not len({*self.slow_at}) == len(self.slow_at) == len(self.slow_nodes):
            raise FormatError(
                f"slow_at is {show(list(self.slow_at))}, and slow_nodes has {len(self.slow_nodes)} links: name the node of each "
                "link once, or leave out slow_at."
            )
        self._check_inside()

    def _check_inside(self) -> None:
        """Refuse fields of links between nodes on a link inside a node."""
        inside = {"intra": self.intra} | ({"allreduce": self.allreduce, "ddp": self.ddp} if self.nodes == 1 else {})
        for name, link in inside.items():
            for field in _BETWEEN_NODES:
                if (rate := getattr(link, field, None)) is not None:
                    raise FormatError(
                        f"{name}.{field} of {self.nodes} nodes is {show(rate)}, but this link is inside a node, where one rate "
                        f"counts in both directions and for all flows. Leave out {field}, and write the rate as {name}.gbps."
                    )

    @property
    def ranks_per_node_if_even(self) -> int | None:
        """`ranks_per_node`; None if nodes have different numbers of ranks."""
        return None if self.uneven and 1 not in (self.nodes, self.ranks_per_node) else self.ranks_per_node

    @property
    def is_far(self) -> bool:
        """Whether the link on which ranks exchange is far.

        >>> Cluster(nodes=2, ranks_per_node=1, intra=Link(5.0, 9.0), inter=Link(25_000.0, 0.1, message_us=40.0)).is_far
        True
        """
        return self.latency_us >= FAR_US

    @property
    def latency_us(self) -> float:
        """The time on the way of a message over the link on which ranks exchange."""
        link = self.inter if self.nodes > 1 else self.intra
        return link.alpha_us if link.message_us is None else link.free_us

    @property
    def ranks_per_processor(self) -> float:
        """How many ranks share a processor, at least 1.

        >>> Cluster(nodes=1, ranks_per_node=4, intra=Link(5.0, 400.0), inter=Link(5.0, 400.0), processors=2).ranks_per_processor
        2.0
        """
        return 1.0 if self.processors is None else max(1.0, self.ranks_per_node / self.processors)

    @property
    def processors_per_rank(self) -> float:
        """How many processors a rank has to itself, at least 1.

        >>> Cluster(nodes=1, ranks_per_node=2, intra=Link(5.0, 4.0), inter=Link(5.0, 4.0), processors=6).processors_per_rank
        3.0
        """
        return 1.0 if self.processors is None else max(1.0, self.processors / self.ranks_per_node)

    @property
    def of_ddp(self) -> "Cluster":
        """The cluster as DistributedDataParallel sees it: its all-reduce is `ddp`."""
        return self if self.ddp is None else msgspec.structs.replace(self, allreduce=self.ddp, ddp=None)

    @property
    def node_links(self) -> tuple[Link, ...]:
        """The inter links of the nodes, each kind once."""
        alike = (self.inter,) if len(self.slow_nodes) < self.nodes else ()
        return tuple(dict.fromkeys((*alike, *self.slow_nodes)))

    def links_for(self, task: str) -> tuple[Link, tuple[Link, ...]]:
        """The intra link and the nodes' inter links as a collective, such as `allreduce:inter`, sees them."""
        if self.allreduce is None or task != "allreduce:inter":
            return self.intra, self.node_links
        return (self.allreduce, self.node_links) if self.nodes == 1 else (self.intra, (self.allreduce,))

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes together."""
        return self.nodes * self.ranks_per_node
