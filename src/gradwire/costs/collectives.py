"""The load of collectives on links: messages, and bytes.

A link works full duplex. Inside a node each rank has its own intra link, or all share one, as behind a PCIe switch; all share the
node's inter link. A shared link carries the sum of their flows. Times follow from the alpha-beta model: messages * alpha + bytes
* beta. If the time of a further message is known (`Link.message_us`), only messages that wait for another one take alpha each:
those of a chain or a ring do, and those that a rank sends to several ranks at once do not.

An exchange takes as long as the slowest of its lines: the link inside a node, and both directions of each node's inter link. A
flow goes from one rank to another. If one flow cannot have a node's whole rate, k flows have k times the rate of one flow, at
most the whole rate. Buckets take roots in turn over all ranks, so a root counts as being on the slowest node.

| of n ranks that hold x bytes each | messages | bytes, busiest rank |
|---|---|---|
| allreduce | 2(n-1) | 2(n-1)/n x |
| reducescatter, alltoall | n-1 | (n-1)/n x |
| allgather, gather (received by the root) | n-1 | (n-1) x |
| reduce, broadcast as a pipelined chain | n-1 | x |
| reduce, broadcast, each rank and the root | n-1 | (n-1) x |
| allreduce by halving, n a power of 2 | 2 log2(n) | 2(n-1)/n x |
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradwire.core import Link, primes_of
from gradwire.errors import PlanError

ROUTINGS = ("ring", "direct", "wires")
"""The routes of sums and gathers. ring: each rank sends to its neighbour; rooted collectives are a chain, as in NCCL for large
messages. direct: every pair of ranks exchanges by itself; rooted collectives are messages between the root and each other
rank, as in gradwire's own exchanges, on GPUs in one grouped call (decisions 1 and 13). wires: as direct, but flat sums of
gradients go as on gradwire's wires between CPUs (`sum_traffic`). All-reduce is otherwise a ring in all of them. The routing makes
a difference if ranks share a node's inter link, and in the messages of sums."""


class Load(NamedTuple):
    """Load of an exchange on one link."""

    messages: float
    """Number of messages of a rank. `Traffic.rounds` says how many of them wait for another one."""
    factor: float
    """Bytes over the busiest link in its busier direction, as a multiple of the bytes that a rank holds before the exchange."""


class Flows(NamedTuple):
    """Messages between ranks that cross a node's inter link in one direction, all of one size."""

    factor: float
    """Bytes of all flows together, as a multiple of the bytes that a rank holds."""
    at_once: int
    """Number of flows at the same time."""

    def times(self, groups: int) -> "Flows":
        """The flows of `groups` groups together."""
        return Flows(self.factor * groups, self.at_once * groups)


class Line(NamedTuple):
    """The time of an exchange on one link in one direction: a latency, and a time for each byte that a rank holds."""

    latency_us: float
    factor: float
    """Bytes on the link, as a multiple of the bytes that a rank holds."""
    us_per_byte: float
    """Microseconds for each of the bytes on the link."""
    free_us: float = 0.0
    """The part of `latency_us` in which the link is free for other exchanges."""


def longest_us(lines: Iterable[Line], held_bytes: float) -> float:
    """Microseconds of an exchange in which a rank holds so many bytes."""
    times_us = [latency_us + factor * held_bytes * us_per_byte for latency_us, factor, us_per_byte, _ in lines]
    return max(times_us)


def longest(lines: Iterable[Line], held_bytes: float) -> tuple[float, float]:
    """Microseconds of an exchange in which a rank holds so many bytes, and how many of them its link is free."""
    return max((latency_us + factor * held_bytes * us, free_us) for latency_us, factor, us, free_us in lines)


