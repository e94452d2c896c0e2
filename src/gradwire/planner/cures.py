"""Cures for limits that leave no plan. Each cure was tried, and says how many options it leaves."""

from collections.abc import Sequence
from typing import Any

from gradwire.core.cluster import Cluster
from gradwire.errors import PlanError
from gradwire.planner.listing import choose
from gradwire.planner.options import Option

BYTECOMP_ONLY = ("all-compressed", "myopic")
"""Restricted searches that choose in another way, and leave the whole tree."""


def numbered(cures: Sequence[str]) -> str:
    """Cures as a numbered list.

    >>> numbered(["allow 2 encodes", "allow gpu"])
    'Any one of these helps: 1. allow 2 encodes; 2. allow gpu.'
    """
    if len(cures) == 1:
        return f"What helps: {cures[0]}."
    return f"Any one of these helps: {'; '.join(f'{place}. {cure}' for place, cure in enumerate(cures, 1))}."


def options_within(
    cluster: Cluster, device: str, max_encodes: int | None, restrict: str | None, must_compress: bool
) -> tuple[Option, ...]:
    """The options on a cluster with codecs on one device, within limits.

    Raises PlanError with numbered cures if `must_compress` and no option is left that compresses.
    """
    part = None if restrict in BYTECOMP_ONLY else restrict
    limits: dict[str, Any] = {
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "devices": (device,),
        "max_encodes": max_encodes,
        "restrict": part,
    }
    found = choose(**limits)

    def count(**other: Any) -> int:
        return sum(option.compresses for option in choose(**limits | other))

    if not must_compress or any(option.compresses for option in found):
        return found
    cures = []
    for encodes in range((max_encodes or 0) + 1, 5) if max_encodes is not None else ():
        if left := count(max_encodes=encodes):
            cures.append(f"allow {encodes} encode{'s' * (encodes > 1)} (max_encodes, leaves {left} options)")
            break
    if part is not None and (left := count(restrict=None)):
        cures.append(f"search without restrict={restrict!r} (leaves {left} options)")
    if 1 in (cluster.nodes, cluster.ranks_per_node) and (left := count(nodes=2, ranks_per_node=2)):
        cures.append(f"plan for several nodes of several ranks, which have two links (leaves {left} options)")
    if max_encodes is not None and part is not None and not cures:
        cures.append(f"drop both limits (leaves {count(max_encodes=None, restrict=None)} options)")
    cures.append("give no spec, for a plan without compression")
    raise PlanError(
        f"no option is left that compresses: {cluster.nodes} nodes of {cluster.ranks_per_node} ranks, codecs on {device}, "
        f"max_encodes={max_encodes}, restrict={restrict!r}. The plan could not use the specs. {numbered(cures)}"
    )
