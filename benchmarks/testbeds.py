"""Inputs of the papers' figures: published profiles as jobs on the papers' clusters, and their systems as plans."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.papers.methods import FUSIONS
from gradwire.core import Cluster, Costs, Link, Profile
from gradwire.core.specs import DGC, EFSignSGD, OneBit, RandomK, Spec
from gradwire.costs.imported import import_file
from gradwire.plan.options import Option, select
from gradwire.plan.schemes import RESTRICTED, SYSTEMS
from gradwire.planner.bytecomp import published
from gradwire.planner.drafts import Choice, Draft, Limits, Part, PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.starts import best_of, by_own_tasks, close_before, fused
from gradwire.sim.rules import Rules
from gradwire.sim.simulator import FS_PER_US

ALGORITHMS: dict[str, Spec] = {
    "Rand-k": RandomK(ratio=0.01),
    "DGC": DGC(ratio=0.01),
    "EF-SignSGD": EFSignSGD(),
    "OneBit": OneBit(),
}
LATENCIES_US = (10.0, 30.0)
"""Inside a node and between nodes: assumed, since the papers give none."""
FORWARD = 0.5
"""Forward as a share of backward: DeAR's assumption (equation 9), because the published profiles have no forward times."""
GRACE, HITOPKCOMM = SYSTEMS["GRACE"][0], SYSTEMS["HiTopKComm"][0]
DDP_BYTES = 25 * 2**20


class Bed(NamedTuple):
    """A testbed. Rates in Gb/s."""

    nodes: int
    intra_gbps: float
    inter_gbps: float

    def cluster(self, latencies_us: tuple[float, float]) -> Cluster:
        """Eight GPUs a node."""
        intra, inter = Link(latencies_us[0], self.intra_gbps), Link(latencies_us[1], self.inter_gbps)
        return Cluster(nodes=self.nodes, ranks_per_node=8, intra=intra, inter=inter)


class Papers:
    """The published profiles and codec times of a folder: profiles/MODEL.json and v100-compressor-overheads.json."""

    def __init__(self, data: Path) -> None:
        self.data = data
        costs = import_file(data / "v100-compressor-overheads.json")
        assert isinstance(costs, Costs)
        self.costs = costs
        free = [msgspec.structs.replace(codec, encode=FREE, decode=FREE) for codec in costs.codecs]
        self.free = Costs(codecs=tuple(free))

    def profile(self, model: str, alone_ms: float | None = None) -> Profile:
        """Return the profile with forward times. `alone_ms` stretches all times to a published step of one GPU."""
        read = import_file(self.data / "profiles" / f"{model}.json", 32, "V100")
        assert isinstance(read, Profile)
        backward_ms = sum(tensor.backward_us for tensor in read.tensors) / 1e3
        stretch = 1.0 if alone_ms is None else alone_ms / backward_ms / (1 + FORWARD)
        tensors = [
            msgspec.structs.replace(
                tensor, backward_us=stretch * tensor.backward_us, forward_us=FORWARD * stretch * tensor.backward_us
            )
            for tensor in read.tensors
        ]
        return msgspec.structs.replace(read, tensors=tuple(tensors))

    def job(
        self,
        profile: Profile,
        bed: Bed,
        algorithm: str,
        keep: Callable[[Option], bool] = lambda option: True,
        free: bool = False,
        decode_calls: str = "one",
        latencies_us: tuple[float, float] = LATENCIES_US,
    ) -> PlanningJob:
        """All tensors may be compressed; codecs on GPUs, one decode call for all payloads unless said, rings as in NCCL's own
        collectives (decision 11). keep: of the options."""
        cluster = bed.cluster(latencies_us)
        options = select(devices=("gpu",), nodes=cluster.nodes, ranks_per_node=cluster.ranks_per_node, where=keep)
        return PlanningJob(
            profile,
            cluster,
            self.free if free else self.costs,
            [ALGORITHMS[algorithm]],
            Limits(exempt_vectors=False),
            Rules(decode_calls=decode_calls, routing="ring"),
            options,
        )


FREE = ((4, 0.0), (8, 0.0))


def step_ms(job: PlanningJob, draft: Draft) -> float:
    """Return the step of a draft."""
    step = job.step(draft)
    assert step is not None
    return step / FS_PER_US / 1e3


def alone_ms(job: PlanningJob) -> float:
    """Return the step of one rank."""
    return job.line.after[-1] / FS_PER_US / 1e3


def fp32(job: PlanningJob) -> Draft:
    """Uncompressed in buckets of 25 MB, by the best uncompressed option."""
    fuse = partial(close_before, limit=DDP_BYTES)
    found = best_of(job, (fused(job, fuse, plain)._replace(skew=skew) for plain in job.plain for skew in (0, 1)))
    assert found is not None, "there is no limit of memory"
    return found


def all_tensors(job: PlanningJob, option: tuple[str, ...]) -> Draft:
    """Every tensor alone and compressed: GRACE's way, or HiTopKComm's."""
    choice = Choice(job.specs[0], option)
    return Draft(tuple(Part((place,), choice) for place in range(len(job.profile.tensors))))


def gathered(job: PlanningJob) -> tuple[str, ...]:
    """The option that Cupcake's paper uses: all-gather, on several nodes between these only."""
    return GRACE if job.cluster.nodes == 1 else HITOPKCOMM


def selective(job: PlanningJob) -> Draft:
    """HiPress's rule, with compression between nodes only, or, on one node, by all-gather."""
    choices = [*job.plain, Choice(job.specs[0], gathered(job))]
    if job.cluster.nodes > 1:
        keeps = RESTRICTED["inter-allgather"], RESTRICTED["inter-alltoall"]
        options = [o for o in job.options if o.compresses and any(keep(o) for keep in keeps)]
        choices += [Choice(job.specs[0], option.tasks) for option in options]
    return by_own_tasks(job, choices)


def cupcake(job: PlanningJob, strategy: str = "fusion") -> Draft:
    """Cupcake's best fusion, or a rule that it is compared with."""
    return fused(job, FUSIONS[strategy], Choice(job.specs[0], gathered(job)))


def selected(job: PlanningJob) -> Draft:
    """ByteComp's selection; the whole search for models of few tensors."""
    return published(job, looks=None if len(job.profile.tensors) <= 40 else 1).draft


SYSTEMS_OF = {
    "FP32": fp32,
    "GRACE": lambda job: all_tensors(job, gathered(job)),
    "HiPress": selective,
    "Cupcake": cupcake,
    "ByteComp": selected,
    "gradwire": joint,
}


def scaling(job: PlanningJob, system: str) -> float:
    """The scaling factor of a system."""
    return alone_ms(job) / step_ms(job, SYSTEMS_OF[system](job))


def free_step_ms(papers: Papers, profile: Profile, bed: Bed, algorithm: str) -> float:
    """ByteComp's Upper Bound: codecs take no time. The better of two searches."""
    job = papers.job(profile, bed, algorithm, free=True)
    return min(step_ms(job, selected(job)), step_ms(job, joint(job)))
