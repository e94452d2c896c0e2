"""Local steps between islands: groups of ranks that average gradients in every step, as inside a machine or a room.

Inside, the script does what it did before: DDP, or `fully_shard` with a mesh inside the island. All ranks of an island then have
the same local weights, whole or in shards. Between islands, ranks at the same place exchange outer gradients every so many steps:

- with `fully_shard` the shards that they hold;
- otherwise a part of the tensors for each place, whose new global weights the others of the island get from there. So an island
  sends the model once, however many ranks it has.
"""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gradwire.engine import REGISTRY, CountingHook, StepHook, checksums, leave_hooks_behind, lower_second_moments
from gradwire.errors import PlanError
from gradwire.exchange import Exchange, ExchangeStats, TensorMeta, embeddings_of
from gradwire.integrations.island_calls import gather_rows, naming_ranks
from gradwire.integrations.island_checks import check_alike, check_alone, listed
from gradwire.integrations.island_state import IslandState
from gradwire.integrations.outer_steps import OuterSteps, check_rounds
from gradwire.integrations.shards import resharder, shard_of
from gradwire.integrations.trained import StepWatch, TrainedParameters

__all__ = ["Islands", "islands", "owners_of", "share_first", "share_inside"]


def islands(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    mesh: DeviceMesh,
    plan: Any,
) -> "Islands":
    """Train islands apart, and average their weights every so many steps. Call it on all ranks, after DDP or `fully_shard`.

    optimizer: of the model, or a list of several, which step after one backward. The step of the last one counts.
    mesh: of two dimensions. Ranks along the second one are an island, those along the first one have the same place in theirs.
    plan: a policy whose schedule is `gw.LocalSteps(...)`, such as `gw.Uniform(spec, schedule=...)`.

    All islands begin with the weights of the first, frozen ones and buffers too. `optimizer.step()` raises CommunicationError
    where a rank died or stalled, and StepStateError where a parameter was thawed, added or replaced since.
    What it returns lives as long as the model, or until `detach()`. Raises PlanError for another mesh or schedule, for a model
    of which only a part is sharded, and for shards on other ranks than those of an island; StepStateError for a model that
    trains on islands already; DisagreementError where islands have other models or plans, and where another rank raises.

    Example, for 2 islands of 4 ranks, inside which gradients are averaged exactly::

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("between", "inside"))
        model = DistributedDataParallel(model, process_group=mesh["inside"].get_group())
        plan = gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(every=30))
        gw.islands(model, optimizer, mesh, plan)
    """
    if mesh.ndim != 2:
        raise PlanError(f"mesh has {mesh.ndim} dimensions: pass one of two, of which the second is inside an island.")
    optimizers: list[torch.optim.Optimizer] = []
    problem: Exception | None = None
    try:
        optimizers = listed(optimizer)
        check_alone(model, mesh, plan)
    except Exception as error:  # the other ranks wait for this one
        problem = error
    check_alike(model, mesh, problem)
    made = Islands(model, optimizers, mesh, plan)
    leave_hooks_behind(model)
    REGISTRY.add(model, made.trained.parameters.values(), made)
    return made


