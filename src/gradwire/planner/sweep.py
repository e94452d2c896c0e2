"""Step times on several clusters, by several methods, as scaling factors. Pure: no torch.

The **scaling factor** of n ranks is T_n / (n * T_1), where T is samples a second. A rank does the same work alone and among
others, so the factor is the step of one rank alone divided by the step of n ranks. 1 is perfect.
"""

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from gradwire.core import Cluster, Costs, Plan, Profile, Spec, show, word
from gradwire.errors import PlanError
from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.methods import METHODS, make_plan
from gradwire.planner.starts import ddp_draft
from gradwire.sim import FS_PER_US, Rules, simulate

LABELS = {
    "ddp": "plain DDP",
    "layerwise": "layer-wise",
    "grace": "GRACE",
    "hipress": "HiPress",
    "hitopkcomm": "HiTopKComm",
    "byteps-compress": "BytePS-Compress",
    "fusion": "Cupcake's best fusion",
    "bytecomp": "ByteComp",
    "joint": "gradwire (joint)",
    "bound": "upper bound",
    "cupcake": "Cupcake's own search",
    "bucket": "bucket fusion",
    "even": "even split",
    "plan": "the plan",
}
"""Names of methods in pictures. bound: the scaling factor that no plan exceeds. plan: one plan on all clusters."""

SWEPT = ("ddp", "layerwise", "hipress", "fusion", "bytecomp", "joint", "bound")
"""The default methods of a sweep. Cupcake's own search is left out, since a clock ends it; fusion solves the problem exactly."""


class SweepRow(NamedTuple):
    """One method on one cluster."""

    nodes: int
    ranks: int
    inter_gbps: float
    method: str
    step_us: float
    scaling: float
    """Scaling factor of all ranks, 0 to 1."""


Seen = Callable[[int], None]
"""Callback after every planned step, with the number of steps so far."""


def clusters(cluster: Cluster, inter: Sequence[float] | None, nodes: Sequence[int] | None) -> list[Cluster]:
    """The cluster at each rate between nodes with each number of nodes; None: the cluster's own.

    The rates of uplinks, of slow nodes and of the measured all-reduce scale with the rate between nodes. The rate of all-reduce
    is left out if it was measured on the other kind of link. With fewer nodes the first slow nodes stay.
    """
    rates, counts = inter or (cluster.inter.gbps,), nodes or (cluster.nodes,)
    return [_at(cluster, gbps, count) for gbps, count in product(rates, counts)]


def _at(cluster: Cluster, gbps: float, nodes: int) -> Cluster:
    allreduce = cluster.allreduce
    if allreduce is not None and (nodes == 1) != (cluster.nodes == 1):
        allreduce = None
    elif allreduce is not None and nodes > 1:
        allreduce = allreduce.scaled(gbps, cluster.inter.gbps)
    inter = msgspec.structs.replace(cluster.inter.scaled(gbps, cluster.inter.gbps), gbps=gbps)
    slow = tuple(link.scaled(gbps, cluster.inter.gbps) for link in cluster.slow_nodes[:nodes])
    return msgspec.structs.replace(cluster, nodes=nodes, inter=inter, allreduce=allreduce, slow_nodes=slow)


def alone_us(profile: Profile) -> float:
    """Forward, backward and optimizer, as far as the profile has them: the step of one rank alone."""
    return sum((each.forward_us or 0.0) + each.backward_us for each in profile.tensors) + (profile.optimizer_us or 0.0)


def check_some_may(profile: Profile, specs: Sequence[Spec], limits: Limits) -> None:
    """Raise PlanError if there are specs, but no tensor that they may compress."""
    if specs and limits.exempt_vectors and all(len(tensor.shape) < 2 for tensor in profile.tensors):
        raise PlanError(
            f"none of the {len(profile.tensors)} tensors may be compressed: all have one dimension, as in imported profiles, and "
            "the planner takes such tensors for biases and norms. Give --all-tensors, or Limits(exempt_vectors=False)."
        )


