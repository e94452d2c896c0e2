"""Runs that nobody made, for tests of formats and pages."""

import math

from gradwire.core import QSGD, Cast, Cluster, CodecCosts, Costs, Identity, Link, Made, Plan, Profile, TensorProfile
from gradwire.core.plan import Bucket
from gradwire.core.tensors import fingerprint
from gradwire.record.run import (
    Alternative,
    BucketRecord,
    Decision,
    Interval,
    MemoryRecord,
    Rival,
    Run,
    StepRecord,
    TensorRecord,
)
from gradwire.record.timeline import LaneTask, Moments, Pass, measured_timeline

__all__ = ["CLUSTER", "COSTS", "NASTY", "PROFILE", "made_up_run"]

NASTY = "<b>&\"'\0\N{SNOWMAN}</style><script>alert(1)</script>"
NAMES = ["head.weight", NASTY, *(f"blocks.{i}.linear.weight" for i in range(14))]
CODED = ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")

PROFILE = Profile(
    model="made-up",
    batch=8,
    device="cpu",
    optimizer_us=900.0,
    tensors=tuple(
        TensorProfile(name=name, shape=(512, 256), dtype="float32", backward_us=1500.0, forward_us=700.0) for name in NAMES
    ),
)
CLUSTER = Cluster(nodes=2, ranks_per_node=1, intra=Link(5.0, 10.0), inter=Link(60.0, 0.5))
COSTS = Costs(
    codecs=[
        CodecCosts(spec=spec, device="cpu", encode=[(4096, 12.0), (4194304, 1400.0)], decode=[(4096, 9.0), (4194304, 700.0)])
        for spec in (QSGD(bits=4), Cast())
    ]
)


def made_up_run(steps: int = 120, rivals: bool = True) -> Run:
    """A run of that many steps; with none, or without rivals, what would be there is not."""
    infos = PROFILE.tensor_infos("cpu")
    buckets = [
        Bucket(tensors=tuple(NAMES[:1]), spec=Identity(), option=("allreduce:inter",)),
        *(Bucket(tensors=tuple(NAMES[at : at + 3]), spec=QSGD(bits=4), option=CODED) for at in range(1, 16, 3)),
    ]
    launch = [(index, word) for index, bucket in enumerate(buckets) for word in bucket.link_tasks]
    plan = Plan(fingerprint=fingerprint(infos), buckets=tuple(buckets), launch=tuple(launch))
    records = tuple(
        BucketRecord(
            numel=(n := 131072 * len(bucket.tensors)),
            chunks=2 if bucket.option == CODED else 1,
            gradient_bytes=4 * n,
            wire_bytes=4 * n if bucket.option != CODED else n // 2,
            intra_bytes=0,
            inter_bytes=4 * n if bucket.option != CODED else n // 2,
        )
        for bucket in buckets
    )
    tasks = [
        LaneTask(index, chunk, phase, bucket.option, (at := 0.016 + 0.004 * index + 0.001 * chunk + 0.002 * phase),
                 at + 0.0025, [(at, at + 0.0004), (at + 0.002, at + 0.0024)] if bucket.option == CODED else [])
        for index, bucket in enumerate(buckets)
        for chunk in range(records[index].chunks)
        for phase in range(len(bucket.link_tasks))
    ]  # fmt: skip
    ready = [(name, 0.0125 + 0.0015 * place) for place, name in enumerate(NAMES, 1)]
    moments = Moments(0.0, [Pass(0.001, 0.0125, ready)], tasks, 0.0445)
    losses = [4.2 * math.exp(-step / 60) + 0.1 * math.sin(step) + 0.3 for step in range(steps)]
    ddp = Rival(
        name="plain DDP",
        step_us=277_300.0,
        sent_bytes=8_388_608,
        speedup=Interval(ratio=6.27, low=6.11, high=6.43),
        again=Interval(ratio=1.003, low=0.991, high=1.014),
        end_s=tuple(0.2773 * (step + 1) for step in range(steps)),
        loss=tuple(loss + 0.02 for loss in losses),
    )
    return Run(
        made=Made(host="nowhere", date="2026-01-01T00:00:00+00:00", command="python train.py --model 'a b'"),
        model="MadeUp",
        device="cpu",
        world_size=2,
        nodes=2,
        decision=Decision(
            by="the planner of this test",
            words=("bucket 0 stays as it is: encoding it would take longer than it saves.", "bucket 1 gains 31 ms."),
            alternatives=(
                Alternative(name="plain all-reduce", step_us=277_300.0, kept=False),
                Alternative(name="4 bits", step_us=44_200.0, kept=True),
            ),
        ),
        plan=plan,
        steps=tuple(
            StepRecord(
                step=step,
                end_s=0.0442 * (step + 1),
                step_us=44_200.0 + 900.0 * math.sin(3 * step),
                exposed_us=4100.0,
                codec_us=5200.0,
                loss=loss,
            )
            for step, loss in enumerate(losses)
        ),
        buckets=records,
        tensors=tuple(
            TensorRecord(
                name=name,
                numel=131072,
                bits=((0, 32.0),) if place == 0 else ((0, 4.125), (50, 3.125)) if place % 2 else ((0, 4.125),),
                error=() if place == 0 else tuple((step, 0.1 + 0.01 * place) for step in range(0, steps, 50)),
            )
            for place, name in enumerate(NAMES)
        ),
        memory=MemoryRecord(gradient_bytes=8_388_608, residual_bytes=7_864_320, payload_bytes=3_145_728),
        timeline=measured_timeline(moments, "backward", 2, (1_507_328, 0, 1_507_328)) if steps > 1 else None,
        rivals=(ddp,) if rivals and steps else (),
        notes=("Made up.",),
    )
