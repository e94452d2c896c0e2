"""The parameters in the buffers that FSDP2 reduces and gathers."""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from gradwire.errors import PlanError
from gradwire.exchange import looks_up_rows

__all__ = ["Pack", "only_viewed", "pack_of", "packed_embeddings", "shard_number"]

_PACKERS = ("foreach_reduce", "foreach_all_gather")


class Pack(NamedTuple):
    """The content of a buffer: shards of parameters, one after another, the same for each rank."""

    names: tuple[str, ...]
    numels: tuple[int, ...]
    """Elements of one rank's shard of each parameter, with FSDP2's padding."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    dtype: str

    def overlaps(self, other: "Pack") -> bool:
        """Whether the two have a parameter in common, and the same ranks."""
        return self.ranks == other.ranks and not set(self.names).isdisjoint(other.names)


def pack_of(shard: Tensor, group: ProcessGroup) -> Pack:
    """The content of the buffer for which FSDP2 makes the present call. `shard`: one rank's part of the buffer.

    FSDP2 passes a buffer without names. The function of FSDP2 that fills the buffer has the list of parameters.
    """
    frame = _packer(sys._getframe(1)) or sys._getframe(1)
    parameters: list[Any] = frame.f_locals.get("fsdp_params", [])
    numels = tuple(each.padded_sharded_param_size.numel() for each in parameters)
    if frame.f_code.co_name == "foreach_reduce" and sum(numels) != shard.numel():
        raise PlanError(
            f"FSDP2 reduces {shard.numel()} elements of each rank, and gradwire found parameters with {sum(numels)}. Residuals "
            f"would be added to other parameters. This gradwire does not know the FSDP2 of torch {torch.__version__}: update it."
        )
    names = tuple(each._param_fqn or each._module_info.param_name for each in parameters)
    return Pack(names, numels, tuple(get_process_group_ranks(group)), str(shard.dtype).removeprefix("torch."))


def only_viewed(in_hook: bool = False) -> bool:
    """Whether FSDP2 only makes views of the buffer that it asks to reduce now, and reads it when backward is over: no other
    dtype, no factor, no all-reduce of its own, no all-reduce hook, no gradient to add to, no hook of the script on a gradient,
    no copy elsewhere. in_hook: the all-reduce hook itself asks, so none is left."""
    found = _packer(sys._getframe(1))
    local = found.f_locals if found is not None and found.f_code.co_name == "foreach_reduce" else {}
    parameters = local.get("fsdp_params", ())
    needed = {"orig_dtype", "reduce_dtype", "postdivide_factor", "all_reduce_group", "all_reduce_hook", "fsdp_params"}
    return (
        needed <= local.keys()
        and local["orig_dtype"] in (None, local["reduce_dtype"])
        and local["postdivide_factor"] in (None, 1)
        and local["all_reduce_group"] is None
        and (in_hook or local["all_reduce_hook"] is None)
        and not any(each.offload_to_cpu or each.sharded_param.grad is not None for each in parameters)
        and not any(getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) for each in parameters)
    )


def _packer(frame: FrameType) -> FrameType | None:
    """The function of FSDP2 that fills the buffer, outwards from a frame."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_name not in _PACKERS:
        found = found.f_back
    return found


def shard_number(module: Any) -> int:
    """The number of this rank's shard of a module's parameters."""
    return int(module._get_fsdp_state()._fsdp_param_group.mesh_info.shard_mesh_rank)


def packed_embeddings(modules: Mapping[str, Any]) -> set[str]:
    """The names of the modules, among those that `fully_shard` was called on, whose buffers hold an embedding."""
    groups = {name: module._get_fsdp_state()._fsdp_param_group for name, module in modules.items()}
    packed = {name: [each._module_info.module for each in group.fsdp_params] for name, group in groups.items() if group}
    return {name for name, owners in packed.items() if any(map(looks_up_rows, owners))}
