"""The checks before islands train: of each rank alone, and of all ranks together."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gradwire.core import show
from gradwire.engine import REGISTRY
from gradwire.errors import PlanError, StepStateError
from gradwire.integrations.island_calls import GroupLink
from gradwire.integrations.outer_steps import check_rounds
from gradwire.integrations.shards import check_meshes, reshard
from gradwire.transport import agree

__all__ = ["check_alike", "check_alone", "listed"]


def listed(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizer, or several, as a list. Raises PlanError for what has no step hooks, by which steps are counted."""
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    wrong = [type(each).__name__ for each in optimizers if not hasattr(each, "_optimizer_step_post_hooks")]
    if wrong or not optimizers:
        raise PlanError(
            f"optimizer is {', '.join(wrong) or 'an empty list'}: islands count steps by the step hooks of torch's optimizers. "
            "Pass the torch.optim.Optimizer itself, not what is wrapped around it, or a list of several."
        )
    return optimizers


def check_alone(model: torch.nn.Module, mesh: DeviceMesh, plan: Any) -> None:
    """Raises PlanError for another schedule, and for a model of which only a part is sharded, or with shards on other ranks than
    those of an island; StepStateError for a model that trains on islands already. Sends nothing."""
    schedule: Any = getattr(plan, "schedule", None)
    if schedule is None or schedule.word != "local":
        raise PlanError(f"plan is {show(plan)}: islands train apart, so pass a policy with schedule=gw.LocalSteps(...).")
    check_rounds(schedule)
    reshard(model)
    if any(map(REGISTRY.owns, model.parameters())):
        raise StepStateError(
            "the model trains on islands already, in an elastic job or with a handle: its weights would be averaged twice. Keep "
            "what the first call returned; or call its detach(), or leave() of the job, before."
        )
    check_meshes(model, mesh.get_group(1), f'mesh["{(mesh.mesh_dim_names or ("between", "inside"))[1]}"]')
    trained = {name: isinstance(each, DTensor) for name, each in model.named_parameters() if each.requires_grad}
    if len({*trained.values()}) > 1:
        whole = next(name for name, is_sharded in trained.items() if not is_sharded)
        raise PlanError(f"{whole!r} is no shard, and other parameters are. Call fully_shard on the whole model.")


def check_alike(group: dist.ProcessGroup, model: torch.nn.Module) -> None:
    """Raises DisagreementError on all ranks of a group where their models have other parameters or buffers. Collective. Shards
    count with the shape of the whole, so that all ranks of an island find the same."""
    of_parameters = [(name, each, "trains" if each.requires_grad else "frozen") for name, each in model.named_parameters()]
    tensors = [*of_parameters, *((name, each, "buffer") for name, each in model.named_buffers())]
    facts = {"tensors of the model": [[name, [*each.shape], str(each.dtype), kind] for name, each, kind in tensors]}
    agree(GroupLink(group, tensors[0][1].device), facts, tuple(dist.get_process_group_ranks(group)))
