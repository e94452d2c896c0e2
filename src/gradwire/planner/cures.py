"""What to change where limits leave no plan: each cure was tried, and says how much it gives."""

from collections.abc import Sequence

from gradwire.core.cluster import Cluster
from gradwire.errors import PlanError
from gradwire.planner.listing import choose
from gradwire.planner.options import Option

__all__ = ["BYTECOMP_ONLY", "numbered", "options_within"]

BYTECOMP_ONLY = ("all-compressed", "myopic")
"""Restricted searches that are ways to choose, and no part of the tree."""


def numbered(cures: Sequence[str]) -> str:
    """Cures as a list of which one is enough.

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

    def here(
        most: int | None = max_encodes,
        part: str | None = part,
        nodes: int = cluster.nodes,
        local: int = cluster.ranks_per_node,
    ) -> tuple[Option, ...]:
        return choose(nodes=nodes, ranks_per_node=local, devices=(device,), max_encodes=most, restrict=part)

    found = here()
    if not must_compress or _compressing(found):
        return found
    cures = []
    for encodes in range((max_encodes or 0) + 1, 5) if max_encodes is not None else ():
        if count := _compressing(here(most=encodes)):
            cures.append(f"allow {encodes} encode{'s' * (encodes > 1)} (max_encodes, leaves {count} options)")
            break
    if part is not None and (count := _compressing(here(part=None))):
        cures.append(f"search without restrict={restrict!r} (leaves {count} options)")
    if 1 in (cluster.nodes, cluster.ranks_per_node) and (count := _compressing(here(nodes=2, local=2))):
        cures.append(f"plan for several nodes of several ranks, which have two links (leaves {count} options)")
    if max_encodes is not None and part is not None and not cures:
        cures.append(f"drop both limits (leaves {_compressing(here(most=None, part=None))} options)")
    cures.append("give no spec, for a plan without compression")
    raise PlanError(
        f"no option is left that compresses: {cluster.nodes} nodes of {cluster.ranks_per_node} ranks, codecs on {device}, "
        f"max_encodes={max_encodes}, restrict={restrict!r}. The specs given could not be used. {numbered(cures)}"
    )


def _compressing(options: Sequence[Option]) -> int:
    return sum(option.compresses for option in options)
