"""Whether a plan fits a model: the same tensors, sizes and devices."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gradwire.core.tensors import TensorInfo, fingerprint
from gradwire.errors import PlanError

if TYPE_CHECKING:
    from gradwire.core.plan import Plan

_CURE = (
    "A plan belongs to one model: make it again for this one, as gradwire.Policy.plan(tensors) does, or pass a policy."
)


def check_fit(plan: "Plan", tensors: Sequence[TensorInfo]) -> None:
    """Raise PlanError unless `tensors` are exactly those the plan was made for."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise PlanError(f"{len(tensors)} tensors have {len(by_name)} names: each tensor needs a name of its own.")
    planned = set(plan.tensors)
    if planned != by_name.keys():
        raise PlanError(_other_names(planned, by_name.keys()))
    for index, bucket in enumerate(plan.buckets):
        members = [by_name[name] for name in bucket.tensors]
        numel = sum(tensor.numel for tensor in members)
        if bucket.numel and numel != bucket.numel:
            raise PlanError(
                f"bucket {index} ({_some(bucket.tensors)}) has {numel:_} elements, but the plan was made for "
                f"{bucket.numel:_}. The model changed after planning. {_CURE}"
            )
        on_cpu = next((tensor.name for tensor in members if tensor.device == "cpu"), None)
        if on_cpu is not None and any(task.endswith(":gpu") for task in bucket.option):
            raise PlanError(
                f"bucket {index} compresses on the gpu, but tensor {on_cpu!r} is on the cpu. Move the model before "
                f"`parallelize`, or plan for this device. {_CURE}"
            )
    found = fingerprint(tensors)
    if found != plan.fingerprint:
        raise PlanError(
            f"the model's fingerprint is {found[:12]}, but the plan was made for {plan.fingerprint[:12]}: the "
            f"{len(tensors)} names agree, and shapes or dtypes do not. {_CURE}"
        )


def _other_names(planned: set[str], found: Iterable[str]) -> str:
    names = set(found)
    parts = [f"the model has {len(names)} trainable tensors, but the plan was made for {len(planned)}."]
    if names - planned:
        parts.append(f"Only the model has {_some(sorted(names - planned))}.")
    if planned - names:
        parts.append(f"Only the plan has {_some(sorted(planned - names))}.")
    return " ".join([*parts, "The model changed after planning, or parameters were frozen.", _CURE])


def _some(names: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
