"""The papers' systems as plans of one profiled job, for `python -m benchmarks side_by_side`.

GRACE, HiPress, BytePS-Compress, HiTopKComm, Cupcake, ByteComp and gradwire's joint plan are methods of the planner. They choose
among the same specs, and may compress every tensor, as the systems do. DDP, CGX, DeAR and CD-SGD do not choose a compressor, so
they are fixed plans. Each says below what it leaves out of the published system. Horovod and MG-WFBP, DeAR's baselines, fuse and
compress nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import msgspec

from benchmarks.campaigns.predict import Profiled
from benchmarks.campaigns.predictions import ddp_plan
from benchmarks.papers.methods import FUSIONS
from benchmarks.papers.strawmen import STRATEGIES
from gradwire.core.plan import Bucket, Plan
from gradwire.core.schedules import Delayed, Pipelined
from gradwire.core.specs import QSGD, Identity, Spec, TwoBit
from gradwire.plan.policy import Uniform, launch_of
from gradwire.plan.schemes import SYSTEMS, tasks_of
from gradwire.planner.drafts import PLANNED_SCHEDULES, Choice, Draft, Limits, PlanningJob
from gradwire.planner.methods import make_plan
from gradwire.planner.partition import Strategy
from gradwire.planner.starts import best_of, close_before, ddp_draft, fused
from gradwire.sim.rules import device_of

__all__ = [
    "BASELINES", "CD_SGD_PERIOD", "JOINT", "OWN_SPECS", "PAPERS_SPECS", "SHARED_SPECS", "SYSTEM_NAMES", "plans_of", "systems_of",
]  # fmt: skip

JOINT = "gradwire joint"
BASELINES = ("DDP", "GRACE", "HiPress")
"""Systems that the papers compare themselves with."""
_BY_METHOD = {
    "GRACE": "grace",
    "HiPress": "hipress",
    "BytePS-Compress": "byteps-compress",
    "HiTopKComm": "hitopkcomm",
    "ByteComp": "bytecomp",
}
SYSTEM_NAMES = (
    *("DDP", "GRACE", "HiPress", "BytePS-Compress", "HiTopKComm", "Cupcake", "ByteComp", "CGX", "DeAR", "CD-SGD"),
    JOINT,
)
"""The systems of a cell in which each chooses among specs or has its own, in the order of the tables."""
_CHOOSING = ("DDP", *(name for name in SYSTEM_NAMES if name in {*_BY_METHOD, "Cupcake", JOINT}))
"""DDP, and the systems without a compressor of their own."""
_UNCOMPRESSED = ("DDP", "Horovod", "MG-WFBP", "DeAR", JOINT)
"""The systems of a cell without compression."""
CD_SGD_PERIOD = 5
"""Steps from one correction of CD-SGD to the next, as the paper advises. Turns have a multiple of so many steps."""
SHARED_SPECS = ("QSGD(bits=4)", "TwoBit()", "ErrorFeedback(TopK(0.01))")
"""The default specs of the systems without a compressor of their own. CGX's and CD-SGD's are among them, so no system has a
compressor that the joint plan may not use."""
PAPERS_SPECS = {
    "randk": "ErrorFeedback(RandomK(0.01, indices='own'))",
    "dgc": "DGC(ratio=0.01, momentum=0.0)",
    "efsignsgd": "EFSignSGD()",
    "onebit": "OneBit()",
    "identity": "Identity()",
}
"""The compressors of Cupcake and ByteComp, and none, by the word in a cell's name. DGC leaves momentum to the optimizer."""
OWN_SPECS: tuple[Spec, ...] = (QSGD(bits=4), TwoBit())
"""The compressors of CGX and CD-SGD."""
_DEAR_MIB = (1, 2, 5, 10, 25, 50, 100)


def systems_of(compressor: str) -> Sequence[str]:
    """The systems of a cell where all have this compressor, a word of PAPERS_SPECS; '' where they choose or have their own."""
    if not compressor:
        return SYSTEM_NAMES
    return _UNCOMPRESSED if compressor == "identity" else _CHOOSING


def plans_of(found: Profiled, specs: Sequence[Spec], systems: Sequence[str] = SYSTEM_NAMES) -> dict[str, Plan]:
    """The plan of each of these systems, by name. The costs have times of `specs` and of `OWN_SPECS`."""
    job = planning(found, specs)
    makers: dict[str, Callable[[], Plan]] = {
        "DDP": lambda: ddp_plan(found.profile),
        "Horovod": lambda: exact(job, STRATEGIES["close-before, 64 MB (Horovod)"]),
        "MG-WFBP": lambda: exact(job, STRATEGIES["MG-WFBP"]),
        "Cupcake": lambda: job.plan(cupcake(job), ddp_draft(job)),
        "CGX": lambda: cgx(found),
        "DeAR": lambda: dear(job),
        "CD-SGD": lambda: cd_sgd(found),
        JOINT: lambda: joint(found, specs),
    }
    return {name: make_plan(job, _BY_METHOD[name]).plan if name in _BY_METHOD else makers[name]() for name in systems}


