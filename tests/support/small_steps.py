"""Small models, clusters and plans for the simulator's tests: a byte takes a microsecond, so steps can be worked out by hand."""

from gradwire.core import (
    Bucket,
    Cast,
    Cluster,
    CodecCosts,
    Costs,
    Identity,
    Link,
    Plan,
    Profile,
    TensorProfile,
    fingerprint,
)

PLAIN, SPLIT = ("allreduce:inter",), ("reducescatter:inter", "allgather:inter")
GATHERED = ("comp:gpu", "allgather:inter", "decomp:gpu")
TWO_PHASE = ("comp:gpu", "alltoall:inter", "decomp:gpu", "comp:gpu", "allgather:inter", "decomp:gpu")
NESTED = ("reducescatter:intra", "allreduce:inter", "allgather:intra")
BYTE_A_US = Link(alpha_us=0.0, gbps=0.008)  # a byte takes a microsecond


def profile(*tensors, device="V100"):
    """Tensors as (bytes, backward_us) or (bytes, backward_us, forward_us), named t0, t1, ..."""
    rows = [
        TensorProfile(name=f"t{i}", shape=(row[0] // 4,), dtype="float32", backward_us=row[1], forward_us=(*row, None)[2])
        for i, row in enumerate(tensors)
    ]
    return Profile(model="made up", batch=1, device=device, tensors=rows)


def cluster(nodes=2, ranks_per_node=1):
    return Cluster(nodes=nodes, ranks_per_node=ranks_per_node, intra=BYTE_A_US, inter=BYTE_A_US)


def plan_of(model, options, spec=None, launch=None, groups=None, schedule="backward", chunk_bytes=0):
    """Make a plan with one bucket for each tensor, or for each group of indices. The default launch order is bucket by
    bucket."""
    groups = groups or [[i] for i in range(len(model.tensors))]
    buckets = []
    for group, option in zip(groups, options, strict=True):
        coded = any(task.startswith("comp") for task in option)
        names = [f"t{i}" for i in group]
        buckets.append(Bucket(tensors=names, spec=spec if coded else Identity(), option=option, chunk_bytes=chunk_bytes))
    launch = launch or [(i, word) for i, bucket in enumerate(buckets) for word in bucket.link_tasks]
    prints = fingerprint(model.tensor_infos("gpu"))
    return Plan(fingerprint=prints, buckets=buckets, launch=launch, schedule=schedule)


def codec(encode, decode, spec=Cast(), devices=("gpu", "cpu")):  # noqa: B008
    return Costs(codecs=[CodecCosts(spec=spec, device=device, encode=[(0, encode)], decode=[(0, decode)]) for device in devices])
