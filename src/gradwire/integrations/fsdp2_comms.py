"""The collectives that FSDP2 calls for a module, in gradwire's exchanges.

FSDP2 uses a reduced buffer when the call returns: on CPUs backward waits. But where nothing reads the buffer before backward
ends, the exchange of one module may run while backward computes the gradients of the next one: see `Turns`.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed import ProcessGroup

from gradwire.errors import PlanError
from gradwire.exchange import Exchange
from gradwire.integrations.pack_content import only_viewed

__all__ = ["GRADIENTS", "PARAMETERS", "ModuleAllGather", "ModuleReduceScatter", "Turns", "rounds_parameters"]
GRADIENTS, PARAMETERS = "gradients", "parameters"


class Turns:
    """The exchanges of a model, one after another. The last one may still run when backward goes on.

    ended: called when a backward has ended, with the seconds that it waited for exchanges.
    """

    def __init__(self, ended: Callable[[float], None]) -> None:
        self._ended = ended
        self._running: Callable[[], None] | None = None
        self._backward = -1
        """The graph task of the last backward with an exchange."""
        self._waited_s = 0.0

    def settle(self) -> None:
        """Wait for the exchange that runs, if there is one."""
        if self._running is not None:
            began_s, (end, self._running) = time.perf_counter(), (self._running, None)
            end()
            self._waited_s += time.perf_counter() - began_s

    def run(self, begin: Callable[[], None], end: Callable[[], None], defer: bool) -> None:
        """Begin an exchange, and end it: at once, or with `defer` before the next one begins or backward returns."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            self._backward = task
            Variable._execution_engine.queue_callback(self._end_backward)
        self.settle()
        begin()
        self._running = end
        if not defer or task == -1:
            self.settle()

    def _end_backward(self) -> None:
        self.settle()
        waited_s, self._waited_s = self._waited_s, 0.0
        self._ended(waited_s)


class ModuleComm:
    """A collective of FSDP2 for one module. The shards of all ranks are tensors of one bucket, cut at the shards' boundaries."""

    def __init__(self, exchange_of: Callable[..., Exchange], module: str) -> None:
        self._exchange_of, self._module = exchange_of, module

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        return torch.empty(*size, **options)

    def named(self, flat: Tensor, group: ProcessGroup) -> dict[str, Tensor]:
        """The shards of all ranks, by the names of the exchange's tensors."""
        return {f"{self._module}/{at}": each for at, each in enumerate(flat.chunk(group.size()))}


class ModuleReduceScatter(ModuleComm):
    """The mean or the sum of gradients: each rank gets its shard."""

    def __init__(self, exchange_of: Callable[..., Exchange], module: str, run: Callable[..., None]) -> None:
        """run: runs an exchange of the module's gradients (`ModuleExchanges.run`)."""
        super().__init__(exchange_of, module)
        self._run = run

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, **_: Any) -> None:
        if not (op == dist.ReduceOp.AVG or op == dist.ReduceOp.SUM):
            raise PlanError(f"FSDP asks for {op}: gradwire gives means and sums. Leave set_gradient_divide_factor out.")
        shards = self.named(input_tensor, group)

        def end() -> None:
            output_tensor.copy_(shards[f"{self._module}/{group.rank()}"])
            if op == dist.ReduceOp.SUM:
                output_tensor.mul_(group.size())

        self._run(self._module, shards, group, "reduce", end, only_viewed())


class ModuleAllGather(ModuleComm):
    """The parameters of a module, rounded: each rank gets all shards."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **_: Any) -> None:
        """`input_tensor` is this rank's part of `output_tensor`."""
        shards = self.named(output_tensor, group)
        exchange = self._exchange_of(self._module, shards, group, PARAMETERS)
        exchange.begin("gather")
        for name, shard in shards.items():
            exchange.ready(name, shard)
        exchange.wait()


def rounds_parameters(module: Any) -> bool:
    """Whether FSDP2 gathers the parameters of a module by a `ModuleAllGather`. A module without parameters of its own gathers
    none."""
    group = module._get_fsdp_state()._fsdp_param_group
    return group is not None and isinstance(group._all_gather_comm, ModuleAllGather)
