"""Further parts of `python -m benchmarks planner`: how planning grows, published profiles, and how near plans come to
the best ones."""

import random
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.papers.oracle import best_step_us, partitions
from benchmarks.testbeds import Bed, Papers
from gradwire.core import QSGD, Cluster, CodecCosts, Costs, Link, Profile, TensorProfile
from gradwire.costs.imported import import_file
from gradwire.planner.bytecomp import published
from gradwire.planner.drafts import Choice, Draft, Limits, Part, PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.methods import make_plan
from gradwire.sim.rules import Rules, changed_rules
from gradwire.sim.simulator import FS_PER_US

CODECS = Costs(codecs=[CodecCosts(spec=QSGD(), device="gpu", encode=[(2**22, 100.0), (2**25, 400.0)], decode=[(2**22, 60.0)])])
PROFILES = ("vgg16", "resnet50", "bert", "lstm")
OVERHEADS = "v100-compressor-overheads.json"


def scaling() -> list[dict[str, Any]]:
    """CPU milliseconds of the joint planner by tensors on 64 ranks, and by ranks with 314 tensors; the best of three."""
    sizes = [(tensors, 8) for tensors in (100, 314, 1000, 3000, 10_000)]
    sizes += [(314, nodes) for nodes in (1, 2, 64, 512)]
    return [
        {"tensors": tensors, "ranks": 8 * nodes, "planning_cpu_ms": min(_planned(tensors, nodes) for _ in range(3))}
        for tensors, nodes in sizes
    ]


def _planned(tensors: int, nodes: int) -> float:
    rng = random.Random(tensors)
    rows = [
        TensorProfile(
            name=f"t{i}",
            shape=(int(rng.lognormvariate(6, 1.5)) + 1, 64) if i % 3 == 0 else (256,),
            dtype="float32",
            backward_us=60_000 / tensors,
        )
        for i in range(tensors)
    ]
    profile = Profile(model="made up", batch=32, device="V100", tensors=rows)
    cluster = Cluster(nodes=nodes, ranks_per_node=8, intra=Link(5.0, 400.0), inter=Link(30.0, 25.0))
    began = time.process_time()
    make_plan(PlanningJob(profile, cluster, CODECS, [QSGD()]))
    return (time.process_time() - began) * 1e3


def cases(data: Path) -> Iterator[dict[str, Any]]:
    """The joint plan over its lower bound for published profiles on 8 nodes of 8 ranks, with all codecs that were published with
    them, every tensor allowed, by both readings of their decode times (`--decode-calls`)."""
    costs = import_file(data / OVERHEADS)
    assert isinstance(costs, Costs)
    for calls, (intra, inter), model in product(("each", "one"), ((400.0, 100.0), (100.0, 25.0)), PROFILES):
        profile = import_file(data / "profiles" / f"{model}.json", 32, "V100")
        assert isinstance(profile, Profile)
        cluster = Cluster(nodes=8, ranks_per_node=8, intra=Link(5.0, intra), inter=Link(30.0, inter))
        began = time.process_time()
        specs = [codec.spec for codec in costs.codecs]
        rules = changed_rules(profile, cluster, decode_calls=calls)
        made = make_plan(PlanningJob(profile, cluster, costs, specs, Limits(exempt_vectors=False), rules))
        cpu_ms = (time.process_time() - began) * 1e3
        prediction = made.plan.prediction
        assert prediction is not None
        yield {
            "model": model,
            "intra_gbps": intra,
            "inter_gbps": inter,
            "decode_calls": calls,
            "buckets": len(made.plan.buckets),
            "planning_cpu_ms": cpu_ms,
            "step_ms": prediction.step_us / 1e3,
            "ddp_ms": prediction.baseline_step_us / 1e3,
            "bound_ms": prediction.lower_bound_us / 1e3,
            "over_bound": prediction.step_us / prediction.lower_bound_us,
        }


def selections(data: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """CPU milliseconds of ByteComp's selection for BERT-base on 8 nodes of 8 ranks, 25 Gb/s between nodes; medians. The tables of
    tasks are made before."""
    papers = Papers(data)
    profile = papers.profile("bert")
    for intra_gbps, algorithm in product((1200.0, 100.0), ("Rand-k", "DGC", "EF-SignSGD")):
        job = papers.job(profile, Bed(8, intra_gbps, 25.0), algorithm)
        draft = published(job, looks=1).draft
        taken_ms = []
        for _ in range(repeats):
            began = time.process_time()
            draft = published(job).draft
            taken_ms.append((time.process_time() - began) * 1e3)
        yield {
            "algorithm": algorithm,
            "intra_gbps": intra_gbps,
            "options": len(job.options),
            "tensors": len(draft.parts),
            "compressed": sum(part.choice.encodes for part in draft.parts),
            "cpu_ms": statistics.median(taken_ms),
        }


def gaps(count: int = 12) -> list[dict[str, Any]]:
    """Small made-up cases: the joint plan over the best of all plans that the planner could write, and over the best with any
    launch order. Written are orders in which step p of bucket i goes behind step 0 of bucket i + skew * p, for skews 0 to 3."""
    rows = []
    for seed in range(count):
        job = _small(seed)
        choices = job.choices()
        found_us = (job.step(joint(job)) or 0) / FS_PER_US
        rows.append(
            {
                "case": seed,
                "tensors": len(job.profile.tensors),
                "ranks": job.cluster.world_size,
                "over_best": found_us / _best_written_us(job, choices),
                "over_any_order": found_us / best_step_us(job, choices),
                "over_bound": found_us / job.lower_bound_us(),
            }
        )
    return rows


def _small(seed: int) -> PlanningJob:
    """3 tensors on one link, or 2 on two, with one uncompressed and two compressed choices."""
    rng = random.Random(seed)
    tensors, local = ((3, 1), (2, 4))[seed % 2]
    rows = [
        TensorProfile(
            name=f"t{i}",
            shape=(rng.choice([10, 400, 4000]), 256),
            dtype="float32",
            backward_us=rng.choice([10.0, 1000.0]) * rng.random(),
        )
        for i in range(tensors)
    ]
    profile = Profile(model="made up", batch=1, device="V100", tensors=rows)
    inter = Link(10.0, rng.choice([1.0, 10.0, 100.0]))
    cluster = Cluster(nodes=4, ranks_per_node=local, intra=Link(2.0, 100.0), inter=inter)
    whole = PlanningJob(profile, cluster, CODECS, [QSGD()], rules=Rules(decode_calls="one"))
    choices = whole.choices()
    kept = {choice.option for choice in choices[:1] + [choice for choice in choices if choice.encodes][:2]}
    options = [option for option in whole.options if option.tasks in kept]
    return PlanningJob(profile, cluster, CODECS, [QSGD()], rules=Rules(decode_calls="one"), options=options)


def _best_written_us(job: PlanningJob, choices: list[Choice]) -> float:
    steps = []
    for buckets in partitions(range(len(job.profile.tensors))):
        allowed = [[choice for choice in choices if job.may(bucket, choice)] for bucket in buckets]
        for chosen in product(*allowed):
            parts = tuple(sorted(map(Part, buckets, chosen), key=lambda part: part.tensors[-1]))
            steps += [job.step(Draft(parts, skew)) for skew in range(4)]
    return min(step for step in steps if step is not None) / FS_PER_US
