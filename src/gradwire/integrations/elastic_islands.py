"""Islands as members: each member is a group of ranks that average gradients in every step, as inside a machine.

All ranks of an island ask for the quorum together. They exchange outer gradients with the ranks at the same place of other
islands. A round counts on an island if it ended on all of its ranks. A rank that dies ends its island: collectives inside fail,
and its torchrun starts the island again.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from gradwire.core import LocalSteps
from gradwire.errors import CommunicationError, DisagreementError, PlanError
from gradwire.integrations.island_calls import naming_ranks
from gradwire.integrations.islands import owners_of, share_inside
from gradwire.integrations.local_rounds import LocalRounds
from gradwire.integrations.outer_steps import OuterSteps
from gradwire.integrations.quorum import Lighthouse, NoQuorumError
from gradwire.integrations.shards import check_meshes, reshard, resharder, shard_of
from gradwire.transport import LinkError

__all__ = ["IslandLighthouse", "LocalState", "island_rounds"]


class Quorum(NamedTuple):
    """The quorum of the islands, as the first rank got it: the same on all ranks of an island."""

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    max_step: int
    max_world_size: int
    heal: bool
    recover_dst_replica_ranks: list[int]
    store_address: str
    replica_ids: list[str]


class IslandLighthouse(Lighthouse):
    """The lighthouse, which the first rank of an island asks for all."""

    def __init__(self, island: dist.ProcessGroup, address: str, min_replicas: int, timeout: timedelta, patience_s: float) -> None:
        super().__init__(address, min_replicas, timeout, patience_s)
        self._island = island
        self.place = island.rank()

    def ask(self, step: int, failures: int) -> Any:
        answer: Quorum | str = ""
        if self.place == 0:
            try:
                quorum = super().ask(step, failures)
                answer = Quorum(*(getattr(quorum, name) for name in Quorum._fields))
            except NoQuorumError as error:
                answer = str(error)
        answer = msgspec.json.decode(self._of_first(msgspec.json.encode(answer)), type=Quorum | str)
        if isinstance(answer, str):
            raise NoQuorumError(answer)
        return answer

    def _of_first(self, own: bytes) -> bytes:
        """The bytes of the first rank of the island."""
        size = torch.tensor(len(own))
        self._broadcast(size)
        data = (
            torch.frombuffer(bytearray(own), dtype=torch.uint8) if self.place == 0 else torch.empty(int(size), dtype=torch.uint8)
        )
        self._broadcast(data)
        return data.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        with naming_ranks(self._island):
            dist.broadcast(tensor, dist.get_global_rank(self._island, 0), group=self._island)

    def all_do(self, action: Callable[[], None]) -> None:
        failed: Exception | None = None
        try:
            action()
        except (CommunicationError, LinkError, DisagreementError) as error:
            failed = error
        if not self.all_agree(failed is None):
            raise failed or LinkError(None, ConnectionError("another rank of this island failed"))

    def all_agree(self, is_well: bool) -> bool:
        count = torch.tensor(float(is_well))
        with naming_ranks(self._island):
            dist.all_reduce(count, dist.ReduceOp.MIN, group=self._island)
        return bool(count)


class LocalState:
    """The state of an optimizer, of which this rank keeps shards, as plain tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The state, with this rank's shards."""
        state: dict[str, Any] = pytree.tree_map_only(DTensor, lambda each: each.to_local(), self._optimizer.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned at this place of another island."""
        parameters = [each for group in self._optimizer.param_groups for each in group["params"]]
        for number, values in state["state"].items():
            for name, value in values.items():
                values[name] = _like(parameters[number], value)
        self._optimizer.load_state_dict(state)


def _like(parameter: torch.Tensor, value: Any) -> Any:
    if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.to_local().shape):
        return value
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(value, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def island_rounds(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], schedule: LocalSteps, island: dist.ProcessGroup
) -> tuple[LocalRounds, dict[str, torch.Tensor]]:
    """The rounds of one rank of an island, and the tensors that it exchanges with other islands. Raises PlanError for a model
    with fewer tensors than the island has ranks, and for one whose shards are on other ranks."""
    reshard(model)
    check_meshes(model, island, "DeviceMesh.from_group(island, device_type)")
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    local = {name: shard_of(each) for name, each in parameters.items()}
    is_sharded = any(isinstance(each, DTensor) for each in parameters.values())
    owners = {} if is_sharded else owners_of(local, island.size())
    own = [name for name, each in local.items() if each.numel() and owners.get(name, island.rank()) == island.rank()]
    if not own:
        raise PlanError(f"rank {island.rank()} of the island has none of the {len(local)} tensors. Make the island smaller.")
    outer = OuterSteps(local, schedule, own, resharder(model))
    share = partial(share_inside, island, outer.weights, owners)
    return LocalRounds(model, outer, optimizers, schedule, share), {name: local[name] for name in own}
