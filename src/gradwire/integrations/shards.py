"""The parts of a model that ranks of `fully_shard` hold."""

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gradwire.errors import PlanError

__all__ = ["check_meshes", "reshard", "resharder", "shard_of"]


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, in the tensor's memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def check_meshes(model: torch.nn.Module, island: dist.ProcessGroup, mesh: str) -> None:
    """Raises PlanError unless the ranks of this rank's island, and no others, have the shards of each parameter. Sends nothing.

    mesh: how a script writes the right mesh."""
    ranks = sorted(dist.get_process_group_ranks(island))
    for name, each in model.named_parameters():
        if isinstance(each, DTensor) and (found := sorted(each.device_mesh.mesh.flatten().tolist())) != ranks:
            raise PlanError(
                f"the shards of {name!r} are on ranks {found}, and this rank's island is {ranks}: islands would average other "
                f"parts of the model with each other. Call fully_shard(model, mesh={mesh})."
            )


def reshard(model: torch.nn.Module | None) -> None:
    """Let the parameters of FSDP2 be shards. After a forward without a backward the outermost module still has whole ones: its
    next forward would use these, whatever was written into the shards. In a backward it does nothing."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # else nobody called fully_shard
    if model is None or fsdp is None or torch._C._current_graph_task_id() != -1:
        return
    for each in model.modules():
        if isinstance(each, fsdp.FSDPModule):
            each.reshard()


def resharder(model: torch.nn.Module) -> Callable[[], None]:
    """`reshard` of a model, which it does not keep alive."""
    reference = weakref.ref(model)
    return lambda: reshard(reference())
