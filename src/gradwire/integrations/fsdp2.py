"""gradwire in FSDP2: compressed reduce-scatters of `fully_shard`, and compressed exchanges between the replicas of HSDP.

FSDP2 reduces the gradients of a module as one flat tensor, without the boundaries of parameters. So a spec is for whole modules,
no policy can tell parameters apart, and blocks of a quantiser cross them. Parameters are gathered as before, uncompressed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from gradwire._version import __version__
from gradwire.core.specs import Spec
from gradwire.core.tensors import TensorInfo
from gradwire.errors import PlanError
from gradwire.exchange import Exchange, Lanes
from gradwire.exchange.plans import info_of
from gradwire.planner.policy import Policy

__all__ = ["ModuleExchanges", "compress", "replicate"]

_WHOLE = 2**62
_LAST_STEP = 2**61


def compress(model: torch.nn.Module, spec: Spec) -> "ModuleExchanges":
    """Let gradwire do the reduce-scatters of all modules that `fully_shard` was called on. Call it on every rank, before the
    first backward.

    spec: with the scheme "alltoall", such as `gw.QSGD(bits=4)`. Backward waits for each reduce-scatter on the CPU. Accumulation
    with `set_requires_gradient_sync(False)` sends nothing, as before. Returns what holds the residuals.

    Raises PlanError for a model without such modules, and for a spec that cannot travel so or changes from step to step. Backward
    raises DisagreementError on all ranks if ranks differ, CommunicationError where a rank died or stalled.

    Example::

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        gradwire.integrations.fsdp2.compress(model, gw.QSGD(bits=4))
    """
    exchanges = ModuleExchanges(model, spec, "alltoall")
    for name, module in exchanges.modules.items():
        module.set_custom_reduce_scatter(_ReduceScatter(exchanges, name))
    return exchanges


def replicate(model: torch.nn.Module, group: dist.ProcessGroup, spec: Spec) -> "ModuleExchanges":
    """HSDP with compressed exchanges between replicas: `fully_shard` with a 1-D mesh inside a node, and `group` of the ranks that
    hold the same shards on all nodes. All of them get the parameters of the group's first rank.

    Calls and errors are those of `compress`; specs may have any scheme.

    Example, for 2 nodes with 2 ranks each::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
        fully_shard(model, mesh=mesh["inside"])
        gradwire.integrations.fsdp2.replicate(model, mesh["between"].get_group(), gw.QSGD(bits=4))
    """
    exchanges = ModuleExchanges(model, spec, None)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(_local(tensor), dist.get_global_rank(group, 0), group=group)
    for name, module in exchanges.modules.items():
        module.set_all_reduce_hook(_between_replicas(exchanges, name, group))
    return exchanges


class ModuleExchanges:
    """The exchanges of one model's modules, and what their compressors remember. They share lanes and run one after another."""

    def __init__(self, model: torch.nn.Module, spec: Spec, scheme: str | None) -> None:
        self.modules: dict[str, Any] = {n or "model": m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
        """Those that `fully_shard` was called on, by name."""
        if not self.modules:
            raise PlanError("fully_shard was called on no module of the model. Call it first, for DDP see gw.ddp_hook.")
        if not isinstance(spec, Spec) or spec.at_step(0) != spec.at_step(_LAST_STEP):
            raise PlanError(f"spec is {spec!r}. In FSDP2 it is one spec for all steps, such as gw.QSGD(bits=4).")
        self._policy = Policy(
            default=spec, exempt_vectors=False, scheme=scheme, bucket_bytes=_WHOLE, edge_bytes=_WHOLE, chunk_bytes=0
        )
        self._policy.plan([TensorInfo("model", (1,), "float32")])  # raises for a spec that the scheme cannot carry
        self._lanes: Lanes | None = None
        self._exchanges: dict[str, Exchange] = {}
        self._saved: dict[str, dict[str, torch.Tensor]] = {}

    def exchange_of(self, module: str, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> Exchange:
        """The exchange of a module; made when its first gradients come, which is at the same point on all ranks of the group."""
        if module not in self._exchanges:
            plan = self._policy.plan([info_of(*each) for each in tensors.items()], group.size())
            if self._lanes is None:
                self._lanes = Lanes(group)
                facts = {
                    "gradwire version": __version__,
                    "spec": repr(self._policy.default),
                    "modules": [*self.modules],
                }
                self._lanes.open(facts, next(iter(tensors.values())).device)
            made = self._exchanges[module] = Exchange.on(self._lanes, tensors, plan, 0)
            if (saved := self._saved.pop(module, None)) is not None:
                made.load_state_dict(saved)
        return self._exchanges[module]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's steps and residuals, keys `{module}/rank{r}/...`; copies. Between steps, and empty before the first. Save
        those of all ranks."""
        own = {name: exchange.state_dict() for name, exchange in self._exchanges.items()}
        return {
            f"{name}/{key}": value for name, state in {**self._saved, **own}.items() for key, value in state.items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up what `state_dict` returned on this rank, with the same ranks. Before the first backward. Raises PlanError after
        it, and ValueError for a module that the model does not have; backward raises ValueError for what else does not fit."""
        if self._exchanges:
            raise PlanError("load_state_dict() was called after a backward. Call it before the first one.")
        for key, value in state.items():
            module, _, rest = key.partition("/")
            if module not in self.modules:
                raise ValueError(f"the state has {key!r}, and fully_shard was called on {', '.join(self.modules)}.")
            self._saved.setdefault(module, {})[rest] = value

    def close(self) -> None:
        """End the threads. No backward may follow."""
        if self._lanes is not None:
            self._lanes.stop()


class _ReduceScatter:
    """What FSDP2 calls for the gradients of one module."""

    def __init__(self, exchanges: ModuleExchanges, module: str) -> None:
        self._exchanges, self._module = exchanges, module

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """The shards of all ranks are tensors of one bucket of their own, so the bucket is cut between them."""
        if not (op == dist.ReduceOp.AVG or op == dist.ReduceOp.SUM):
            raise PlanError(f"FSDP asks for {op}: gradwire gives means and sums. Leave set_gradient_divide_factor out.")
        shards = {f"{self._module}/{at}": each for at, each in enumerate(input_tensor.chunk(group.size()))}
        exchange = self._exchanges.exchange_of(self._module, shards, group)
        exchange.begin("reduce")
        for name, shard in shards.items():
            exchange.ready(name, shard)
        exchange.wait()
        output_tensor.copy_(shards[f"{self._module}/{group.rank()}"])
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())


def _between_replicas(
    exchanges: ModuleExchanges, module: str, group: dist.ProcessGroup
) -> Callable[[torch.Tensor], None]:
    def average(shard: torch.Tensor) -> None:
        exchanges.exchange_of(module, {module: shard}, group).average_({module: shard})

    return average


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard."""
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor
