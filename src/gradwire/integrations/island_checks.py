"""The checks before islands train: of each rank alone, and of all ranks together."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gradwire.core import show
from gradwire.engine import REGISTRY, check_memory
from gradwire.errors import DisagreementError, PlanError, StepStateError
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
    """Raises PlanError for another schedule, and for a model that trains nothing, has tensors without memory, or is sharded in
    part or on other ranks than those of an island; StepStateError for one that trains on islands already. Sends nothing."""
    schedule: Any = getattr(plan, "schedule", None)
    if schedule is None or schedule.word != "local":
        raise PlanError(f"plan is {show(plan)}: islands train apart, so pass a policy with schedule=gw.LocalSteps(...).")
    check_rounds(schedule)
    check_memory(model)
    reshard(model)
    if any(map(REGISTRY.owns, model.parameters())):
        raise StepStateError(
            "the model trains on islands already, in an elastic job or with a handle: its weights would be averaged twice. Keep "
            "what the first call returned; or call its detach(), or leave() of the job, before."
        )
    check_meshes(model, mesh.get_group(1), f'mesh["{(mesh.mesh_dim_names or ("between", "inside"))[1]}"]')
    trained = {name: isinstance(each, DTensor) for name, each in model.named_parameters() if each.requires_grad}
    if not trained:
        raise PlanError("no parameter of the model is trainable, so islands have nothing to average.")
    if len({*trained.values()}) > 1:
        whole = next(name for name, is_sharded in trained.items() if not is_sharded)
        raise PlanError(f"{whole!r} is no shard, and other parameters are. Call fully_shard on the whole model.")


def check_alike(model: torch.nn.Module, mesh: DeviceMesh, problem: Exception | None) -> None:
    """Raise the problem of this rank, if it has one, and on all other ranks DisagreementError with its words. Raises
    DisagreementError on all ranks where islands have models with other parameters or buffers. Collective."""
    device = next((each.device for each in model.parameters() if not each.is_meta), torch.device(mesh.device_type))
    compared: dict[int, dict[str, Any]] = {1: {}, 0: _tensors_of(model) if problem is None else {}}
    for dimension, facts in compared.items():  # the ranks of an island, then those at the same place of all islands
        group = mesh.get_group(dimension)
        own = facts if problem is None else {"error": f"{type(problem).__name__}: {problem}"}
        try:
            agree(GroupLink(group, device), own, tuple(dist.get_process_group_ranks(group)))
        except DisagreementError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def _tensors_of(model: torch.nn.Module) -> dict[str, Any]:
    """The facts that islands compare. Shards count with the shape of the whole: all ranks of an island find the same."""
    of_parameters = [(name, each, "trains" if each.requires_grad else "frozen") for name, each in model.named_parameters()]
    tensors = [*of_parameters, *((name, each, "buffer") for name, each in model.named_buffers())]
    return {"tensors of the model": [[name, [*each.shape], str(each.dtype), kind] for name, each, kind in tensors]}
