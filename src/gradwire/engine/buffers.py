"""Buffers of rank 0 for all ranks: sent before a forward, as under DDP, or together with an exchange."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from gradwire.transport import Lane, Link, Mark, bytes_of, copy_from, transfer

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def shared_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield parameters by name, without those that `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`
    names: experts that only this rank has."""
    return _shared(model, model.named_parameters())


def shared_buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """List the buffers, without those that `shared_parameters` leaves out."""
    return [buffer for _, buffer in _shared(model, model.named_buffers())]


def shared_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters, frozen ones too, and buffers."""
    return [*(parameter for _, parameter in shared_parameters(model)), *shared_buffers(model)]


def _shared(model: torch.nn.Module, named: Iterable[tuple[str, _Tensor]]) -> Iterator[tuple[str, _Tensor]]:
    own = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return ((name, tensor) for name, tensor in named if name not in own)


class ModelBuffers:
    """The buffers of a model as they were when ranks agreed on it."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._nbytes, self._device = _nbytes(shared_buffers(model)), device
        self.due = True
        """Whether the next forward broadcasts: the first one after a step."""

    def changed(self, model: torch.nn.Module) -> bool:
        """Whether the sizes differ from those that the other ranks send and expect."""
        return _nbytes(shared_buffers(model)) != self._nbytes

    def broadcast(self, model: torch.nn.Module | None) -> Callable[[Link], None] | None:
        """The job for a lane; None when there is nothing to send. Without a model (it changed) this rank takes nothing, and as
        rank 0 gives nothing."""
        if not self.due or not self._nbytes:
            return None
        return partial(self._broadcast, tensors=shared_buffers(model) if model else [])

    @torch.no_grad()
    def _broadcast(self, link: Link, tensors: list[torch.Tensor]) -> None:
        sent = self._packed(tensors)
        own = sent[1:].clone()
        with transfer():
            link.broadcast(sent).wait()
        if link.rank != 0 and tensors:
            copy_from(torch.where(sent[0] > 0, sent[1:], own), tensors)

    @torch.no_grad()
    def _packed(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """A byte that tells whether there are any, and their bytes or zeros."""
        if not tensors:
            return torch.zeros(1 + self._nbytes, dtype=torch.uint8, device=self._device)
        return torch.cat([torch.ones(1, dtype=torch.uint8, device=self._device), *map(bytes_of, tensors)])

    def copy(self, model: torch.nn.Module | None) -> "BufferCopy | None":
        """A copy of the buffers, to be broadcast while the model goes on; None when there is nothing to send. Without a model as
        in `broadcast`."""
        if not self._nbytes:
            return None
        return BufferCopy(self._packed([] if model is None else shared_buffers(model)), model is not None)


class BufferCopy:
    """Buffers of a moment: this rank's, and once `broadcast` has run rank 0's."""

    def __init__(self, packed: torch.Tensor, usable: bool) -> None:
        self._packed, self._usable = packed, usable

    def broadcast(self, link: Link) -> None:
        """Rank 0's for all ranks. Collective."""
        with transfer():
            link.broadcast(self._packed).wait()

    def put_into(self, model: torch.nn.Module) -> None:
        """Give the model what was broadcast, if rank 0 had any."""
        if not self._usable or (self._packed.is_cpu and not self._packed[0]):
            return
        buffers, given = shared_buffers(model), self._packed[1:]
        with torch.no_grad():
            if not self._packed.is_cpu:  # the host does not wait to read the byte
                given = torch.where(self._packed[0] > 0, given, torch.cat([*map(bytes_of, buffers)]))
            copy_from(given, buffers)


class BuffersBeside:
    """Sends rank 0's buffers, as they are when an exchange begins, to all ranks while the exchange runs."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model, self._agreed = weakref.ref(model), ModelBuffers(model, device)
        self._copy: BufferCopy | None = None
        self.sending: list[Future[Mark]] = []
        """At most one broadcast."""

    def send(self, lane: Lane) -> None:
        """After the step's own exchanges on this lane: rank 0's buffers as they are now."""
        model = self._model()
        copy = self._agreed.copy(None if model is None or self._agreed.changed(model) else model)
        self._copy, self.sending = copy, []
        if copy is None:
            return
        ready = lane.link.streams.mark()

        def run(link: Link) -> Mark:
            with link.streams.encoding(ready):
                copy.broadcast(link)
                return link.streams.mark()

        self.sending = [lane.submit(run)]

    def arrived(self, lane: Lane) -> None:
        """The broadcast has ended: the caller's stream may use it."""
        for sent in self.sending:
            lane.link.streams.wait(sent.result())

    def put(self, rank: int) -> None:
        """Give the model of this rank of the group what rank 0 sent. Not if a buffer has another size since then: that is a
        change of the model, with which all ranks get rank 0's."""
        model = self._model()
        if self._copy is not None and model is not None and rank != 0 and not self._agreed.changed(model):
            self._copy.put_into(model)


def _nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
