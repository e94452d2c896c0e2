"""Step times on several clusters, by several methods, as scaling factors. Pure: no torch.

The **scaling factor** of n ranks is T_n / (n * T_1), where T is samples a second. A rank does the same work alone and among
others, so the factor is the step of one rank alone divided by the step of n ranks. 1 is perfect.
"""

import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from gradwire.core import ENCODED_DTYPES, MOST_RANKS, Cluster, Costs, Plan, Profile, Spec, show, word
from gradwire.errors import FormatError, PlanError
from gradwire.planner.drafts import Limits, PlanningJob, exempt_of
from gradwire.planner.methods import METHODS, make_plan
from gradwire.planner.starts import ddp_draft
from gradwire.sim import FS_PER_US, Rules, as_ddp, device_of, rules_of, simulate

RulesOn = Callable[[Cluster], Rules]
"""The rules of the simulated engine on a cluster: a far one has other lanes than a near one."""
MOST_VALUES = 64
"""Most values of one list. More values make no better picture, and each takes planning time."""


def read_rates(text: str) -> tuple[float, ...]:
    """Gb/s between nodes, from a list such as 1,10,25 or 1,2,...,64. Raises FormatError that names the mistake.

    >>> read_rates("1,10,25")
    (1.0, 10.0, 25.0)
    """
    return _read("--inter", text, "a rate in Gb/s", float, math.inf)


def read_nodes(text: str) -> tuple[int, ...]:
    """Numbers of nodes, from a list such as 1,2,4 or 1,2,4,...,512. Raises FormatError that names the mistake.

    >>> read_nodes("1,2,4,...,64")
    (1, 2, 4, 8, 16, 32, 64)
    """
    values = tuple(int(value) for value in _read("--nodes", text, "a whole number of nodes", int, 2**31))
    if values[-1] > MOST_RANKS:
        raise FormatError(
            f"--nodes has {values[-1]}: memory and time of a prediction grow with the ranks, so there are at most {MOST_RANKS:,}."
            " Write fewer nodes, such as 1,2,4,...,64."
        )
    return values


def read_slower(text: str) -> tuple[float, ...]:
    """Factors by which a node's link is slower, from a list such as 1,2,5. Raises FormatError that names the mistake.

    >>> read_slower("1,2,...,8")
    (1.0, 2.0, 4.0, 8.0)
    """
    values = _read("--slow-node", text, "how many times slower a link is", float, math.inf)
    if values[0] < 1:
        raise FormatError(
            f"--slow-node has {values[0]:g}: a link less than 1 time slower is faster, and no step waits for a faster one. Write "
            "factors from 1 on, such as 1,2,5; 1 is the link as it is."
        )
    return values


def _read(option: str, text: str, what: str, convert: Callable[[str], float], limit: float) -> tuple[float, ...]:
    words = [each.strip() for each in text.split(",")]
    cure = f"Write {option} as a rising list, such as 1,2,8, or with a doubling to fill in, such as 1,2,4,...,64."
    values: list[float] = []
    for place, written in enumerate(words):
        if written == "...":
            if not values or place != len(words) - 2:
                raise FormatError(f"{option} is {show(text)}: '...' stands between what it continues and the last value. {cure}")
            continue
        try:
            value = convert(written)
        except ValueError:
            value = math.nan
        if not 0 < value < limit:
            raise FormatError(f"{option} has {show(written)}, which is not {what} above 0. {cure}")
        if words[place - 1] == "..." and place:
            values += _doubled(option, values, value, cure)
        if values and value <= values[-1]:
            raise FormatError(
                f"{option} has {show(written)} after {values[-1]:g}: values must rise, or the picture's lines run back. {cure}"
            )
        values.append(value)
    if len(values) > MOST_VALUES:
        raise FormatError(f"{option} has {len(values)} values, and a sweep takes at most {MOST_VALUES}: each is planned. {cure}")
    return tuple(values)


