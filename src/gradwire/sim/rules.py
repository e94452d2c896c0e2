"""The rules by which a rank works, which a plan leaves open."""

from typing import Any

import msgspec

from gradwire.core import LANES, Cluster, Profile, lanes_over, whole, word
from gradwire.costs import DECODE_CALLS, ROUTINGS
from gradwire.errors import PlanError

MOST_LANES = 1024
"""The most lanes of simulated ranks, and workers of their CPU pool. Each takes memory in each simulated step."""
_SHORT = 0.15
"""The processors of a rank are measured a little short: that much is added before whole ones are counted."""
_PART_OF_A_PROCESSOR = 0.5
"""The part of a processor from which computation counts as a task that needs one."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules by which a rank works, where the papers differ or are silent (decision 11).

    The defaults are those of gradwire's engine on GPUs; `rules_of` is for either device. Raises PlanError for an unknown value.
    """

    device: str = "gpu"
    """Where gradients are computed: gpu or cpu. Codec tasks on the other device run in the CPU pool."""
    codec_on: str = "compute"
    """Resource of codec tasks on the gradients' device. compute: codec tasks and the computation exclude each other, and a ready
    codec task runs before the next tensor's backward. own thread: in the CPU pool, without load on compute."""
    decode: str = "at once"
    """Time of a bucket's last decode. at once: like an encode; after backward: when compute has nothing else to do; with encode:
    its time is added to the first encode; none: free (the papers' drawings). One that an exchange waits for is never put off."""
    lanes: int = 0
    """Number of lanes. 0: links take tasks strictly in the launch order, and nothing blocks, as on one NCCL communicator.
    Above 0: pieces are dealt to the lanes. A lane does one task after the other, codecs included, as gradwire's on CPUs."""
    offload_lanes: int = 0
    """Number of further lanes for the offloaded buckets of a GPU, so that codecs on CPUs block no other bucket. Needs lanes."""
    cpu_workers: int = 1
    """Codec tasks that the CPU pool does at the same time."""
    decode_calls: str = "engine"
    """Calls of a decode of several payloads: engine, each or one; see gradwire.costs.prices.DECODE_CALLS."""
    routing: str = "direct"
    """Routes of sums and gathers: ring; direct, as the engine's on GPUs; or wires, as the engine's on CPUs. See
    gradwire.costs.collectives.ROUTINGS."""
    reports: bool = False
    """Whether ranks tell each other how a step went, after the last task of lanes. Then an exchange is over when all reports are
    there, which takes the latency of a far link; over others no time. Not where gathers run in the next forward: there reports
    travel while computation waits for gathers."""

    def __post_init__(self) -> None:
        word("device", self.device, ("gpu", "cpu"), error=PlanError)
        word("codec_on", self.codec_on, ("compute", "own thread"), error=PlanError)
        word("decode", self.decode, ("at once", "after backward", "with encode", "none"), error=PlanError)
        word("decode_calls", self.decode_calls, DECODE_CALLS, error=PlanError)
        word("routing", self.routing, ROUTINGS, error=PlanError)
        for field, what, least in (
            ("lanes", "how many lanes a rank has, 0 for launch order without lanes", 0),
            ("offload_lanes", "lanes for buckets with codecs on CPUs", 0),
            ("cpu_workers", "codec tasks that run at once", 1),
        ):
            whole(field, getattr(self, field), what, low=least, high=MOST_LANES, error=PlanError)
        if self.offload_lanes and not (self.lanes and self.device == "gpu"):
            raise PlanError(
                f"offload_lanes is {self.offload_lanes} with lanes {self.lanes} and device {self.device!r}: they are "
                "further lanes of a GPU's gradients. Use lanes=1 or more and device='gpu', or offload_lanes=0."
            )
        if self.lanes and self.decode == "after backward":
            raise PlanError(
                f"decode is 'after backward' with lanes {self.lanes}: a lane decodes before its next task, so it would stand "
                "still until backward ends. Use lanes=0, or decode='at once'."
            )


def rules_of(device: str, cluster: Cluster | None = None) -> Rules:
    """The rules of gradwire's engine for gradients on this device, gpu or cpu. cluster: None has no far links.

    >>> rules_of("cpu").lanes, rules_of("gpu").lanes
    (2, 0)
    """
    if device != "cpu":
        return Rules(device=device)
    lanes = LANES if cluster is None else lanes_over(cluster.latency_us, cluster.world_size)
    return Rules(device="cpu", lanes=lanes, routing="wires", reports=True)


def device_of(profile: Profile) -> str:
    """cpu if the profile's device says so in words, as 'cpu' or 'CPU, 2 cores'; else gpu."""
    return "cpu" if "cpu" in profile.device.lower() else "gpu"


def placed(rules: Rules, profile: Profile, cluster: Cluster) -> tuple[str, int]:
    """Where codec tasks on the gradients' device run (`Rules.codec_on`), and how many tasks the CPU pool does at once.

    On CPUs with lanes codec tasks leave compute if computation leaves them a processor: if it needs none, or if a rank has two or
    more. Then each lane has a processor, as far as there are any.

    >>> from gradwire.core import Link, TensorProfile
    >>> tensors = [TensorProfile(name="w", shape=(4,), dtype="float32", backward_us=1.0)]
    >>> link = Link(1.0, 1.0)
    >>> shape = {"nodes": 2, "ranks_per_node": 1, "intra": link, "inter": link}
    >>> profile = Profile(model="m", batch=1, device="cpu", tensors=tensors)
    >>> placed(rules_of("cpu"), profile, Cluster(**shape)), placed(rules_of("cpu"), profile, Cluster(**shape, processors=1.97))
    (('compute', 1), ('own thread', 1))
    >>> asleep = Profile(model="m", batch=1, device="cpu", processor_part=0.1, tensors=tensors)
    >>> placed(rules_of("cpu"), asleep, Cluster(**shape, processors=2.5))
    ('own thread', 2)
    """
    if rules.device != "cpu" or not rules.lanes or rules.codec_on != "compute":
        return rules.codec_on, rules.cpu_workers
    part = 1.0 if profile.processor_part is None else profile.processor_part
    computes = 0 if part < _PART_OF_A_PROCESSOR else max(1, round(part))
    left = int(cluster.processors_per_rank + _SHORT) - computes
    if computes and left < 1:
        return rules.codec_on, rules.cpu_workers
    return "own thread", max(1, min(rules.lanes, left))


def as_ddp(cluster: Cluster, rules: Rules) -> tuple[Cluster, Rules]:
    """The cluster and the rules by which DistributedDataParallel sums gradients: around a ring, with its own all-reduce if it was
    measured. gloo has two threads, over far links too, and ranks report nothing."""
    return cluster.of_ddp, msgspec.structs.replace(rules, lanes=min(rules.lanes, LANES), routing="direct", reports=False)


def changed_rules(profile: Profile, cluster: Cluster | None = None, *, device: str | None = None, **changes: Any) -> Rules:
    """The engine's rules on a device (None: the profile's) of a cluster (None: without far links), with the values
    in `changes`.

    Raises PlanError for an unknown value.
    """
    return msgspec.structs.replace(
        rules_of(device or device_of(profile), cluster), **{name: value for name, value in changes.items() if value is not None}
    )
