"""Plans for given tensors, from anything that users may pass as a plan."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch

from gradwire.core import Plan, Schedule, Spec, TensorInfo, show, under
from gradwire.errors import PlanError
from gradwire.plan import Policy, Uniform, check_known
from gradwire.transport import kind_of

PlanLike: TypeAlias = Plan | Policy | Spec | str | os.PathLike[str] | Callable[[list[TensorInfo], int], Policy]
"""A plan or its path, a policy, a spec for all tensors, or what makes a policy of the tensors and the number of ranks."""


def plan_for(
    plan: PlanLike, tensors: Sequence[TensorInfo], ranks: int, ranks_per_node: int | None = 1
) -> tuple[Plan, Policy | None]:
    """The plan, and the policy that it was made of. `tensors` in the order in which they become ready.

    Raises PlanError where it does not fit the tensors, and for what is no plan; FormatError for a wrong file.
    """
    if isinstance(plan, str) and plan == "auto":
        raise PlanError("plan is 'auto', which measures a model in training. Use gw.parallelize, or pass a spec.")
    if isinstance(plan, type):
        raise PlanError(f"plan is the class {plan.__name__}. Pass an object of the class, such as gw.QSGD(bits=4).")
    if isinstance(plan, str) and not plan.endswith(".json") and not (plan and Path(plan).exists()):
        raise PlanError(
            f"plan is {show(plan)}, and there is no such file: a text is 'auto', or the path of a plan's JSON file. For a "
            "compressor pass the object, such as plan=gw.QSGD(bits=4)."
        )
    if callable(plan):
        plan = plan(list(tensors), ranks)
    if isinstance(plan, (str, os.PathLike)):
        plan = Plan.load(Path(plan))
    if isinstance(plan, Plan):
        for index, bucket in enumerate(plan.buckets):
            with under(f"buckets[{index}]"):
                check_known(bucket.option)
        plan.check_against(tensors)
        return plan, None
    if isinstance(plan, Spec):
        plan = Uniform(plan)
    if isinstance(plan, Schedule):
        raise PlanError(
            f"plan is {show(plan)}, a schedule. It goes into a policy: pass plan=gw.Uniform(gw.QSGD(bits=4), schedule=...), or "
            "with gw.Identity() in place of QSGD to compress nothing."
        )
    if not isinstance(plan, Policy):
        raise PlanError(f"plan is a {type(plan).__name__}: it must be a spec, a Policy, a Plan or the path of a plan file.")
    made = plan.plan(tensors, ranks, ranks_per_node)
    made.check_against(tensors)
    return made, plan


def changing_specs(plan: Plan) -> tuple[Spec, ...]:
    """The plan's specs that are others in later steps."""
    return tuple(spec for spec in plan.specs if spec.at_step(0) != spec.settled)


def info_of(name: str, tensor: torch.Tensor, embedding: bool = False) -> TensorInfo:
    """The facts of a tensor that a planner uses."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorInfo(name, tuple(tensor.shape), dtype, kind_of(tensor.device), embedding)


def looks_up_rows(module: torch.nn.Module) -> bool:
    """Whether the module's weight is an embedding."""
    return isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))


def embeddings_of(model: torch.nn.Module) -> set[int]:
    """The ids of the parameters whose rows a module of the model looks up."""
    return {id(module.weight) for module in model.modules() if looks_up_rows(module)}


def warn_of_embeddings(tensors: Iterable[TensorInfo], plan: Plan, policy: Policy | None) -> None:
    """Say where the policy's spec does not send embeddings because it has no code for zero, and where it does."""
    spec_of = {name: bucket.spec_of(name) for bucket in plan.buckets for name in bucket.tensors}
    embeddings = [(tensor.name, spec_of[tensor.name]) for tensor in tensors if tensor.embedding]
    changed = [(name, spec) for name, spec in embeddings if not spec.keeps_zeros]
    if changed:
        name, spec = changed[0]
        warnings.warn(
            f"{spec!r} has no code for zero, and {name!r} is an embedding: rows that no batch uses are changed in every step. "
            f"Send embeddings with another spec: rules=[({name!r}, gw.QSGD(bits=4))].",
            stacklevel=4,
        )
    elif policy is not None and not policy.default.keeps_zeros and embeddings:
        name, spec = embeddings[0]
        warnings.warn(
            f"{policy.default!r} has no code for zero, so {name!r} is sent with {spec!r}: rows of an embedding that no batch "
            "uses stay as they are. Its gradient keeps its size; with signs alone give it a learning rate of its own.",
            stacklevel=4,
        )
