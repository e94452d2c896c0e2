"""gradwire in FSDP2: compressed collectives of `fully_shard`, and compressed exchanges between the replicas of HSDP.

FSDP2 reduces and gathers a module as one flat tensor. So specs are for whole modules, and quantisers' blocks cross parameters.
"""

from collections.abc import Mapping
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
from gradwire.auto import ChosenSpecs
from gradwire.core import FP8, QSGD, Cast, Identity, Int8, Spec
from gradwire.errors import PlanError
from gradwire.exchange import Exchange, ExchangeStats, info_of
from gradwire.integrations.fsdp2_comms import GRADIENTS, PARAMETERS, ModuleAllGather, ModuleReduceScatter
from gradwire.integrations.fsdp2_plans import ModuleSpecs, policy_for
from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.packs import ModulePacks, pack_of
from gradwire.plan import Policy
from gradwire.transport import Lanes, TlsOption

__all__ = ["ModuleExchanges", "compress", "replicate"]

_RANKS, _SPECS = "ranks", "specs"
_ROUNDINGS = (Identity, Cast, FP8, Int8, QSGD)


def compress(
    model: Module,
    plan: Spec | Policy | str = "auto",
    parameters: Spec | None = None,
    accuracy: str = "safe",
    tls: TlsOption = None,
) -> "ModuleExchanges":
    """Let gradwire do the reduce-scatters of all modules that `fully_shard` was called on. Call it on all ranks before a forward.

    plan: "auto" measures links and compressors in the first backward, and chooses a compressor for each module; `accuracy` is as
    in `gw.parallelize`. Or a spec with the scheme "alltoall", such as `gw.QSGD(bits=4)`; or a `gw.Policy` of such specs, whose
    rules match names and sizes of modules. Backward waits for each reduce-scatter on the CPU. Accumulation with
    `set_requires_gradient_sync(False)` sends nothing.
    parameters: `gw.Cast()`, `gw.QSGD(bits=8)` or another rounding, for the all-gathers of parameters. Forward and backward then
    run with rounded weights, the same on all ranks; the optimizer keeps the exact ones. None: FSDP2 gathers parameters exactly.
    tls: whether gradwire's connections are encrypted, as in `gw.parallelize`. What FSDP2 gathers itself stays as it is.
    Returns the exchanges, which hold residuals and statistics; a later call replaces them.

    Raises PlanError for a model without such modules, and for a spec that has no scheme "alltoall" or changes from step to step.
    Backward raises DisagreementError on all ranks if ranks differ, CommunicationError if a rank died or stalled.

    Example::

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        gradwire.integrations.fsdp2.compress(model)"""
    exchanges = ModuleExchanges(model, plan, "alltoall", parameters, accuracy, tls)
    for name, module in exchanges.modules.items():
        module.set_custom_reduce_scatter(ModuleReduceScatter(exchanges.exchange_of, name))
        if parameters is not None:
            module.set_custom_all_gather(ModuleAllGather(exchanges.exchange_of, name))
        elif isinstance(module._get_fsdp_state()._fsdp_param_group._all_gather_comm, ModuleAllGather):
            module.set_custom_all_gather(DefaultAllGather())  # an earlier call rounded parameters
    return exchanges


def replicate(
    model: Module,
    group: ProcessGroup,
    plan: Spec | Policy | str = "auto",
    accuracy: str = "safe",
    tls: TlsOption = None,
) -> "ModuleExchanges":
    """Average gradients between the replicas of HSDP with compressed exchanges. Call `fully_shard` with a 1-D mesh inside a node.

    group: the ranks that hold the same shards on all nodes. All get the parameters of the group's first rank. plan, accuracy and
    tls: as for `compress`, with specs of any scheme. Returns and raises as `compress` does.

    Example, for 2 nodes with 2 ranks each::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
        fully_shard(model, mesh=mesh["inside"])
        gradwire.integrations.fsdp2.replicate(model, mesh["between"].get_group())
    """
    exchanges = ModuleExchanges(model, plan, None, None, accuracy, tls)
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

    def __init__(
        self,
        model: Module,
        plan: Spec | Policy | str,
        scheme: str | None,
        parameters: Spec | None,
        accuracy: str,
        tls: TlsOption = None,
    ) -> None:
        self.modules: dict[str, Any] = {n or "model": m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
        """The modules that `fully_shard` was called on, by name."""
        if not self.modules:
            raise PlanError("fully_shard was called on no module of the model. Call it first, for DDP see gw.ddp_hook.")
        if parameters is not None and not isinstance(parameters, _ROUNDINGS):
            raise PlanError(f"parameters is {parameters!r}: weights are rounded. Use gw.Cast() or gw.QSGD(bits=8).")
        self._specs = ModuleSpecs(self.modules, plan, scheme, accuracy)
        # rounded to nearest: the weights of forward and backward are the same
        self._rounded = None if parameters is None else policy_for(parameters.under_feedback(), scheme)
        self._tls = tls
        self._lanes: dict[tuple[int, ...], Lanes] = {}  # by the ranks of a group
        self._packs = {f"{what} of {module}": ModulePacks() for what in self._what() for module in self.modules}

    def _what(self) -> list[str]:
        return [GRADIENTS, *([] if self._rounded is None else [PARAMETERS])]

    @property
    def decision(self) -> ChosenSpecs | None:
        """The choice of auto, with its predictions; its str() is one line of text. None before the first backward, after a state
        was loaded, and for a plan that the script chose."""
        return self._specs.chosen

    def exchange_of(self, module: str, tensors: Mapping[str, Tensor], group: ProcessGroup, what: str = GRADIENTS) -> Exchange:
        """The exchange of a module's buffer. All ranks of the group ask for it at the same point, inside a call of FSDP2."""
        pack = pack_of(next(iter(tensors.values())), group)

        def make() -> Exchange:
            first = next(iter(tensors.values()))
            if (lanes := self._lanes.get(pack.ranks)) is None:
                lanes = self._lanes[pack.ranks] = Lanes(group, tls=self._tls)
                specs = f"{self._specs!r} {self._rounded!r} {self._specs.state()}"
                facts: dict[str, Any] = {"gradwire version": __version__, "specs": specs, "modules": [*self.modules]}
                facts["steps of the state that was loaded"] = {name: packs.step for name, packs in self._packs.items()}
                lanes.open(facts, first.device)
            policy = self._specs.policy_of(module, first, lanes) if what == GRADIENTS else self._rounded
            assert policy is not None
            return Exchange.on(lanes, tensors, policy.plan([info_of(*each) for each in tensors.items()], group.size()), 0)

        return self._packs[f"{what} of {module}"].exchange_of(pack, tensors, make)

    def _average(self, module: str, group: ProcessGroup, shard: Tensor) -> None:
        self.exchange_of(module, {module: shard}, group).average_({module: shard})

    def state_dict(self) -> dict[str, bytes]:
        """This rank's steps and residuals, `torch.save`d: key `rank{r}`. Between steps. Save those of all ranks."""
        own = {name: packs.state() for name, packs in self._packs.items()}
        return {f"rank{dist.get_rank()}": to_bytes(own | {_RANKS: dist.get_world_size(), _SPECS: self._specs.state()})}

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
        self._specs.load(saved.pop(_SPECS, {}))
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
