"""What CGX's ring and tree cost, which add payloads by decoding and encoding again at every hop (docs/papers/cgx.md).

Hops follow each other, so all encodes of the busiest rank count at the first task and all decodes at the last.
"""

from gradwire.costs.collectives import Load, Traffic, flat_traffic
from gradwire.costs.steps import Step


def ring_steps(option: tuple[str, ...], nodes: int, ranks_per_node: int, routing: str) -> tuple[Step, ...]:
    """Of each shard one encode, one decode on its way up and one on its way down, but for the own shard's."""
    comp, up, down, decomp = option
    ranks = nodes * ranks_per_node
    first, second = (flat_traffic(word, nodes, ranks_per_node, "ring") for word in ("reducescatter", "allgather"))
    return (
        Step(comp, 1.0, 1, 0, None, False),
        Step(up, 1.0, 1, 1, first, False),
        Step(down, 1 / ranks, 1, 1, second, True),
        Step(decomp, (ranks - 1) / ranks, 2, 0, None, True),
    )


def tree_steps(option: tuple[str, ...], nodes: int, ranks_per_node: int, routing: str) -> tuple[Step, ...]:
    """The root's sum has passed one encode and one decode a hop, and is encoded and decoded once more."""
    comp, up, down, decomp = option
    inside, hops = (ranks_per_node - 1).bit_length(), (nodes * ranks_per_node - 1).bit_length()
    traffic = Traffic(Load(inside, float(inside)), Load(hops - inside, float(hops - inside)), float(hops))
    if nodes == 1:
        traffic = Traffic(Load(hops, float(hops)), Load(0, 0.0), float(hops))
    exchange = Step(up, 1.0, 1, 1, traffic, False)
    return (
        Step(comp, 1.0, hops + 1, 0, None, False),
        exchange,
        exchange._replace(task=down, gathers=True),
        Step(decomp, 1.0, hops + 1, 0, None, True),
    )
