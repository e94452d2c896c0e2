"""Random planning jobs, and what must hold of all: sizes, costs, lanes, launches, links, slow nodes, classes of tensors,
specs."""

import random
from contextlib import suppress
from typing import Any

import msgspec

from gradwire.core import QSGD, Cast, Cluster, CodecCosts, Costs, Link, Profile, TensorProfile, TopK
from gradwire.costs import DECODE_CALLS
from gradwire.errors import PlanError
from gradwire.plan.schemes import RESTRICTED
from gradwire.planner.bytecomp import Moved
from gradwire.planner.drafts import BYTECOMP_ONLY, Limits, PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.methods import METHODS
from gradwire.sim.rules import Rules
from gradwire.sim.simulator import FS_PER_US

_MOVES = 30
"""Few, since what is promised of the joint planner does not depend on its moves."""
SPECS = (QSGD(), TopK(0.01), Cast(), QSGD(bits=2, block=64))


def random_job(seed: int) -> PlanningJob:
    """The job of a seed."""
    rng = random.Random(seed)
    tensors = _tensors(rng)
    cluster = _overlapping(random.Random(f"messages {seed}"), _uneven(random.Random(f"uneven {seed}"), _cluster(rng)))
    device = rng.choice(["gpu", "gpu", "cpu"])
    specs = rng.sample(SPECS, rng.choice([0, 1, 1, 1, 1, 2, 3]))
    measured = [device] if device == "cpu" or rng.random() < 0.4 else ["gpu", "cpu"]
    costs = Costs(codecs=[_codec(rng, spec, where) for spec in specs for where in measured])
    limits = Limits(
        exempt_vectors=rng.random() < 0.5,
        max_encodes=rng.choice([None, None, None, 1, 2]) if specs and cluster.nodes > 1 else None,
    )
    profile = Profile(model="random", batch=1, device=device, tensors=tensors)
    return PlanningJob(profile, cluster, costs, specs, limits, _rules(rng, device))


