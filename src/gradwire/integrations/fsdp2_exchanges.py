"""The exchanges of the modules of one model under FSDP2 or HSDP."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from gradwire._version import __version__
from gradwire.auto import ChosenSpecs
from gradwire.core import FP8, QSGD, Cast, Identity, Int8, Spec
from gradwire.engine import LossScale
from gradwire.errors import PlanError
from gradwire.exchange import Exchange, ExchangeStats, info_of
from gradwire.integrations.fsdp2_comms import GRADIENTS, PARAMETERS, Turns
from gradwire.integrations.fsdp2_job import ModuleJob, of_one_phase
from gradwire.integrations.fsdp2_plans import ModuleSpecs, policy_for, sharded_modules
from gradwire.integrations.groups import group_for
from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.pack_content import only_viewed, pack_of, shard_number
from gradwire.integrations.packs import ModulePacks
from gradwire.plan import Policy
from gradwire.record import Decision
from gradwire.record.recording import Recording
from gradwire.transport import Lanes, TlsOption

__all__ = ["ModuleExchanges"]

_RANKS, _SPECS = "ranks", "specs"
_ROUNDINGS = (Identity, Cast, FP8, Int8, QSGD)


class ModuleExchanges:
    """The exchanges of one model's modules, and the state of their compressors. Exchanges share lanes and run one after
    another. A `Stateful` of torch.distributed.checkpoint: `dcp.save({"model": .., "gradwire": exchanges})`."""

    def __init__(
        self,
        model: Module,
        plan: Spec | Policy | str,
        scheme: str | None,
        parameters: Spec | None,
        accuracy: str | float,
        tls: TlsOption = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.modules = sharded_modules(model)
        """The modules that `fully_shard` was called on, by name; those of one list are one, by the names of all."""
        if not self.modules:
            raise PlanError("fully_shard was called on no module of the model. Call it first, for DDP see gw.ddp_hook.")
        if parameters is not None and not isinstance(parameters, _ROUNDINGS):
            raise PlanError(f"parameters is {parameters!r}: weights are rounded. Use gw.Cast() or gw.QSGD(bits=8).")
        self._specs = ModuleSpecs(self.modules, plan, scheme, accuracy)
        # rounded to nearest: the weights of forward and backward are the same
        self._rounded = None if parameters is None else policy_for(parameters.under_feedback(), scheme)
        self._tls, self._given_group = tls, process_group
        self._lanes: dict[tuple[int, ...], Lanes] = {}  # by the ranks of a group
        self._packs = {f"{what} of {module}": ModulePacks() for what in self._what() for module in self.modules}
        self._job = ModuleJob(model, self._specs, self._exchanges_of)
        self._turns, self._scale = Turns(self._job.ended), LossScale()

    def _what(self) -> list[str]:
        return [GRADIENTS, *([] if self._rounded is None else [PARAMETERS])]

    @property
    def decision(self) -> ChosenSpecs | None:
        """The choice of auto, with its predictions; its str() is one line of text. None before the first backward, after a state
        was loaded, and for a plan that the script chose."""
        return self._specs.chosen

    def describe(self) -> str:
        """One line: what is compressed, and with which compressor."""
        weights = "exact" if self._rounded is None else f"rounded by {self._rounded.default!r}"
        return f"{self._specs.describe()}; parameters are gathered {weights}."

    def record(self, folder: str | os.PathLike[str], error_steps: int = 20, decision: Decision | None = None) -> Recording:
        """Record a training loop for `gradwire report`, as `Handle.record` does, with a bucket for each module. Rank 0 writes."""
        return Recording(self._job, folder, error_steps, decision)

    def exchange_of(self, module: str, tensors: Mapping[str, Tensor], group: ProcessGroup, what: str = GRADIENTS) -> Exchange:
        """The exchange of a module's buffer. All ranks of the group ask for it at the same point, inside a call of FSDP2."""
        pack = pack_of(next(iter(tensors.values())), group)
        self._turns.settle()

        def make(step: int) -> Exchange:
            first = next(iter(tensors.values()))
            if (lanes := self._lanes.get(pack.ranks)) is None:
                lanes = self._lanes[pack.ranks] = Lanes(
                    group_for(self._given_group, group, "FSDP2"), tls=self._tls, device=first.device
                )
                specs = f"{self._specs!r} {self._rounded!r} {self._specs.state()}"
                facts: dict[str, Any] = {"gradwire version": __version__, "specs": specs, "modules": [*self.modules]}
                facts["steps of the state that was loaded"] = {name: packs.step for name, packs in self._packs.items()}
                lanes.open(facts, first.device)
            policy = self._specs.policy_of(module, first, lanes) if what == GRADIENTS else self._rounded
            assert policy is not None
            ranks, per_node = lanes.group.world_size, lanes.group.grid.ranks_per_node_if_even
            return Exchange.on(lanes, tensors, policy.plan([info_of(*each) for each in tensors.items()], ranks, per_node), step)

        place = None if self._job.one_phase else shard_number(self.modules[module])
        return self._packs[f"{what} of {module}"].exchange_of(pack, tensors, make, group, place)

    def run(
        self, module: str, tensors: Mapping[str, Tensor], group: ProcessGroup, phase: str, end: Callable[[], None], defer: bool
    ) -> None:
        """Run an exchange of a module's gradients, then `end`. defer: backward may go on meanwhile. On a GPU all of this is
        queued on the stream that is current now, FSDP2's own for reduce-scatters; the stream that is current at the end waits."""
        exchange = self.exchange_of(module, tensors, group)
        if (change := self._scale.change(self._specs.used)).is_any:
            for packs in self._packs.values():
                packs.follow(change.factor, change.left_out)
        streams = exchange.lanes.data[0].link.streams
        stream = streams.current()

        def begin() -> None:
            self._job.begins(module, [*tensors.values()], exchange)
            exchange.begin(phase)
            for name, tensor in tensors.items():
                streams.keep(tensor)  # FSDP2 frees it when the stream has done what was queued until the call returned
                exchange.ready(name, tensor)

        def finish() -> None:
            with stream:
                exchange.wait()
                end()
                done = streams.mark()
            streams.wait(done)
            self._job.exchanged(module, exchange)

        self._turns.run(begin, finish, defer)
        self._job.resumed(module)

    def average(self, module: str, group: ProcessGroup, shard: Tensor) -> None:
        """Average a shard of a module's gradients between the replicas of HSDP."""
        self.run(module, {module: shard}, group, "both", lambda: None, only_viewed(in_hook=True))

    def _exchanges_of(self, module: str) -> list[Exchange]:
        return [*self._packs[f"{GRADIENTS} of {module}"].exchanges.values()]

    def state_dict(self) -> dict[str, bytes]:
        """This rank's steps and residuals, `torch.save`d: key `rank{r}`. Between steps. Save those of all ranks."""
        own = {name: packs.state() for name, packs in self._packs.items()}
        return {f"rank{dist.get_rank()}": to_bytes(own | {_RANKS: dist.get_world_size(), _SPECS: self._specs.state()})}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load what `state_dict` returned: this rank's own state or, with another number of ranks, the states of all ranks that
        saved, in one dictionary. Call it before the first forward. The sum of residuals is kept. Under auto another number of
        ranks chooses anew. Raises PlanError later, and ValueError for a state that is missing, of another model, or of
        compressors that `accuracy` does not allow; backward raises ValueError for any other misfit."""
        if self._lanes:
            raise PlanError("load_state_dict() was called after a step. Call it before the first one.")
        own = f"rank{dist.get_rank()}"
        key = own if own in state else "rank0"
        saved = from_bytes(state[key]) if key in state else {}
        ranks = saved.get(_RANKS, dist.get_world_size())
        if ranks == dist.get_world_size():
            if own not in state:
                raise ValueError(f"the state has no {own}, only {', '.join(state) or 'nothing'}: other ranks saved it.")
            self._check_names(saved)
            self._specs.load(saved.get(_SPECS, {}))
            for name in self._packs.keys() & saved.keys():
                self._packs[name].load(saved[name])
            return
        every = [f"rank{rank}" for rank in range(ranks)]
        if missing := [key for key in every if key not in state]:
            raise ValueError(
                f"{ranks} ranks saved the state, and these are {dist.get_world_size()}: the states of all that saved are needed, "
                f"and {missing[0]} is missing. `saved_states` reads them from a checkpoint. Or leave the state out."
            )
        others = {rank: from_bytes(state[key]) for rank, key in enumerate(every)}
        for each in others.values():
            self._check_names(each)
        for name, packs in self._packs.items():
            packs.load_others({rank: each[name] for rank, each in others.items() if name in each})

    def _check_names(self, saved: Mapping[str, Any]) -> None:
        if unknown := sorted(saved.keys() - self._packs.keys() - {_RANKS, _SPECS}):
            raise ValueError(f"the state has {unknown[0]!r}, and the model {', '.join(sorted(self._packs))}.")

    def stats(self) -> dict[str, ExchangeStats]:
        """Statistics of this rank's exchanges, by `gradients of MODULE`, `parameters of MODULE`; of a second buffer `... (2)`."""
        found = [(name, at, each) for name, p in self._packs.items() for at, each in enumerate(p.exchanges.values(), 1)]
        stats = {name if at == 1 else f"{name} ({at})": exchange.stats() for name, at, exchange in found}
        return {name: of_one_phase(each) for name, each in stats.items()} if self._job.one_phase else stats

    def close(self) -> None:
        """End the threads. No backward may follow."""
        for lanes in self._lanes.values():
            lanes.stop()
