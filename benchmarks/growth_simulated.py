"""The simulated part of `python -m benchmarks growth`: a step of BERT-large's shapes on 2 to 1,024 ranks."""

import time
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from msgspec.structs import replace

from benchmarks.markdown import table
from gradwire.core import COLLECTIVES, QSGD, Cluster, CodecCosts, Costs, Link, Plan, Profile, TensorProfile, peers_of, rows_of
from gradwire.plan import Policy
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.starts import ddp_draft

__all__ = ["COLUMNS", "OTHERS", "RANKS", "bert_large", "point", "section"]

RANKS = tuple(2**power for power in range(1, 11))
OTHERS = ((64, 8), (256, 8), (1024, 8), (127, 1), (1021, 1))
"""Ranks, and ranks of a node: nodes of eight, and prime numbers."""
SPEC = QSGD(bits=4)
WIDTH = 1024
LAYER = [*((WIDTH, WIDTH),) * 4, (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), *((WIDTH,),) * 9, (4 * WIDTH,)]
COLUMNS = {
    "ddp_ms": "DDP, ms",
    "fixed_ms": "4 bits, ms",
    "quick_ms": "4 bits, 8 us a message, ms",
    "joint_ms": "joint, ms",
    "messages": "messages",
    "peers": "peers",
    "sent_mb": "a rank sends, MB",
    "policy_ms": "the policy's plan, CPU ms",
    "planning_ms": "the joint plan, CPU ms",
}
INTER, QUICK, INTRA = Link(30.0, 25.0), Link(30.0, 25.0, message_us=8.0), Link(5.0, 400.0)
_TIMES = [(1024, 15.0), (2**26, 15.0 + 1e-5 * 2**26)]

TEXT = """
## Simulated, to {most:,} ranks

A step of BERT-large's shapes, {tensors} tensors and {millions:.0f} million elements, in the simulator: one rank on a node,
{gbps:g} Gb/s and {alpha:g} us between nodes, codecs and prices of GPUs. Forward and backward take 300 ms. Messages, peers and
bytes are those that a rank sends in a step with the fixed plan of 4 bits. Each message takes the {alpha:g} us, except in one
column: there messages that do not wait for others take {quick:g} us each, as on links that were measured.

"""
TEXT_OF_OTHERS = """
With eight ranks on a node each exchanges with all other nodes: peers and messages grow with the nodes. A prime number of up
to 128 ranks exchanges directly, and a larger one has a grid with a shorter last row.

"""


def bert_large() -> Profile:
    """Shapes of BERT-large, with a forward of 100 ms and a backward of 200 ms."""
    shapes = [(30522, WIDTH), (512, WIDTH), (2, WIDTH), (WIDTH,), (WIDTH,), *(LAYER * 24)][::-1]
    total = sum(map(prod, shapes))
    tensors = [
        TensorProfile(
            name=str(place),
            shape=shape,
            dtype="float32",
            backward_us=200e3 * prod(shape) / total,
            forward_us=100e3 * prod(shape) / total,
        )
        for place, shape in enumerate(shapes)
    ]
    return Profile(model="BERT-large", batch=8, device="gpu", tensors=tensors)


def point(profile: Profile, ranks: int, ranks_per_node: int = 1) -> dict[str, Any]:
    """One row: simulated steps, what a rank sends, and the CPU time of planning."""
    cluster = Cluster(nodes=ranks // ranks_per_node, ranks_per_node=ranks_per_node, intra=INTRA, inter=INTER)
    costs = Costs(codecs=[CodecCosts(spec=SPEC, device="gpu", encode=_TIMES, decode=_TIMES)])
    began = time.process_time()
    job = PlanningJob(profile, cluster, costs, [SPEC])
    draft = joint(job)
    planned = time.process_time()
    fixed = Policy(default=SPEC).plan(profile.tensor_infos("gpu"), ranks, ranks_per_node)
    made = time.process_time()
    quick = PlanningJob(profile, replace(cluster, inter=QUICK), costs, [SPEC]).simulator
    return {
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "ddp_ms": job.simulator.step_us(job.light(ddp_draft(job))) / 1e3,
        "fixed_ms": job.simulator.step_us(fixed) / 1e3,
        "quick_ms": quick.step_us(fixed) / 1e3,
        "joint_ms": job.simulator.step_us(job.light(draft)) / 1e3,
        "policy_ms": 1e3 * (made - planned),
        "planning_ms": 1e3 * (planned - began),
        **_sent(job, fixed),
    }


def _sent(job: PlanningJob, plan: Plan) -> dict[str, float]:
    """Messages and megabytes that a rank sends in a step, and the number of ranks to which it sends."""
    prices, messages, sent = job.simulator.prices, 0.0, 0.0
    ranks, grid, peers = job.cluster.world_size, COLLECTIVES["grid"].on("gpu"), 0
    nested = job.cluster.nodes - 1 + job.cluster.ranks_per_node - 1
    for bucket in plan.buckets:
        priced = prices.of(bucket)
        steps = [step for step in prices.steps(bucket.option, bucket.main_spec.rounds) if step.traffic is not None]
        loads = [load for step in steps if step.traffic is not None for load in (step.traffic.intra, step.traffic.inter)]
        messages += priced.pieces * sum(load.messages for load in loads)
        sent += priced.pieces * sum(price.sent_bytes for price in priced.tasks)
        flat = peers_of(rows_of(ranks)) if bucket.option == grid else ranks - 1
        peers = max(peers, nested if any(task.endswith(":intra") for task in bucket.option) else flat)
    return {"messages": round(messages), "peers": peers, "sent_mb": sent / 1e6}


def section(
    points: Sequence[Mapping[str, Any]],
    slopes: Mapping[str, float | None],
    tensors: int,
    elements: int,
    others: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The section of docs/growth.md. `others`: rows of `OTHERS`."""
    sizes = {"most": points[-1]["ranks"], "tensors": tensors, "millions": elements / 1e6}
    text = TEXT.format(**sizes, gbps=INTER.gbps, alpha=INTER.alpha_us, quick=QUICK.message_us)
    rows = [[f"{row['ranks']:,}", *(_number(row[name]) for name in COLUMNS)] for row in points]
    rows.append(["slope", *("-" if (power := slopes[name]) is None else f"{power:.2f}" for name in COLUMNS)])
    text += "\n".join(table(["ranks", *COLUMNS.values()], rows, left=0)) + "\n"
    if others:
        rows = [[f"{row['ranks']:,}", str(row["ranks_per_node"]), *(_number(row[name]) for name in COLUMNS)] for row in others]
        text += TEXT_OF_OTHERS + "\n".join(table(["ranks", "on a node", *COLUMNS.values()], rows, left=0)) + "\n"
    return text


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.1f}"
