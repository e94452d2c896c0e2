"""Emulated clusters: every node is a network namespace on one machine, and every link has its own rate.

>>> with EmulatedCluster(nodes=2, ranks_per_node=1, inter="500mbit") as cluster:  # doctest: +SKIP
...     code = cluster.run([sys.executable, "-u", "train.py"])

Needs Linux, iproute2, and root or unprivileged user namespaces; `permission_problem()` says what is missing. A link has a rate
and no added delay; the network between `sites` has delay, jitter and loss. A rank runs on host `node<i>` at 10.218.x.y. Ranks
share the machine's cores, memory and disk.
"""

from gradwire.testbed.cluster import MOST_NODES, EmulatedCluster, emulate
from gradwire.testbed.namespaces import permission_problem, reexec_in_user_namespace_if_needed
from gradwire.testbed.network import parse_rate
from gradwire.testbed.supervisor import (
    TIMED_OUT,
    Grace,
    LineCallback,
    RankCommand,
    Supervisor,
    exit_on_termination,
    free_port,
    rank_variables,
)
from gradwire.testbed.wide_area import RelayCounts, WideArea, parse_wide_area

__all__ = [
    "MOST_NODES", "TIMED_OUT", "EmulatedCluster", "Grace", "LineCallback", "RankCommand", "RelayCounts", "Supervisor",
    "WideArea", "emulate", "exit_on_termination", "free_port", "parse_rate", "parse_wide_area", "permission_problem",
    "rank_variables", "reexec_in_user_namespace_if_needed",
]  # fmt: skip
