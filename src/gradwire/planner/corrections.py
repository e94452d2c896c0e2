"""The plan of a correction step: the same buckets, with the spec that the `delayed` schedule gives to corrections."""

from collections.abc import Sequence

import msgspec

from gradwire.core.collectives import ALL_REDUCE, collective_of
from gradwire.core.plan import Bucket, Plan
from gradwire.core.schedules import Delayed
from gradwire.core.specs import Identity, Spec
from gradwire.core.tensors import TensorInfo
from gradwire.planner.schemes import tasks_of


def correction_plan(plan: Plan, schedule: Delayed, tensors: Sequence[TensorInfo]) -> Plan:
    """Buckets with the same tensors in the same places. What is not compressed in the plan is not in its corrections.

    `tensors` are those of the plan. Raises FormatError where the correction's spec needs other tasks than the bucket's option
    has and no scheme gives them.

    >>> from gradwire.core import QSGD
    >>> from gradwire.planner import Uniform
    >>> tensors = [TensorInfo("weight", (4, 4), "float32")]
    >>> plan = Uniform(QSGD(bits=4)).plan(tensors)
    >>> corrections = correction_plan(plan, Delayed(), tensors)
    >>> corrections.buckets[0].spec, corrections.buckets[0].option
    (Identity(), ('alltoall:inter', 'allgather:inter'))
    """
    of = {tensor.name: tensor for tensor in tensors}
    buckets = tuple(_corrected(bucket, schedule.correction, of[bucket.tensors[0]]) for bucket in plan.buckets)
    order = dict.fromkeys(index for index, _ in plan.launch)
    launch = tuple((index, task) for index in order for task in buckets[index].link_tasks)
    if all(new.link_tasks == old.link_tasks for new, old in zip(buckets, plan.buckets, strict=True)):
        launch = plan.launch
    return msgspec.structs.replace(plan, buckets=buckets, launch=launch, prediction=None)


def _corrected(bucket: Bucket, correction: Spec | None, first: TensorInfo) -> Bucket:
    usual = bucket.spec_of(bucket.tensors[0])
    if not usual.encodes:
        return bucket
    spec = Identity() if correction is None else correction
    named = collective_of(bucket.option)
    if not spec.encodes and named is not None:
        option = named.uncompressed
    elif not spec.encodes:
        option = tuple(task for task in bucket.option if not task.startswith(("comp:", "decomp:")))
    elif usual.rounds or spec.rounds:
        option = tasks_of(spec.schemes[0], first.device, spec)
    else:
        option = bucket.option
    return msgspec.structs.replace(
        bucket,
        spec=spec,
        option=option,
        reduce_dtype=first.dtype if option == ALL_REDUCE else "float32",
        residual_dtype=bucket.residual_dtype if spec.feedback else "float32",
    )