class Islands:
    """A model in training on islands, as `gw.islands` returns it."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], mesh: DeviceMesh, plan: Any) -> None:
        self._between, self._inside = mesh.get_group(0), mesh.get_group(1)
        parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        sharded = {name for name, each in parameters.items() if isinstance(each, DTensor)}
        self._local = {name: shard_of(each) for name, each in parameters.items()}
        share_first(self._between, [*map(shard_of, model.parameters()), *map(shard_of, model.buffers())])
        self._owners = {} if sharded else owners_of(self._local, self._inside.size())
        place = self._inside.rank()
        own = {name for name, each in self._local.items() if each.numel() and self._owners.get(name, place) == place}
        schedule = check_rounds(plan.schedule)
        self.every, self.steps = schedule.every, 0
        """The steps from one exchange to the next, and the optimizer's steps so far, with those that a GradScaler left out."""
        self._outer = OuterSteps(self._local, schedule, own, resharder(model))
        embeddings = embeddings_of(model)
        tensors = {name: TensorMeta.of(self._local[name], id(parameters[name]) in embeddings) for name in reversed(parameters)}
        tensors = {name: each for name, each in tensors.items() if name in own}
        self.exchange = Exchange(tensors, plan, self._between) if tensors else None
        """The exchange with the same place of the other islands; None on a rank without a tensor."""
        self._state = IslandState(self._outer, self.exchange, self._inside, self._between)
        self._model, self.trained = weakref.ref(model), TrainedParameters(model)
        self._detached = False
        counts, cure = "islands count the steps of what gw.islands got", "call detach(), and gw.islands again, on all ranks"
        self._hooks: list[Any] = [StepWatch(self.trained, optimizers, counts, cure)]
        before, lower = StepHook(self, Islands._before_step), StepHook(self, Islands._lower_second_moments)
        self._hooks += [each.register_step_pre_hook(before) for each in optimizers]
        if schedule.second_moment == "mean":
            self._hooks += [each.register_step_post_hook(lower) for each in optimizers]
        self._hooks.append(optimizers[-1].register_step_post_hook(CountingHook(self, Islands._after_step)))

    def global_weights(self) -> AbstractContextManager[None]:
        """Inside, the model holds the weights that are the same on all islands, to evaluate or to save them."""
        return self._outer.shown()

    def stats(self) -> ExchangeStats | None:
        """Statistics of this rank's exchanges with other islands; None on a rank without a tensor."""
        return self.exchange.stats() if self.exchange is not None else None

    def state_dict(self) -> dict[str, Any]:
        """This rank's global and local weights, outer momenta, residuals and steps, keys `rank{r}/...`. Between steps; save those
        of all ranks."""
        return self._state.save(self.steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned on this rank. The parameters then hold the local weights; the global ones, for a state
        of gradwire 0.3. Collective. Raises ValueError on all ranks, which then have changed nothing, if one cannot load its
        state, and if these are of different steps: load the states of one save then."""
        self.steps = self._state.load(state)

    def detach(self) -> None:
        """End the exchanges. The model keeps the weights that it has. A second call does nothing."""
        if self._detached:
            return
        self._detached = True
        for hook in self._hooks:
            hook.remove()
        REGISTRY.forget(self._model(), self.trained.parameters.values())
        if self.exchange is not None:
            self.exchange.close()

    def _before_step(self, *_: object) -> None:
        self.trained.check()

    def _lower_second_moments(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        lower_second_moments(optimizer, self._between.size(), self.trained.parameters.values())

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        self.steps += 1
        if self.steps % self.every:
            return
        if self.exchange is not None:
            means = self._outer.gradients()
            self.exchange.average_(means)
            self._outer.step(means)
        share_inside(self._inside, self._outer.weights, self._owners)
        self._outer.take_up()


def share_first(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Give all ranks of a group the values of its first rank. Sends only tensors that are not the same on all: frozen ones, which
    may be most of a model, often are. Collective."""
    own = [number - 2**64 if number >= 2**63 else number for number in checksums(tensors)]
    sums = torch.tensor(own, device=tensors[0].device)
    rows = torch.stack(gather_rows(group, sums))
    for each, differs in zip(tensors, (rows != sums).any(0).tolist(), strict=True):
        if differs:
            sent = each.contiguous().reshape(-1)
            with naming_ranks(group):
                dist.broadcast(sent.view(torch.uint8), dist.get_global_rank(group, 0), group=group)
            each.copy_(sent.view_as(each))


def share_inside(island: dist.ProcessGroup, weights: Mapping[str, torch.Tensor], owners: Mapping[str, int]) -> None:
    """Give all ranks of an island the weights of each owner. Collective."""
    for owner, dtype in sorted({(owner, weights[name].dtype) for name, owner in owners.items()}, key=str):
        chosen = [weights[name] for name, other in owners.items() if (other, weights[name].dtype) == (owner, dtype)]
        flat = torch.cat([each.reshape(-1) for each in chosen])
        with naming_ranks(island):
            dist.broadcast(flat, dist.get_global_rank(island, owner), group=island)
        for each, part in zip(chosen, flat.split([each.numel() for each in chosen]), strict=True):
            each.copy_(part.view_as(each))


def owners_of(tensors: Mapping[str, torch.Tensor], places: int) -> dict[str, int]:
    """The place in an island that exchanges each tensor: the largest tensor first, each to the place with the fewest bytes."""
    loads = [0] * places
    owners = {}
    for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
        owners[name] = place = loads.index(min(loads))
        loads[place] += tensors[name].nbytes
    return {name: owners[name] for name in tensors}