def sweep_methods(
    profile: Profile,
    points: Sequence[Cluster],
    costs: Costs,
    specs: Sequence[Spec] = (),
    limits: Limits | None = None,
    rules: Rules | None = None,
    methods: Sequence[str] = SWEPT,
    seen: Seen = lambda count: None,
) -> list[SweepRow]:
    """The step of each method's plan on each cluster. Raises PlanError for an unknown method, and as planning does."""
    for method in methods:
        word("method", method, (*METHODS, "bound"), error=PlanError)
    _check_compute(profile)
    check_some_may(profile, specs, limits or Limits())
    rows = []
    for point in points:
        for method in methods:
            if point.world_size == 1:
                step_us = alone_us(profile)
            else:
                job = PlanningJob(profile, point, costs, specs, limits, rules)
                prediction = None if method == "bound" else make_plan(job, method).plan.prediction
                step_us = job.lower_bound_us() if prediction is None else prediction.step_us
            rows.append(_row(profile, point, method, step_us))
            seen(len(rows))
    return rows


def sweep_plan(
    plan: Plan,
    profile: Profile,
    points: Sequence[Cluster],
    costs: Costs,
    rules: Rules | None = None,
    seen: Seen = lambda count: None,
) -> list[SweepRow]:
    """The steps of one unchanged plan and of plain DDP on each cluster. Raises PlanError if the plan cannot be simulated."""
    _check_compute(profile)
    rows = []
    for point in points:
        plan_us = ddp_us = alone_us(profile)
        if point.world_size > 1:
            job = PlanningJob(profile, point, Costs(codecs=()), rules=rules)
            found = job.step(ddp_draft(job))
            assert found is not None
            plan_us, ddp_us = simulate(plan, profile, point, costs, rules).step_us, found / FS_PER_US
        rows += [_row(profile, point, "ddp", ddp_us), _row(profile, point, "plan", plan_us)]
        seen(len(rows))
    return rows


def _check_compute(profile: Profile) -> None:
    if not any(tensor.forward_us or tensor.backward_us for tensor in profile.tensors):
        raise PlanError(
            f"the profile of {show(profile.model)} has no times. With 0 us of computation there is no scaling factor. Profile "
            "the model, or write backward_us and forward_us into the profile."
        )


def _row(profile: Profile, point: Cluster, method: str, step_us: float) -> SweepRow:
    return SweepRow(point.nodes, point.world_size, point.inter.gbps, method, step_us, alone_us(profile) / step_us)


def sweep_table(rows: Sequence[SweepRow], profile: Profile) -> str:
    """One line for each cluster, one column for each method, and a legend."""
    methods = list(dict.fromkeys(row.method for row in rows))
    points = list(dict.fromkeys((row.inter_gbps, row.nodes, row.ranks) for row in rows))
    cells = {(row.inter_gbps, row.nodes, row.method): f"{row.scaling:.3f}" for row in rows}
    lines = [f"{'inter Gb/s':>10} {'nodes':>6} {'ranks':>6}" + "".join(f" {method:>9}" for method in methods)]
    for gbps, nodes, ranks in points:
        values = "".join(f" {cells[gbps, nodes, method]:>9}" for method in methods)
        lines.append(f"{gbps:>10g} {nodes:>6} {ranks:>6}{values}")
    lines.append("")
    lines.append(
        f"Scaling factors: the step of one rank alone, {alone_us(profile) / 1e3:.3f} ms, divided by the predicted step."
    )
    lines.append(", ".join(f"{method}: {LABELS[method]}" for method in methods) + ".")
    if all(tensor.forward_us is None for tensor in profile.tensors):
        lines.append("The profile has no forward times; with forward times all factors would be higher.")
    return "\n".join(lines) + "\n"


def sweep_json(rows: Sequence[SweepRow], profile: Profile) -> str:
    """JSON of all numbers on one line; equal inputs give equal bytes."""
    content = {"model": profile.model, "alone_us": alone_us(profile), "rows": [row._asdict() for row in rows]}
    return json.dumps(content) + "\n"
