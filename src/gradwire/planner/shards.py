"""Sizes of shards for nodes whose uplinks are slow, and the least time of an exchange with them. Pure: no torch.

In a direct exchange each rank owns a shard. A rank with the part s of all shards, of n ranks, sends (1 - s) M bytes to other
owners in the reduce phase, where M is the payload of all gradients. In the gather phase it sends its sum to n - 1 ranks:
(n - 1) s M bytes. Together that is (1 + (n - 2) s) M. So a rank without a shard sends least, M bytes.
"""

from collections.abc import Sequence

import msgspec

from gradwire.core import Cluster, Plan
from gradwire.costs import bytes_of
from gradwire.planner.drafts import PlanningJob

_UNIT = 1000
"""Shares are parts of so many, or of more where there are many nodes."""
_LEAST_UNITS = 100
"""The least units of an equal share."""


def uplinks_of(cluster: Cluster) -> tuple[float, ...]:
    """Return for each node the rate in Gb/s at which it sends. Empty if the cluster does not say which nodes are slow.

    >>> from gradwire.core import Link
    >>> even, slow = Link(30.0, 10.0), Link(30.0, 10.0, up_gbps=2.5)
    >>> uplinks_of(Cluster(nodes=3, ranks_per_node=1, intra=even, inter=even, slow_nodes=[slow], slow_at=[1]))
    (10.0, 2.5, 10.0)
    """
    if not cluster.slow_at:
        return ()
    links = dict(zip(cluster.slow_at, cluster.slow_nodes, strict=True))
    found = (links.get(node, cluster.inter) for node in range(cluster.nodes))
    return tuple(min(link.gbps, link.up_gbps or link.gbps) for link in found)


def least_us(nbytes: float, rates_gbps: Sequence[float], shares: Sequence[float]) -> float:
    """Return the time in which the slowest node sends its bytes of an exchange. nbytes: the payload of all gradients.

    >>> least_us(1000.0, (10.0, 10.0, 10.0, 2.5), (1, 1, 1, 1)), least_us(1000.0, (10.0, 10.0, 10.0, 2.5), (1, 1, 1, 0))
    (4.8, 3.2)
    """
    count, whole = len(rates_gbps), sum(shares)
    return max(
        nbytes * (1 + (count - 2) * share / whole) * 8 / (1e3 * rate) for rate, share in zip(rates_gbps, shares, strict=True)
    )


def shares_of(rates_gbps: Sequence[float]) -> tuple[int, ...]:
    """Return the sizes of shards with which the slowest node takes the least time. Empty if equal shards are as good.

    With two ranks all sizes are: each sends its whole payload once.

    >>> shares_of((10.0, 10.0, 10.0, 2.5)), shares_of((10.0, 10.0, 10.0, 8.0)), shares_of((10.0, 10.0)), shares_of(())
    ((333, 333, 333, 0), (289, 289, 289, 132), (), ())
    """
    count = len(rates_gbps)
    if count < 3 or max(rates_gbps) == min(rates_gbps):
        return ()

    def parts(time: float) -> list[float]:
        """The largest parts with which every node needs at most this time, for a payload of 1 and in units of the rates."""
        return [min(1.0, max(0.0, (time * rate - 1) / (count - 2))) for rate in rates_gbps]

    low = high = 1 / min(rates_gbps)
    while sum(parts(high)) < 1:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(parts(middle)) >= 1 else (middle, high)
    found = parts(high)
    unit = max(_UNIT, _LEAST_UNITS * count)
    return tuple(round(unit * part / sum(found)) for part in found)


def with_shares(job: PlanningJob, plan: Plan) -> tuple[Plan, str]:
    """Return the plan with shards by uplinks, and a note with the least time of its direct exchanges; '' if nothing changes.

    Shares are for clusters with one rank a node that say which nodes are slow, and for buckets that are exchanged directly.
    """
    cluster = job.cluster
    rates = uplinks_of(cluster) if cluster.ranks_per_node == 1 else ()
    shares = shares_of(rates)
    tensors = {tensor.name: tensor for tensor in job.profile.tensors}
    direct = [bucket for bucket in plan.buckets if bucket.is_direct]
    if not shares or not direct or plan.shards_optimizer:
        return plan, ""
    nbytes = 0.0
    for bucket in direct:
        coded = {*bucket.compressed}
        sizes = bytes_of(
            [tensors[name] for name in bucket.tensors if name in coded or not coded],
            bucket.main_spec,
            [tensors[name] for name in bucket.tensors if coded and name not in coded],
        )
        nbytes += max(sizes.first, sizes.later)
    even_ms, least_ms = (least_us(nbytes, rates, each) / 1e3 for each in ((1,) * len(rates), shares))
    percent = ", ".join(f"{100 * share / sum(shares):.0f}" for share in shares)
    note = (
        f"Shards are by uplinks, {percent} % of the elements: the slowest node sends for at least {least_ms:.3f} ms, with equal "
        f"shards {even_ms:.3f} ms. The predicted step counts equal shards."
    )
    return msgspec.structs.replace(plan, shares=shares), note
