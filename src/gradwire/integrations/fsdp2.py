"""gradwire in FSDP2: compressed collectives of `fully_shard`, and compressed exchanges between the replicas of HSDP.

FSDP2 reduces and gathers a module as one flat tensor. So specs are for whole modules, and quantisers' blocks cross parameters.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.nn import Module

from gradwire._version import __version__
from gradwire.core import FP8, QSGD, Cast, Identity, Int8, Spec, TensorInfo
from gradwire.errors import PlanError
from gradwire.exchange import Exchange, ExchangeStats, info_of
from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.packs import ModulePacks, pack_of, packed_embeddings
from gradwire.plan import Policy
from gradwire.transport import Lanes

__all__ = ["ModuleExchanges", "compress", "replicate"]

_ALL, _LAST_STEP = 2**62, 2**61
_GRADIENTS, _PARAMETERS, _RANKS = "gradients", "parameters", "ranks"
_ROUNDINGS = (Identity, Cast, FP8, Int8, QSGD)


def compress(model: Module, spec: Spec, parameters: Spec | None = None) -> "ModuleExchanges":
    """Let gradwire do the reduce-scatters of all modules that `fully_shard` was called on. Call it on all ranks before a forward.

    spec: with the scheme "alltoall", such as `gw.QSGD(bits=4)`. Backward waits for each reduce-scatter on the CPU. Accumulation
    with `set_requires_gradient_sync(False)` sends nothing.
    parameters: `gw.Cast()`, `gw.QSGD(bits=8)` or another rounding, for the all-gathers of parameters. Forward and backward then
    run with rounded weights, the same on all ranks; the optimizer keeps the exact ones. None: FSDP2 gathers parameters exactly.
    Returns the exchanges, which hold residuals and statistics; a later call replaces them.

    Raises PlanError for a model without such modules, and for a spec that has no scheme "alltoall" or changes from step to step.
    Backward raises DisagreementError on all ranks if ranks differ, CommunicationError if a rank died or stalled.

    Example::

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        gradwire.integrations.fsdp2.compress(model, gw.QSGD(bits=4))"""
    exchanges = ModuleExchanges(model, spec, "alltoall", parameters)
    for name, module in exchanges.modules.items():
        module.set_custom_reduce_scatter(_ModuleReduceScatter(exchanges, name))
        if parameters is not None:
            module.set_custom_all_gather(_ModuleAllGather(exchanges, name))
        elif isinstance(module._get_fsdp_state()._fsdp_param_group._all_gather_comm, _ModuleAllGather):
            module.set_custom_all_gather(DefaultAllGather())  # an earlier call rounded parameters
    return exchanges


def replicate(model: Module, group: ProcessGroup, spec: Spec) -> "ModuleExchanges":
    """Average gradients between the replicas of HSDP with compressed exchanges. Call `fully_shard` with a 1-D mesh inside a node.

    group: the ranks that hold the same shards on all nodes. All get the parameters of the group's first rank. spec: a spec with
    any scheme. Returns and raises as `compress` does.

    Example, for 2 nodes with 2 ranks each::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
        fully_shard(model, mesh=mesh["inside"])
        gradwire.integrations.fsdp2.replicate(model, mesh["between"].get_group(), gw.QSGD(bits=4))
    """
    exchanges = ModuleExchanges(model, spec, None)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            shard = tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor
            dist.broadcast(shard, dist.get_global_rank(group, 0), group=group)
    for name, module in exchanges.modules.items():
        module.set_all_reduce_hook(partial(exchanges._average, name, group))
    return exchanges


class ModuleExchanges:
    """The exchanges of one model's modules, and the state of their compressors. Exchanges share lanes and run one after
    another. A `Stateful` of torch.distributed.checkpoint: `dcp.save({"model": .., "gradwire": exchanges})`."""

    def __init__(self, model: Module, spec: Spec, scheme: str | None, parameters: Spec | None = None) -> None:
        self.modules: dict[str, Any] = {n or "model": m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
        """The modules that `fully_shard` was called on, by name."""
        if not self.modules:
            raise PlanError("fully_shard was called on no module of the model. Call it first, for DDP see gw.ddp_hook.")
        if not isinstance(spec, Spec) or spec.at_step(0) != spec.at_step(_LAST_STEP):
            raise PlanError(f"spec is {spec!r}. In FSDP2 it is one spec for all steps, such as gw.QSGD(bits=4).")
        if parameters is not None and not isinstance(parameters, _ROUNDINGS):
            raise PlanError(f"parameters is {parameters!r}: weights are rounded. Use gw.Cast() or gw.QSGD(bits=8).")
        self._policies = {_GRADIENTS: _policy(spec, scheme)}
        if parameters is not None:  # rounded to nearest: the weights of forward and backward are the same
            self._policies[_PARAMETERS] = _policy(parameters.under_feedback(), scheme)
        self._embeddings = packed_embeddings(self.modules, self._policies[_GRADIENTS])
        self._lanes: dict[tuple[int, ...], Lanes] = {}  # by the ranks of a group
        self._packs = {f"{what} of {module}": ModulePacks() for what in self._policies for module in self.modules}

    def exchange_of(self, module: str, tensors: Mapping[str, Tensor], group: ProcessGroup, what: str = _GRADIENTS) -> Exchange:
        """The exchange of a module's buffer. All ranks of the group ask for it at the same point, inside a call of FSDP2."""
        pack = pack_of(next(iter(tensors.values())), group)

        def make() -> Exchange:
            embedding = what == _GRADIENTS and module in self._embeddings
            plan = self._policies[what].plan([info_of(*each, embedding) for each in tensors.items()], group.size())
            if pack.ranks not in self._lanes:
                self._lanes[pack.ranks] = Lanes(group)
                specs = repr({name: repr(policy.default) for name, policy in self._policies.items()})
                facts: dict[str, Any] = {"gradwire version": __version__, "specs": specs, "modules": [*self.modules]}
                facts["steps of the state that was loaded"] = {name: packs.step for name, packs in self._packs.items()}
                self._lanes[pack.ranks].open(facts, next(iter(tensors.values())).device)
            return Exchange.on(self._lanes[pack.ranks], tensors, plan, 0)

        return self._packs[f"{what} of {module}"].exchange_of(pack, tensors, make)

    def _average(self, module: str, group: ProcessGroup, shard: Tensor) -> None:
        self.exchange_of(module, {module: shard}, group).average_({module: shard})

    def state_dict(self) -> dict[str, bytes]:
        """This rank's steps and residuals, `torch.save`d: key `rank{r}`. Between steps. Save those of all ranks."""
        own = {name: packs.state() for name, packs in self._packs.items()}
        return {f"rank{dist.get_rank()}": to_bytes(own | {_RANKS: dist.get_world_size()})}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load what `state_dict` returned on this rank, with the same ranks. Call it before the first forward. Raises PlanError
        later, and ValueError for the state of another rank or model; backward raises ValueError for any other misfit."""
        if self._lanes:
            raise PlanError("load_state_dict() was called after a step. Call it before the first one.")
        own = f"rank{dist.get_rank()}"
        if own not in state:
            raise ValueError(f"the state has no {own}, only {', '.join(state) or 'nothing'}: other ranks saved it.")
        saved = from_bytes(state[own])
        if (ranks := saved.pop(_RANKS, None)) not in (None, dist.get_world_size()):
            raise ValueError(f"{ranks} ranks saved the state, and these are {dist.get_world_size()}. Leave it out.")
        if unknown := sorted(saved.keys() - self._packs.keys()):
            raise ValueError(f"the state has {unknown[0]!r}, and the model {', '.join(sorted(self._packs))}.")
        for name, packs in saved.items():
            self._packs[name].load(packs)

    def stats(self) -> dict[str, ExchangeStats]:
        """Statistics of this rank's exchanges, by `gradients of MODULE`, `parameters of MODULE`; of a second buffer `... (2)`."""
        found = [(name, at, each) for name, p in self._packs.items() for at, each in enumerate(p.exchanges.values(), 1)]
        return {name if at == 1 else f"{name} ({at})": exchange.stats() for name, at, exchange in found}

    def close(self) -> None:
        """End the threads. No backward may follow."""
        for lanes in self._lanes.values():
            lanes.stop()