def _doubled(option: str, before: Sequence[float], last: float, cure: str) -> list[float]:
    """The values that '...' stands for: those between the value before it and the value after it."""
    if len(before) > 1 and before[-1] != 2 * before[-2]:
        raise FormatError(f"{option} has {before[-2]:g},{before[-1]:g},...: '...' continues a doubling, and this is none. {cure}")
    found = [before[-1]]
    while found[-1] < last:
        found.append(2 * found[-1])
    if found[-1] != last:
        raise FormatError(
            f"{option} ends with {last:g}, which doubling {before[-1]:g} never reaches; next to it is {found[-1]:g}. {cure}"
        )
    return found[1:-1]


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

    The rates of uplinks, of slow nodes and of measured all-reduces scale with the rate between nodes. The rate of an all-reduce
    is left out if it was measured on the other kind of link. With fewer nodes the first slow nodes stay.
    """
    rates, counts = inter or (cluster.inter.gbps,), nodes or (cluster.nodes,)
    return [_at(cluster, gbps, count) for gbps, count in product(rates, counts)]


def _at(cluster: Cluster, gbps: float, nodes: int) -> Cluster:
    sums = {"allreduce": cluster.allreduce, "ddp": cluster.ddp}
    for name, link in sums.items():
        if link is not None and (nodes == 1) != (cluster.nodes == 1):
            sums[name] = None
        elif link is not None and nodes > 1:
            sums[name] = link.scaled(gbps, cluster.inter.gbps)
    inter = msgspec.structs.replace(cluster.inter.scaled(gbps, cluster.inter.gbps), gbps=gbps)
    slow = tuple(link.scaled(gbps, cluster.inter.gbps) for link in cluster.slow_nodes[:nodes])
    return msgspec.structs.replace(cluster, nodes=nodes, inter=inter, slow_nodes=slow, slow_at=(), **sums)


def check_some_may(profile: Profile, specs: Sequence[Spec], limits: Limits) -> None:
    """Raise PlanError if there are specs, but no tensor that they may compress."""
    tensors = profile.tensors
    if not specs or len(exempt_of(profile, limits)) < len(tensors):
        return
    others = sorted({tensor.dtype for tensor in tensors} - {*ENCODED_DTYPES})
    none = f"none of the {len(tensors)} tensors may be compressed"
    if all(tensor.dtype in others for tensor in tensors):
        raise PlanError(
            f"{none}: their gradients are {' and '.join(others)}, and compressors take {', '.join(ENCODED_DTYPES)}. Leave out "
            "the specs, or profile the model in one of these dtypes."
        )
    but = f" but those of {' and '.join(others)}" if others else ""
    raise PlanError(
        f"{none}: all{but} have one dimension, as in imported profiles, and the planner takes such tensors for biases and norms. "
        "Give --all-tensors, or Limits(exempt_vectors=False)."
    )


def sweep_methods(
    profile: Profile,
    points: Sequence[Cluster],
    costs: Costs,
    specs: Sequence[Spec] = (),
    limits: Limits | None = None,
    rules_on: RulesOn | None = None,
    methods: Sequence[str] = SWEPT,
    seen: Seen = lambda count: None,
) -> list[SweepRow]:
    """The step of each method's plan on each cluster. rules_on: the rules of a cluster; None: the engine's. Raises PlanError for
    an unknown method, and as planning does."""
    for method in methods:
        word("method", method, (*METHODS, "bound"), error=PlanError)
    _check_compute(profile)
    check_some_may(profile, specs, limits or Limits())
    rows = []
    for point in points:
        for method in methods:
            if point.world_size == 1:
                step_us = profile.compute_us
            else:
                allowed = limits or Limits()
                allowed = allowed.in_backward() if method == "ddp" else allowed
                job = PlanningJob(profile, point, costs, specs, allowed, None if rules_on is None else rules_on(point))
                prediction = None if method == "bound" else make_plan(job, method).plan.prediction
                if prediction is None:
                    step_us = job.lower_bound_us()
                else:
                    step_us = prediction.baseline_step_us if method == "ddp" else prediction.step_us
            rows.append(_row(profile, point, method, step_us))
            seen(len(rows))
    return rows


def sweep_plan(
    plan: Plan,
    profile: Profile,
    points: Sequence[Cluster],
    costs: Costs,
    rules_on: RulesOn | None = None,
    seen: Seen = lambda count: None,
) -> list[SweepRow]:
    """The steps of one unchanged plan and of plain DDP on each cluster. rules_on: as for `sweep_methods`. Raises PlanError if the
    plan cannot be simulated."""
    _check_compute(profile)
    rows = []
    for point in points:
        there = rules_of(device_of(profile), point) if rules_on is None else rules_on(point)
        plan_us, ddp_us = simulate(plan, profile, point, costs, there).step_us, profile.compute_us
        if point.world_size > 1:
            of_ddp, ddp_rules = as_ddp(point, there)
            job = PlanningJob(profile, of_ddp, Costs(codecs=()), rules=ddp_rules)
            found = job.step(ddp_draft(job))
            assert found is not None
            ddp_us = found / FS_PER_US
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
    return SweepRow(point.nodes, point.world_size, point.inter.gbps, method, step_us, profile.compute_us / step_us)


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
        f"Scaling factors: the step of one rank alone, {profile.compute_us / 1e3:.3f} ms, divided by the predicted step."
    )
    lines.append(", ".join(f"{method}: {LABELS[method]}" for method in methods) + ".")
    if all(tensor.forward_us is None for tensor in profile.tensors):
        lines.append("The profile has no forward times; with forward times all factors would be higher.")
    return "\n".join(lines) + "\n"


def sweep_json(rows: Sequence[SweepRow], profile: Profile) -> str:
    """JSON of all numbers on one line; equal inputs give equal bytes."""
    content = {"model": profile.model, "alone_us": profile.compute_us, "rows": [row._asdict() for row in rows]}
    return json.dumps(content) + "\n"
