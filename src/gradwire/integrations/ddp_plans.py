"""A DDP model as its hook sees it: the plans that it can run, the parameters, and the sizes of DDP's buckets that fit a plan."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.auto import say
from gradwire.core import Backward, Plan, Spec, show
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import Exchange, embeddings_of, info_of, plan_for
from gradwire.integrations.handles import all_objects
from gradwire.plan import Policy

__all__ = ["ONE_EACH", "PlanForDDP", "advise", "averaged", "bucket_sizes", "checked", "is_joining", "model_of"]
ONE_EACH = "Call model.register_comm_hook(gw.DDPState(plan), gw.ddp_hook) once, with a state of its own for each model."
_MOST_BYTES = 2**21
"""A bucket of DDP with more bytes, and with more than half of all gradients, leaves little to overlap."""
PlanForDDP: TypeAlias = Plan | Policy | Spec | str | os.PathLike[str]


def bucket_sizes(model: torch.nn.Module, plan: PlanForDDP, group: dist.ProcessGroup | None = None) -> list[float]:
    """Sizes for DDP's `bucket_cap_mb_list`, in MiB of gradients, with which DDP calls the hook when a plan's bucket is complete.

    model: the model that DDP will wrap. plan: as for `DDPState`. group: DDP's `process_group`. The sizes assume that gradients
    become ready in the reverse order of registration. With `find_unused_parameters` DDP uses the sizes in the wrong order: leave
    them out. Raises PlanError if the plan does not fit the model.

    Example: `model = DistributedDataParallel(model, bucket_cap_mb_list=gw.bucket_sizes(model, plan))`"""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    parameters = averaged(model, [each for name, each in model.named_parameters() if each.requires_grad and name not in ignored])
    embeddings = embeddings_of(model)
    infos = [info_of(name, each, id(each) in embeddings) for name, each in parameters.items()][::-1]
    made, _ = plan_for(checked(plan), infos, dist.get_world_size(group))
    place = {info.name: at for at, info in enumerate(infos)}
    ends = sorted({1 + max(place[name] for name in bucket.tensors) for bucket in made.buckets})
    return [sum(info.nbytes for info in infos[a:b]) / 2**20 for a, b in zip([0, *ends], ends, strict=False)]


def checked(plan: Any) -> Plan | Policy | Spec:
    """Return the plan, read from its file if it is a path. Raises PlanError for one that DDP cannot run."""
    if isinstance(plan, (str, os.PathLike)) and plan != "auto":
        plan = Plan.load(plan)
    if not isinstance(plan, (Plan, Policy, Spec)) or getattr(plan, "schedule", Backward()) != Backward():
        raise PlanError(
            f"plan is {show(plan)}. In DDP it is a spec, a gw.Policy, a gw.Plan or a plan's file, with gw.Backward(): DDP "
            "decides when gradients are sent. Else write handle = gw.parallelize(model, optimizer, plan=...) in place of DDP."
        )
    return plan


def advise(bucket_bytes: Sequence[int]) -> None:
    """Log a line if DDP hands over most of all gradients in one bucket."""
    largest, total = max(bucket_bytes), sum(bucket_bytes)
    if largest > max(_MOST_BYTES, total / 2):
        say(
            f"DDP hands over {largest / 1e6:.1f} of {total / 1e6:.1f} MB of gradients in one bucket, and nothing of a bucket "
            "is sent before it is full. DistributedDataParallel(model, bucket_cap_mb=1) lets sending begin earlier."
        )


def averaged(model: torch.nn.Module, bucketed: Iterable[torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose gradients an exchange averages, by name: those in DDP's buckets without sparse ones."""
    embeddings = (each for each in model.modules() if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)))
    dense = {*bucketed}.difference(each.weight for each in embeddings if each.sparse)
    return {name: each for name, each in model.named_parameters() if each in dense}


def is_joining(model: torch.nn.Module | None, exchange: Exchange) -> bool:
    """Whether ranks may be without a batch, and so without a backward: inside `join()`. The same on all ranks. Raises
    StepStateError there for a plan with votes, in which zeros count."""
    joining = isinstance(model, DistributedDataParallel) and model._join_config.enable
    voting = next((spec for spec in exchange.plan.specs if spec.votes), None) if joining else None
    if voting is not None and exchange.group.world_size > 1:
        raise StepStateError(
            f"a step began inside join(), and the plan has {voting!r}, a vote of all ranks: zeros of a rank without a "
            "batch count as 1 in it. Give all ranks the same number of batches, or use a spec with magnitudes, such as "
            "gw.EFSignSGD()."
        )
    return joining


def model_of(state: object) -> DistributedDataParallel:
    """Search all objects for the DDP model with this hook's state: DDP gives a hook neither names nor its model. Call it once,
    and first: after a `gc.freeze` of the script, what is there now is never collected. Raises StepStateError unless the state
    is registered with one model."""
    models = (each for each in all_objects() if issubclass(type(each), DistributedDataParallel))
    found: list[DistributedDataParallel] = [
        each for each in models if any(kept is state for _, kept in vars(each).get("_comm_hooks", ()))
    ]
    if len(found) != 1:
        raise StepStateError(f"this DDPState is registered with {len(found)} DDP models, and belongs to one. {ONE_EACH}")
    return found[0]