def planning(found: Profiled, specs: Sequence[Spec], schedule: str = "backward") -> PlanningJob:
    """The job of the planner, in which every tensor may be compressed."""
    return PlanningJob(found.profile, found.cluster, found.costs, specs, Limits(exempt_vectors=False, schedule=schedule))


def joint(found: Profiled, specs: Sequence[Spec]) -> Plan:
    """Return gradwire's joint plan. Without compression it may pipeline as DeAR does, where that is predicted to be faster."""
    schedules = ("backward",) if any(spec.encodes for spec in specs) else PLANNED_SCHEDULES
    jobs = [planning(found, specs, schedule) for schedule in schedules]
    return min((make_plan(job).plan for job in jobs), key=jobs[0].simulator.step_us)


def exact(job: PlanningJob, strategy: Strategy) -> Plan:
    """Return all-reduce of what the strategy fuses.

    Horovod also waits up to 5 ms for further tensors and tunes its limit, and MG-WFBP measures its costs at the start. Here the
    limit is Horovod's default, and the costs are those of the profile.
    """
    return job.plan(fused(job, strategy, Choice(Identity(), SYSTEMS["DDP"][0])), ddp_draft(job))


def cupcake(job: PlanningJob) -> Draft:
    """Cupcake: its own search for the buckets, all tensors compressed, all-gather of payloads among all ranks.

    The search sees costs as lines, and stops after 10 seconds; of several specs the best is taken. Cupcake selects once for a
    whole bucket; here each tensor is encoded as it would be alone, unless the spec says otherwise (`TopK(per="bucket")`).
    """
    device = job.rules.device
    choices = [Choice(spec, tasks_of("allgather", device, spec)) for spec in job.specs]
    choices = [choice for choice in choices if choice.option in job.coded[choice.spec]] or job.plain[:1]
    drafts = [fused(job, FUSIONS["cupcake"], choice) for choice in choices]
    found = best_of(job, iter(drafts))
    assert found is not None, "there is no limit of memory"
    return found


def cgx(found: Profiled) -> Plan:
    """CGX: 4 bits in blocks of 128, all-to-all and all-gather of payloads, in the buckets that DDP gives to its backend.

    Biases and norms stay uncompressed, as in the paper. Where nodes have several ranks the ranks of a node add uncompressed: the
    paper's heterogeneous form. Adaptive bits and the shared-memory backend are left out.
    """
    plain = ddp_plan(found.profile)
    several = 1 < found.cluster.nodes < found.cluster.world_size
    device, quantiser = device_of(found.profile), OWN_SPECS[0]
    vectors = {tensor.name for tensor in found.profile.tensors if len(tensor.shape) < 2}
    buckets = [
        _coded(bucket, vectors, tasks_of("CGX between nodes" if several else "CGX", device, quantiser))
        for bucket in plain.buckets
    ]
    return msgspec.structs.replace(plain, buckets=tuple(buckets), launch=launch_of(buckets, plain.schedule))


def _coded(bucket: Bucket, vectors: set[str], option: tuple[str, ...]) -> Bucket:
    """The bucket with CGX's quantiser, except for vectors; as it is if it has nothing else."""
    if vectors.issuperset(bucket.tensors):
        return bucket
    specs = {name: Identity() if name in vectors else OWN_SPECS[0] for name in bucket.tensors}
    spec = specs if vectors.intersection(bucket.tensors) else OWN_SPECS[0]
    return msgspec.structs.replace(bucket, spec=spec, option=option, reduce_dtype="float32")


def dear(job: PlanningJob) -> Plan:
    """DeAR: uncompressed, reduce phases in backward and gather phases in the next forward, buckets closed before a limit.

    The paper chooses the limit from 1 to 100 MB by Bayesian optimisation on the live job. Here the simulated step chooses among a
    few limits. The phases are ring reduce-scatter and all-gather among all ranks, or in two levels where nodes have several
    ranks: the paper has NCCL's, whose rings enter each node once.
    """
    options = [SYSTEMS["DeAR"][0]]
    if 1 < job.cluster.nodes < job.cluster.world_size:
        options.append(tasks_of("CGX between nodes", job.rules.device, Identity()))
    plans = []
    for option, limit in product(options, _DEAR_MIB):
        plan = job.plan(fused(job, partial(close_before, limit=limit * 2**20), Choice(Identity(), option)), ddp_draft(job))
        launch = launch_of(plan.buckets, Pipelined())
        plans.append(msgspec.structs.replace(plan, schedule=Pipelined(), launch=launch, prediction=None))
    return min(plans, key=job.simulator.step_us)


def cd_sgd(found: Profiled) -> Plan:
    """CD-SGD: 2 bits with a residual, every tensor alone, sums that come back uncompressed, a correction in every 5th step.

    Ranks own the shards that the paper's parameter servers own.
    """
    policy = Uniform(OWN_SPECS[1], schedule=Delayed.cd_sgd(k=CD_SGD_PERIOD), scheme="CD-SGD", bucket_bytes=1, edge_bytes=1)
    infos = found.profile.tensor_infos(device_of(found.profile))
    return policy.plan(infos, found.cluster.world_size, found.cluster.ranks_per_node)
