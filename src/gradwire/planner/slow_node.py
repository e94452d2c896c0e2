"""Plans with one node whose link is slower than the cluster file says: the worst case and the mean. Pure: no torch.

Every exchange waits for the slowest node. So nodes that are alike give one case; nodes that differ give one case each.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import msgspec

from gradwire.core import Cluster, Costs, Link, Plan, Profile, Spec
from gradwire.errors import PlanError
from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.methods import make_plan
from gradwire.planner.shards import with_shares
from gradwire.planner.starts import ddp_draft
from gradwire.sim import Rules, as_ddp, device_of, rules_of, simulate

PLAIN_DDP = "plain DDP"
"""The name of the plan that DistributedDataParallel would run."""


class SlowCase(NamedTuple):
    """A cluster in which one node's link is slower than before."""

    cluster: Cluster
    chance: Fraction
    """Probability of this case, if each node is equally likely to be the slow one."""


class SlowRow(NamedTuple):
    """The steps of one plan, for each factor by which one node's link may be slower."""

    name: str
    steps_us: tuple[float, ...]
    """Microseconds of the step by factor, in the mean over the slow node."""
    mean_us: float
    """Mean over all factors, with equal weights."""
    worst_us: float
    """Longest step over all factors and nodes."""


class SlowAnswer(NamedTuple):
    """Steps of plans with one slow node."""

    model: str
    slower: tuple[float, ...]
    """Factors by which one node's link is slower."""
    rows: tuple[SlowRow, ...]
    ddp_is_own: bool = False
    """Whether gradwire runs plain DDP's buckets as DDP does."""

    @property
    def best(self) -> SlowRow:
        """The row with the least mean. Among equal means the row with the least worst case, then the first."""
        return min(self.rows, key=lambda row: (row.mean_us, row.worst_us))

    @property
    def best_plan(self) -> SlowRow:
        """`best`; where gradwire would run DDP's buckets in another way, without plain DDP, if there are other plans."""
        own = tuple(row for row in self.rows if self.ddp_is_own or row.name != PLAIN_DDP)
        return self._replace(rows=own).best if own else self.best

    def as_table(self) -> str:
        """One line for each plan, one column for each factor, then mean and worst."""
        width = max(len(row.name) for row in self.rows)
        heads = [*(f"{factor:g}" for factor in self.slower), "mean", "worst"]
        lines = ["Step in ms where one node's link is so many times slower:"]
        lines.append(" " * width + "".join(f" {head:>10}" for head in heads))
        for row in self.rows:
            values = "".join(f" {us / 1e3:>10.3f}" for us in (*row.steps_us, row.mean_us, row.worst_us))
            lines.append(f"{row.name:<{width}}{values}")
        lines.append("")
        lines.append("Columns of factors: the mean over which node it is. mean: of these. worst: of all factors and nodes.")
        lines.append(f"Least mean: {self.best.name}.")
        if (own := self.best_plan) != self.best:
            more_ms = (own.mean_us - self.best.mean_us) / 1e3
            lines.append(f"Of the plans for gradwire: {own.name}, in the mean {more_ms:.3f} ms slower than plain DDP.")
        return "\n".join(lines) + "\n"

    def as_json(self) -> str:
        """JSON of all numbers on one line; equal inputs give equal bytes."""
        rows = [row._asdict() for row in self.rows]
        best = {"best": self.best.name, "best_plan": self.best_plan.name}
        return json.dumps({"model": self.model, "slower": self.slower, "rows": rows} | best) + "\n"


Seen = Callable[[int], None]
"""Callback after each simulated cluster, with the number of clusters so far."""