class Traffic(NamedTuple):
    """Load of an exchange on both links, which work at the same time."""

    intra: Load
    inter: Load
    sent: float
    """Bytes that the busiest rank sends over both links, as a multiple of the bytes that a rank holds."""
    inside: float | None = None
    """Bytes that all ranks of a node send inside the node, as a multiple of the bytes that a rank holds. None: unknown, as for
    collectives of other packages; then a shared intra link counts as a private one."""
    up: Flows | None = None
    """Flows to other nodes from the node that sends most. None: one flow of all bytes."""
    down: Flows | None = None
    """Flows from other nodes to the node that receives most. None: one flow of all bytes."""
    in_turn: bool = False
    """Whether the links work one after the other."""
    rounds: tuple[float, float] | None = None
    """Number of messages on the intra and on the inter link that wait for the message before. None: all."""

    def intra_factor(self, intra: Link) -> float:
        """Bytes over an intra link, as a multiple of what a rank holds."""
        return self.inside if intra.shared and self.inside is not None else self.intra.factor

    def lines(self, intra: Link, nodes: Sequence[Link]) -> tuple[Line, ...]:
        """The exchange's lines on the links that it uses, at least one. `nodes`: the inter links of nodes, each kind once."""
        inside, between = self.rounds or (self.intra.messages, self.inter.messages)
        latency_us = intra.latency_us(self.intra.messages, inside)
        lines = [Line(latency_us, self.intra_factor(intra), us_per_byte(intra), inside * intra.free_us)]
        alone = Flows(self.inter.factor, 1)
        for link in nodes:
            latency_us = link.latency_us(self.inter.messages, between)
            for flows, gbps in ((self.down or alone, link.gbps), (self.up or alone, link.up_gbps or link.gbps)):
                limit = gbps if link.flow_gbps is None else min(gbps, max(1, flows.at_once) * link.flow_gbps)
                lines.append(Line(latency_us, flows.factor, 8 / (limit * 1000), between * link.free_us))
        if self.in_turn:
            first = lines[0]
            lines = [
                Line(first[0] + line[0], 1.0, first[1] * first[2] + line[1] * line[2], first.free_us + line.free_us)
                for line in lines[1:]
            ]
        return tuple(dict.fromkeys(line for line in lines if line.latency_us or line.factor)) or tuple(lines[:1])

    def time_us(self, held_bytes: float, intra: Link, *nodes: Link) -> float:
        """Microseconds of the line that takes longest."""
        return longest_us(self.lines(intra, nodes), held_bytes)


NOTHING = Load(0, 0.0)
ROOTED = ("gather", "reduce", "broadcast")
"""Collectives with a root."""


def us_per_byte(link: Link) -> float:
    """The link's beta: microseconds for each byte of a single flow in the slower direction.

    >>> us_per_byte(Link(alpha_us=30.0, gbps=25.0)), us_per_byte(Link(alpha_us=30.0, gbps=25.0, up_gbps=5.0))
    (0.00032, 0.0016)
    """
    return 8 / (link.least_gbps * 1000)


def group_traffic(word: str, ranks: int, link: str, routing: str = "ring", flows: int = 1) -> Traffic:
    """The traffic of a collective among ranks that are all joined by one kind of link.

    word: one of LINK_TASKS. ranks: number of ranks in the group. link: 'intra' or 'inter'. flows: number of groups that do the
    same over the same link at the same time, such as the 8 ranks of a node that exchange their shards between nodes.

    >>> group_traffic("allreduce", 4, "inter").inter
    Load(messages=6, factor=1.5)
    """
    messages, factor, sent = _on_one_link(word, ranks, routing)
    load = Load(messages, factor * flows)
    rounds = _rounds(load, word, routing)
    if link == "inter":
        busy = Flows(factor, ranks - 1 if _in_pairs(word, routing) else 1)
        up, down = _directions(word, busy, Flows(min(1.0, factor), 1))
        return Traffic(NOTHING, load, sent, None, up.times(flows), down.times(flows), rounds=(0, rounds))
    # rooted ones send to the root or from it alone, whether along a chain or not
    return Traffic(load, NOTHING, sent, ranks - 1.0 if word in ROOTED else ranks * sent, rounds=(rounds, 0))


def flat_traffic(word: str, nodes: int, ranks_per_node: int, routing: str = "ring") -> Traffic:
    """The traffic of a collective among all ranks of a cluster as one group, without regard to nodes.

    On a ring each node's inter link carries one flow. When every pair of ranks exchanges directly, the inter link carries a flow
    from each rank of the node to each rank of other nodes.

    >>> flat_traffic("alltoall", nodes=2, ranks_per_node=4).inter  # each of 4 ranks sends 4 of 8 parts to the other node
    Load(messages=4, factor=2.0)
    """
    world, local = nodes * ranks_per_node, ranks_per_node
    if nodes == 1:
        return group_traffic(word, world, "intra", routing)
    if local == 1:
        return group_traffic(word, world, "inter", routing)
    messages, factor, sent = _on_one_link(word, world, routing)
    abroad = world - local
    if _in_pairs(word, routing):
        each = factor / (world - 1)  # to or from every other rank
        senders = 1 if word in ROOTED else local
        inside, between = (local - 1) * each, senders * abroad * each
        ways = _directions(word, Flows(between, senders * abroad), Flows(local * each, local))
        loads = Load(local - 1, inside), Load(abroad, between)
        return Traffic(*loads, sent, senders * inside, *ways, rounds=(1, 1))
    load = Load(messages, factor)
    # the last rank of a node sends to another node
    return Traffic(load, load, sent, (local - 1) * factor)