class _ModuleComm:
    """A collective of FSDP2 for one module. The shards of all ranks are tensors of one bucket, cut at the shards' boundaries."""

    what = _GRADIENTS

    def __init__(self, exchanges: ModuleExchanges, module: str) -> None:
        self._exchanges, self._module = exchanges, module

    def allocate(self, size: Sequence[int], **options: Any) -> Tensor:
        return torch.empty(*size, **options)

    def run(self, flat: Tensor, group: ProcessGroup, phase: str) -> tuple[Tensor, ...]:
        """Run one phase in place. Returns the shards."""
        shards = flat.chunk(group.size())
        named = {f"{self._module}/{at}": each for at, each in enumerate(shards)}
        exchange = self._exchanges.exchange_of(self._module, named, group, self.what)
        exchange.begin(phase)
        for name, shard in named.items():
            exchange.ready(name, shard)
        exchange.wait()
        return shards


class _ModuleReduceScatter(_ModuleComm):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, **_: Any) -> None:
        if not (op == dist.ReduceOp.AVG or op == dist.ReduceOp.SUM):
            raise PlanError(f"FSDP asks for {op}: gradwire gives means and sums. Leave set_gradient_divide_factor out.")
        output_tensor.copy_(self.run(input_tensor, group, "reduce")[group.rank()])
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())


class _ModuleAllGather(_ModuleComm):
    what = _PARAMETERS

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **_: Any) -> None:
        """`input_tensor` is this rank's part of `output_tensor`."""
        self.run(output_tensor, group, "gather")


def _policy(spec: Spec, scheme: str | None) -> Policy:
    made = Policy(default=spec, exempt_vectors=False, scheme=scheme, bucket_bytes=_ALL, edge_bytes=_ALL, chunk_bytes=0)
    made.plan([TensorInfo("model", (1,), "float32")])  # raises for a spec that the scheme cannot carry
    return made