def _tensors(rng: random.Random) -> list[TensorProfile]:
    typical, count = 10 ** rng.uniform(2, 7), rng.choice([1, 2, 3, 4, 5, 6, 8, rng.randint(9, 30)])
    mean_us, halves = 10 ** rng.uniform(0, 4), rng.random() < 0.2
    rows = []
    for place in range(count):
        numel = max(1, int(typical * 10 ** rng.uniform(-1.5, 1)))
        shape = (numel,) if rng.random() < 0.3 else (max(1, numel // 64), 64)
        dtype = rng.choice(["float32", "bfloat16"]) if halves else "float32"
        times = {"backward_us": rng.choice([0.0, mean_us * rng.random(), mean_us]), "forward_us": mean_us * rng.random()}
        rows.append(TensorProfile(name=f"t{place}", shape=shape, dtype=dtype, **times))
    return rows


def _cluster(rng: random.Random) -> Cluster:
    shapes = [(2, 1), (3, 1), (4, 1), (8, 1), (16, 1), (1, 2), (1, 4), (1, 8), (2, 2), (4, 2), (8, 8)]
    nodes, local = rng.choice(shapes)
    links = {name: Link(10 ** rng.uniform(-1, 3), 10 ** rng.uniform(-1, 2.5)) for name in ("intra", "inter")}
    allreduce = None
    if rng.random() < 0.3:
        rate = 10 ** rng.uniform(-1, 2.5)
        allreduce = Link(10 ** rng.uniform(-1, 3), rate, rng.choice([0.0, 300.0]), rng.choice([0.0, 0.001]))
    launch_us = rng.choice([None, 0.0, 10 ** rng.uniform(0, 4)])
    links["intra"] = msgspec.structs.replace(links["intra"], shared=rng.random() < 0.3)
    return Cluster(nodes=nodes, ranks_per_node=local, **links, allreduce=allreduce, launch_us=launch_us)


def _uneven(rng: random.Random, cluster: Cluster) -> Cluster:
    """Directions, limits of flows, and slow nodes, of some clusters of several nodes."""
    if cluster.nodes == 1:
        return cluster

    def changed(link: Link) -> Link:
        rates = {name: link.gbps * 10 ** rng.uniform(-1.5, 0.5) for name in ("up_gbps", "flow_gbps") if rng.random() < 0.3}
        return msgspec.structs.replace(link, **rates)

    slow = [
        changed(Link(10 ** rng.uniform(-1, 3), cluster.inter.gbps * 10 ** rng.uniform(-1.5, 0.3)))
        for _ in range(min(cluster.nodes, rng.choice([0, 0, 0, 1, 1, 2])))
    ]
    allreduce = cluster.allreduce and changed(cluster.allreduce)
    return msgspec.structs.replace(cluster, inter=changed(cluster.inter), allreduce=allreduce, slow_nodes=slow)


def _overlapping(rng: random.Random, cluster: Cluster) -> Cluster:
    """Times of further messages, processor times of exchanges, and shared processors, of half of the clusters."""
    if rng.random() < 0.5:
        return cluster

    def changed(link: Link) -> Link:
        message_us = rng.choice([None, 0.0, link.alpha_us * rng.random(), link.alpha_us])
        cpu = {
            "cpu_us": rng.choice([0.0, 10 ** rng.uniform(-1, 2)]),
            "cpu_us_per_byte": rng.choice([0.0, 10 ** rng.uniform(-5, -2)]),
        }
        return msgspec.structs.replace(link, message_us=message_us, **cpu)

    links = {
        "intra": changed(cluster.intra),
        "inter": changed(cluster.inter),
        "slow_nodes": tuple(map(changed, cluster.slow_nodes)),
    }
    allreduce = cluster.allreduce and changed(cluster.allreduce)
    processors = rng.choice([None, 0.5, 2.0, 3.0 * cluster.ranks_per_node])
    return msgspec.structs.replace(cluster, **links, allreduce=allreduce, processors=processors)


def _codec(rng: random.Random, spec: QSGD | TopK | Cast, device: str) -> CodecCosts:
    return CodecCosts(spec=spec, device=device, encode=_curve(rng), decode=_curve(rng))


def _curve(rng: random.Random) -> list[tuple[int, float]]:
    """Flat, then rising; or any times at all."""
    start, rate = 10 ** rng.uniform(0, 3), 10 ** rng.uniform(-5, -2)
    sizes = sorted(rng.sample([0, 2**10, 2**14, 2**17, 2**20, 2**23, 2**26], rng.randint(1, 4)))
    if rng.random() < 0.3:
        return [(size, start * 10 ** rng.uniform(-1, 1)) for size in sizes]
    return [(size, max(start, rate * size)) for size in sizes]


def _rules(rng: random.Random, device: str) -> Rules:
    lanes = rng.choice([0, 1, 2, 2, 3]) if device == "cpu" or rng.random() < 0.1 else 0
    decodes = ["at once", "at once", "with encode", "none", *([] if lanes else ["after backward"])]
    return Rules(
        device=device,
        lanes=lanes,
        codec_on=rng.choice(["compute", "compute", "own thread"]),
        decode=rng.choice(decodes),
        cpu_workers=rng.choice([1, 1, 2]),
        decode_calls=rng.choice(DECODE_CALLS),
        routing=rng.choice(["direct", "direct", "ring"]),
        offload_lanes=rng.choice([0, 1, 2]) if lanes and device == "gpu" else 0,
    )


def counterexamples(job: PlanningJob) -> list[str]:
    """Return the promises that the planner breaks here, in words. Steps are compared in whole femtoseconds, as in the
    planner."""
    steps = {method: _step_us(job, method) for method in METHODS if method != "joint"}
    steps["joint"] = job.simulator.step_us(job.light(joint(job, moves=_MOVES)))
    joint_us, whole_us, bound_us = steps["joint"], steps["bytecomp"], job.lower_bound_us()
    said = [f"joint {joint_us} is above {name} {us}" for name, us in steps.items() if _above(joint_us, us)]
    for restrict in dict.fromkeys((*RESTRICTED, *BYTECOMP_ONLY)) if job.specs else ():
        with suppress(PlanError):  # no such option here, or tensors that must not be compressed
            part_us = _step_us(job.restricted(restrict), "bytecomp")
            if _above(whole_us, part_us):
                said.append(f"bytecomp {whole_us} is above its restriction {restrict} {part_us}")
    return said + [f"the bound {bound_us} is above {name} {us}" for name, us in steps.items() if _above(bound_us, us)]


def _above(one_us: float, other_us: float) -> bool:
    return round(one_us * FS_PER_US) > round(other_us * FS_PER_US)


def _step_us(job: PlanningJob, method: str) -> float:
    found = METHODS[method](job)
    return job.simulator.step_us(job.light(found.draft if isinstance(found, Moved) else found))


def check_many(first: int, count: int) -> dict[str, Any]:
    """Counterexamples of so many seeds from `first` on; those that have no plan at all are counted."""
    found, none = {}, 0
    for seed in range(first, first + count):
        try:
            job = random_job(seed)
        except PlanError:
            none += 1
            continue
        if said := counterexamples(job):
            found[seed] = said
    return {"first": first, "jobs": count, "without_plan": none, "counterexamples": found}
