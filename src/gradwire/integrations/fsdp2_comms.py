"""The collectives that FSDP2 calls for a module, in gradwire's exchanges."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from gradwire.errors import PlanError
from gradwire.exchange import Exchange

__all__ = ["GRADIENTS", "PARAMETERS", "ModuleAllGather", "ModuleReduceScatter"]
GRADIENTS, PARAMETERS = "gradients", "parameters"


class ModuleComm:
    """A collective of FSDP2 for one module. The shards of all ranks are tensors of one bucket, cut at the shards' boundaries."""

    what = GRADIENTS

    def __init__(self, exchange_of: Callable[..., Exchange], module: str) -> None:
        self._exchange_of, self._module = exchange_of, module

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        return torch.empty(*size, **options)

    def run(self, flat: Tensor, group: ProcessGroup, phase: str) -> tuple[Tensor, ...]:
        """Run one phase in place. Returns the shards."""
        shards = flat.chunk(group.size())
        named = {f"{self._module}/{at}": each for at, each in enumerate(shards)}
        exchange = self._exchange_of(self._module, named, group, self.what)
        exchange.begin(phase)
        for name, shard in named.items():
            exchange.ready(name, shard)
        exchange.wait()
        return shards


class ModuleReduceScatter(ModuleComm):
    """The mean or the sum of gradients: each rank gets its shard."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, **_: Any) -> None:
        if not (op == dist.ReduceOp.AVG or op == dist.ReduceOp.SUM):
            raise PlanError(f"FSDP asks for {op}: gradwire gives means and sums. Leave set_gradient_divide_factor out.")
        output_tensor.copy_(self.run(input_tensor, group, "reduce")[group.rank()])
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())


class ModuleAllGather(ModuleComm):
    """The parameters of a module, rounded: each rank gets all shards."""

    what = PARAMETERS

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **_: Any) -> None:
        """`input_tensor` is this rank's part of `output_tensor`."""
        self.run(output_tensor, group, "gather")
