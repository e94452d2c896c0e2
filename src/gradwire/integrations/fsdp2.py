"""gradwire in FSDP2: compressed collectives of `fully_shard`, and compressed exchanges between the replicas of HSDP.

FSDP2 reduces and gathers a module as one flat tensor. So specs are for whole modules, and quantisers' blocks cross parameters.
"""

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.nn import Module

from gradwire.auto import say
from gradwire.core import Spec
from gradwire.errors import PlanError
from gradwire.integrations.fsdp2_comms import ModuleAllGather, ModuleReduceScatter, rounds_parameters
from gradwire.integrations.fsdp2_exchanges import ModuleExchanges
from gradwire.integrations.shards import reshard
from gradwire.plan import Policy
from gradwire.renames import has_renamed_keywords
from gradwire.transport import TlsOption

__all__ = ["ModuleExchanges", "compress", "replicate", "saved_states"]


@has_renamed_keywords
def compress(
    model: Module,
    plan: Spec | Policy | str = "auto",
    parameters: Spec | None = None,
    accuracy: str | float = "safe",
    tls: TlsOption = None,
    process_group: ProcessGroup | None = None,
) -> "ModuleExchanges":
    """Let gradwire do the reduce-scatters of all modules that `fully_shard` was called on. Call it on all ranks before a forward.

    plan: "auto" measures links and compressors in the first backward, and chooses a compressor for each module; `accuracy` is as
    in `gw.parallelize`. Or a spec with the scheme "alltoall", such as `gw.QSGD(bits=4)`; or a `gw.Policy` of such specs, whose
    rules match names and sizes of modules. On the CPU the exchange of one module runs while backward computes the gradients of
    the next one, unless FSDP2 reads the result at once (docs/integrations/fsdp2.md). Accumulation with
    `set_requires_gradient_sync(False)` sends nothing.
    parameters: `gw.Cast()`, `gw.QSGD(bits=8)` or another rounding, for the all-gathers of parameters. Forward and backward then
    run with rounded weights, the same on all ranks; the optimizer keeps the exact ones. None: FSDP2 gathers parameters exactly.
    tls: whether gradwire's connections are encrypted, as in `gw.parallelize`. What FSDP2 gathers itself stays as it is.
    process_group: for gradwire alone, with the ranks of the mesh, such as one of gloo (docs/reference/gpu.md).
    Returns the exchanges, which hold residuals and statistics; a later call replaces them. `exchanges.describe()` says in a line
    what is compressed, and the line is logged.

    Raises PlanError for a model without such modules, and for a spec that has no scheme "alltoall" or changes from step to step.
    Backward raises DisagreementError on all ranks if ranks differ, CommunicationError if a rank died or stalled, and
    StepStateError on all ranks where a GradScaler scaled the loss and a spec has a magnitude of its own.

    Example::

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        gradwire.integrations.fsdp2.compress(model)"""
    exchanges = ModuleExchanges(model, plan, "alltoall", parameters, accuracy, tls, process_group)
    for name, module in exchanges.modules.items():
        module.set_custom_reduce_scatter(ModuleReduceScatter(exchanges.exchange_of, name, exchanges.run))
        if parameters is not None:
            module.set_custom_all_gather(ModuleAllGather(exchanges.exchange_of, name))
        elif rounds_parameters(module):
            module.set_custom_all_gather(DefaultAllGather())  # an earlier call rounded parameters
    _begin(model, exchanges, plan)
    return exchanges


@has_renamed_keywords
def replicate(
    model: Module,
    group: ProcessGroup,
    plan: Spec | Policy | str = "auto",
    accuracy: str | float = "safe",
    tls: TlsOption = None,
) -> "ModuleExchanges":
    """Average gradients between the replicas of HSDP with compressed exchanges. Call `fully_shard` with a 1-D mesh inside a node.

    group: the ranks that hold the same shards on all nodes. All get the parameters of the group's first rank. plan, accuracy
    and tls: as for `compress`, with specs of any scheme. Returns and raises as `compress` does.

    Example, for 2 nodes with 2 ranks each::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
        fully_shard(model, mesh=mesh["inside"])
        gradwire.integrations.fsdp2.replicate(model, mesh["between"].get_group())
    """
    exchanges = ModuleExchanges(model, plan, None, None, accuracy, tls)
    reshard(model)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            shard = tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor
            dist.broadcast(shard, dist.get_global_rank(group, 0), group=group)
    for name, module in exchanges.modules.items():
        module.set_all_reduce_hook(partial(exchanges.average, name, group))
    _begin(model, exchanges, plan)
    return exchanges


def saved_states(checkpoint_id: str | os.PathLike[str], key: str = "gradwire") -> dict[str, bytes]:
    """Read the states of all ranks that saved exchanges with `dcp.save({key: exchanges}, checkpoint_id=...)`.

    For `exchanges.load_state_dict` with another number of ranks. Collective. Raises ValueError if the checkpoint has none.
    """
    names = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    states: dict[str, Any] = {name.removeprefix(f"{key}."): b"" for name in names if name.startswith(f"{key}.rank")}
    if not states:
        raise ValueError(f"{checkpoint_id} has no states under {key!r}: save them with dcp.save({{{key!r}: exchanges}}).")
    load({key: states}, checkpoint_id=checkpoint_id)
    return states


def _begin(model: Module, exchanges: ModuleExchanges, plan: Spec | Policy | str) -> None:
    """Refuse compiled autograd from now on, and log what is compressed; auto logs it when it has chosen."""
    if _refuse_compiled_autograd not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_compiled_autograd)
    if plan != "auto" and dist.get_rank() == 0:
        say(exchanges.describe())


@_disable_dynamo
def _refuse_compiled_autograd(model: Module, inputs: Any) -> None:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled and torch.is_grad_enabled():
        raise PlanError(
            "compiled autograd is on, and FSDP2 reduces no gradients under it: each rank would keep its own. Turn it off; "
            "compile the model or its blocks with torch.compile instead."
        )
