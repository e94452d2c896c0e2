"""The shards of parameters that one rank steps, and the optimizer's state of them.

A shard is a run of one parameter's elements, in the order in which they lie in its bucket. Its weights lie in the bucket's
flat buffer, in place of the gradients that were summed, and go from there to all ranks. In the optimizer it is a parameter of
its own: the keys of `optimizer.state` are shards, as long as the handle lives.
"""

import json
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradwire.engine.torch_hooks.splitting import in_order, part_of_state
from gradwire.exchange import Exchange, Slot
from gradwire.transport import Link, broadcast_bytes, gather_bytes

State = Mapping[str, Any]
"""What an optimizer keeps of one parameter."""


@dataclass(frozen=True, eq=False)
class Shard:
    """A run of a parameter's elements."""

    index: int
    """Of the parameter."""
    first: int
    """The first element."""
    weight: torch.nn.Parameter
    """One-dimensional, in the bucket's memory."""
    total: torch.Tensor
    """The mean gradient, in the dtype in which it was added."""


class _Entry(NamedTuple):
    """What a rank tells of one value of its optimizer's state."""

    parameter: int
    first: int
    key: str
    dtype: str
    """Of a tensor; '' for a plain value."""
    numel: int
    """Elements of a shard's tensor; 0 for one number that all shards of a parameter have alike."""
    value: Any
    """Where it is no tensor."""


class Shards:
    """The shards of one rank."""

    def __init__(
        self,
        exchange: Exchange,
        slots: Sequence[Slot],
        parameters: Sequence["weakref.ref[torch.nn.Parameter]"],
    ) -> None:
        """`slots` are those of the parameters, in the same order."""
        self._slots, self._parameters = list(slots), list(parameters)
        self.all: list[Shard] = []
        index_of = {id(slot): index for index, slot in enumerate(slots)}
        for slot, low, high, total in exchange.own_sums():
            weight = torch.nn.Parameter(exchange.flat_of(slot.bucket)[low:high])
            self.all.append(Shard(index_of[id(slot)], low - slot.offset, weight, total))

    def take_weights(self) -> None:
        """Copy the parameters' present values into the shards."""
        for shard in self.all:
            if (parameter := self._parameters[shard.index]()) is not None:
                values = in_order(parameter.detach(), self._slots[shard.index].view)
                shard.weight.data.copy_(values[shard.first : shard.first + shard.weight.numel()])

    # ---- the optimizer's state

    def has_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer keeps something of a shard."""
        return any(shard.weight in optimizer.state for shard in self.all)

    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's state of whole parameters by the state of this rank's shards."""
        for index, reference in enumerate(self._parameters):
            parameter = reference()
            if parameter is None or parameter not in optimizer.state:
                continue
            state, like = optimizer.state.pop(parameter), self._slots[index].view
            for shard in self.all:
                if shard.index == index:
                    optimizer.state[shard.weight] = part_of_state(state, like, shard.first, shard.weight.numel())

    def forget_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove the state of all shards from the optimizer."""
        for shard in self.all:
            optimizer.state.pop(shard.weight, None)

    def whole_state(self, optimizer: torch.optim.Optimizer, link: Link) -> dict[torch.Tensor, dict[str, Any]]:
        """Everybody's shards of the state joined, by parameter, on the CPU. Collective. Raises LinkError."""
        told, tensors = [], []
        for entry, value in self._entries(optimizer):
            told.append(entry)
            if entry.dtype:
                tensors.append(value.detach().cpu() if value.dim() else value.detach().cpu().clone())
        rows = gather_bytes(link, json.dumps(told).encode())
        whole: dict[int, dict[str, Any]] = defaultdict(dict)
        for root, row in enumerate(rows):
            entries = [_Entry(*each) for each in json.loads(row)]
            arrived = tensors if root == link.rank else [_empty(entry) for entry in entries if entry.dtype]
            broadcast_bytes(link, arrived, root)
            values = iter(arrived)
            for entry in entries:
                self._put(whole[entry.parameter], entry, next(values) if entry.dtype else entry.value)
        parameters = [reference() for reference in self._parameters]
        return {p: whole[index] for index, p in enumerate(parameters) if p is not None and index in whole}

    def _entries(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[_Entry, Any]]:
        for shard in self.all:
            for key, value in optimizer.state.get(shard.weight, {}).items():
                if isinstance(value, torch.Tensor):
                    numel = value.numel() if value.dim() else 0
                    dtype = str(value.dtype).removeprefix("torch.")
                    yield _Entry(shard.index, shard.first, key, dtype, numel, None), value
                else:
                    yield _Entry(shard.index, shard.first, key, "", 0, value), value

    def _put(self, state: dict[str, Any], entry: _Entry, value: Any) -> None:
        if not entry.numel:
            state[entry.key] = value
            return
        like = self._slots[entry.parameter].view
        if entry.key not in state:
            state[entry.key] = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype)
        in_order(state[entry.key], like)[entry.first : entry.first + entry.numel].copy_(value)


def _empty(entry: _Entry) -> torch.Tensor:
    return torch.empty((entry.numel,) if entry.numel else (), dtype=getattr(torch, entry.dtype))