def slow_cases(cluster: Cluster, slower: float) -> list[SlowCase]:
    """The possible clusters if one node's link is `slower` times slower. Raises PlanError for a single node.

    The measured rate of all-reduce falls as that of the slowest node does.

    >>> link = Link(alpha_us=30.0, gbps=10.0)
    >>> cluster = Cluster(nodes=4, ranks_per_node=1, intra=link, inter=link, slow_nodes=[Link(30.0, 2.0)])
    >>> for case in slow_cases(cluster, 2.0):
    ...     print([link.gbps for link in case.cluster.slow_nodes], case.chance)
    [2.0, 5.0] 3/4
    [1.0] 1/4
    """
    if cluster.nodes == 1:
        raise PlanError(
            "nodes is 1: one node has no link to others that could be slow. Describe a cluster of several nodes, or leave out "
            "--slow-node."
        )
    slow = cluster.slow_nodes
    found: dict[Cluster, int] = {}
    if alike := cluster.nodes - len(slow):
        found[_with(cluster, (*slow, cluster.inter.scaled(1.0, slower)))] = alike
    for place, link in enumerate(slow):
        case = _with(cluster, (*slow[:place], link.scaled(1.0, slower), *slow[place + 1 :]))
        found[case] = found.get(case, 0) + 1
    return [SlowCase(case, Fraction(count, cluster.nodes)) for case, count in found.items()]


def _with(cluster: Cluster, slow_nodes: tuple[Link, ...]) -> Cluster:
    changed = msgspec.structs.replace(cluster, slow_nodes=slow_nodes, slow_at=())
    before, now = _slowest(cluster), _slowest(changed)
    if before == now:
        return changed
    sums = {"allreduce": cluster.allreduce, "ddp": cluster.ddp}
    return msgspec.structs.replace(changed, **{name: link.scaled(now, before) for name, link in sums.items() if link is not None})


def _slowest(cluster: Cluster) -> float:
    return min(link.least_gbps for link in cluster.node_links)


def steps_with_slow_node(
    plans: Mapping[str, Plan],
    profile: Profile,
    cluster: Cluster,
    costs: Costs,
    slower: Sequence[float],
    rules: Rules | None = None,
    seen: Seen = lambda count: None,
) -> SlowAnswer:
    """Simulate each plan with one node's link slower by each of these factors. The plan named `PLAIN_DDP` takes what
    DistributedDataParallel takes for it. Raises PlanError as simulating does."""
    steps: dict[str, list[float]] = {name: [] for name in plans}
    worst = dict.fromkeys(plans, 0.0)
    for done, factor in enumerate(slower, 1):
        cases = slow_cases(cluster, factor)
        for name, plan in plans.items():
            found = []
            for case in cases:
                there, own = case.cluster, rules
                if name == PLAIN_DDP:
                    there, own = as_ddp(there, rules_of(device_of(profile), there) if rules is None else rules)
                found.append(simulate(plan, profile, there, costs, own).step_us)
            steps[name].append(sum(float(case.chance) * us for case, us in zip(cases, found, strict=True)))
            worst[name] = max(worst[name], *found)
        seen(done)
    rows = [SlowRow(name, tuple(us), sum(us) / len(us), worst[name]) for name, us in steps.items()]
    given = cluster, rules_of(device_of(profile), cluster) if rules is None else rules
    return SlowAnswer(profile.model, tuple(slower), tuple(rows), as_ddp(*given) == given)


def plans_for_slow_node(
    profile: Profile,
    cluster: Cluster,
    costs: Costs,
    slower: Sequence[float],
    specs: Sequence[Spec] = (),
    limits: Limits | None = None,
    rules: Rules | None = None,
    method: str = "joint",
    seen: Seen = lambda count: None,
) -> dict[str, Plan]:
    """Plain DDP and a plan for each factor, by name. Each plan is made for the worst choice of the slow node. Equal plans are
    there once, but a plan like plain DDP's has a row of its own where DDP's all-reduce takes another time than gradwire's.

    The plans' predictions are for the cluster without a slow node. Raises PlanError as planning does.
    """
    given = PlanningJob(profile, cluster, costs, specs, limits, rules)
    baseline = ddp_draft(given)
    plain = PlanningJob(profile, cluster, costs, specs, (limits or Limits()).in_backward(), rules)
    plans = {PLAIN_DDP: plain.plan(baseline, baseline)}
    found = plans if as_ddp(cluster, given.rules) == (cluster, given.rules) else {}
    for done, factor in enumerate(slower, 1):
        case = min(slow_cases(cluster, factor), key=lambda case: _slowest(case.cluster)).cluster
        draft = make_plan(PlanningJob(profile, case, costs, specs, limits, rules), method).draft
        plan, _ = with_shares(given, given.plan(draft, baseline))
        if plan not in found.values():
            found[f"planned for {factor:g}"] = plan
        seen(done)
    return plans | found