def sum_traffic(word: str, nodes: int, ranks_per_node: int) -> tuple[Traffic, Traffic | None]:
    """The traffic of flat sums of gradients on gradwire's wires: of small sums, and of those that go around a ring.

    word: allreduce; alltoall or allgather for the phases of a sum that ends with shard j on rank j. `gradwire.core.goes_around`
    chooses by size. None: all sums are small. Small sums are halved: the ranks of a stage exchange directly. In an all-reduce the
    ranks of a node exchange first, while ranges are long; otherwise the ranks of different nodes do.

    >>> small, large = sum_traffic("allreduce", nodes=12, ranks_per_node=1)
    >>> small.inter, large.inter  # stages of 2, 2 and 3 ranks, twice
    (Load(messages=8, factor=1.8333333333333333), Load(messages=22, factor=1.8333333333333333))
    """
    phases, held = (2, 1.0) if word == "allreduce" else (1, 1.0 if word == "alltoall" else 1 / (nodes * ranks_per_node))
    inside, between = (phases * (1 - 1 / ranks) / held for ranks in (ranks_per_node, nodes))
    if word == "allreduce":
        between /= ranks_per_node
    else:
        inside /= nodes
    stages = [primes_of(ranks) for ranks in (ranks_per_node, nodes)]
    messages = [phases * sum(prime - 1 for prime in primes) for primes in stages]
    rounds = phases * len(stages[0]), phases * len(stages[1])
    flows = Flows(ranks_per_node * between, ranks_per_node)
    intra, inter = Load(messages[0], inside), Load(messages[1], flows.factor)
    small = Traffic(intra, inter, inside + between, ranks_per_node * inside, flows, flows, nodes > 1 < ranks_per_node, rounds)
    world = nodes * ranks_per_node
    if nodes == 1 or world == 2:
        return small, None
    large = flat_traffic({"alltoall": "reducescatter"}.get(word, word), nodes, ranks_per_node, "ring")
    hops = large.inter.messages
    abroad = -(-hops * nodes // world)  # neighbours of the ring are ranks of one node, except for the last rank of each
    return small, large._replace(rounds=(hops - abroad, abroad))


def _in_pairs(word: str, routing: str) -> bool:
    """Whether every pair of ranks, or the root and each other rank, exchange directly."""
    return word in ("alltoall", "gather") or (routing != "ring" and word != "allreduce")


def _rounds(load: Load, word: str, routing: str) -> float:
    """Number of messages that wait for the message before."""
    return min(1, load.messages) if _in_pairs(word, routing) else load.messages


def _directions(word: str, busy: Flows, other: Flows) -> tuple[Flows, Flows]:
    """The flows from the node that sends most, and the flows to the node that receives most.

    busy: of the root's node, or of any node without a root. other: of a node that sends to the root or receives from it.
    """
    if word not in ROOTED or busy.at_once == 1:
        return busy, busy
    return (busy, other) if word == "broadcast" else (other, busy)


def _on_one_link(word: str, ranks: int, routing: str) -> tuple[float, float, float]:
    """Messages, bytes over the busiest rank's link, bytes sent by a rank."""
    others = ranks - 1
    if others == 0:
        return 0, 0.0, 0.0
    if word == "allreduce":
        return 2 * others, 2 * others / ranks, 2 * others / ranks
    if word in ("reducescatter", "alltoall"):
        return others, others / ranks, others / ranks
    if word == "allgather":
        return others, float(others), float(others)
    if word == "gather":
        return others, float(others), 1.0
    if word in ("reduce", "broadcast"):
        if routing == "ring":
            return others, 1.0, 1.0
        return others, float(others), float(others) if word == "broadcast" else 1.0
    raise PlanError(f"{word!r} is no collective of this table. Use one of gradwire.core.collectives.LINK_TASKS.")
