"""The host-staged lane: messages of tensors on a device travel through page-locked memory of the host, on the wires of CPUs.

An exchange of a lane copies the parts that it sends to the host and waits for the copy. The lane's wire sends and receives, with
checksums. What has arrived is copied back, and the stream that decodes goes on. So the bytes have arrived before decoding is
queued. A device has as many such lanes as CPUs have: the copies of one lane run while the other one sends.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.transport.link import AllToAll, Group, Link, Pending
from gradwire.transport.meter import Meter
from gradwire.transport.operations import Operations
from gradwire.transport.pinned import PinnedRing, StagedMessage
from gradwire.transport.streams import DeviceStreams


class StagedLink(Link):
    """A link for tensors of a device. Its backend and its wire carry copies in the host's memory."""

    pinned: PinnedRing

    def __init__(self, group: Group, name: str, device: torch.device, timeout: timedelta) -> None:
        super().__init__(group, name, torch.device("cpu"), timeout)
        self.streams, self._device = DeviceStreams(device), device
        self.pinned = PinnedRing(self.streams, pinned=device.type == "cuda")
        self._lists: dict[tuple[int, ...], Operations] = {}
        self._lists_for: object = None
        """The generation of `pinned` in whose memory the lists move parts."""

    def expect(self, tag: int, received: Sequence[torch.Tensor], checked: bool = True) -> AllToAll:
        return _StagedExchange(self, tag, received, checked)

    def expect_on_host(self, tag: int, received: Sequence[torch.Tensor], checked: bool) -> AllToAll:
        """Announce an exchange of tensors in the host's memory to the backend."""
        return super().expect(tag, received, checked)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Pending:
        if self._is_on_host(tensor):
            return super().all_reduce(tensor, op)
        staged = self.pinned.fetch([tensor.view(-1)])
        super().all_reduce(staged.parts[0], op).wait()
        return _CopyBack(self.pinned, staged)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Pending:
        if self._is_on_host(tensor):
            return super().broadcast(tensor, root)
        is_root, parts = self.rank == root, [tensor.view(-1)]
        staged = self.pinned.fetch(parts) if is_root else self.pinned.place(parts)
        sent = super().broadcast(staged.parts[0], root)
        sent.wait()
        return sent if is_root else _CopyBack(self.pinned, staged)

    def exchange(self, tag: int, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Send and receive parts in the host's memory on the wire. Returns when all have arrived. Raises LinkError."""
        assert self.wire is not None
        if self._lists_for is not self.pinned.generation:
            self._lists, self._lists_for = {}, self.pinned.generation
        # the parts of one exchange lie at the same few places in every step
        key = (tag, *(number for part in (*sent, *received) for number in (part.data_ptr(), part.nbytes)))
        if key not in self._lists:
            self._lists[key] = made = Operations()
            others = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
            for to in (to for to in others if sent[to].numel()):
                made.send(to, sent[to], tag)
            for source in (source for source in others if received[source].numel()):
                made.receive(source, received[source], tag)
            made.flush()
        self.wire.run(self._lists[key], Meter())

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != self._device.type


class _CopyBack:
    """A collective that the host has done. `wait` queues the copy of its result to the device."""

    def __init__(self, pinned: PinnedRing, result: StagedMessage) -> None:
        self._pinned, self._result = pinned, result

    def wait(self, timeout: timedelta | None = None) -> None:
        self._pinned.put(self._result)


class _StagedExchange(AllToAll):
    """An exchange of tensors on a device."""

    link: StagedLink

    def __init__(self, link: StagedLink, tag: int, received: Sequence[torch.Tensor], checked: bool) -> None:
        self._checked = checked
        super().__init__(link, tag, received)

    def announce(self) -> None:
        """Reserve memory. Nothing is posted: the memory for what arrives may be in use until `send`."""
        self.link.pinned.reserve(self.received)

    def send(self, sent: Sequence[torch.Tensor]) -> None:
        """Send parts when the current stream's work so far is done. On a wire: return when all parts have arrived."""
        pinned = self.link.pinned
        sources = pinned.fetch(self._without_own(sent))
        self._arriving: StagedMessage | None = pinned.place(self._without_own(self.received))
        self._on_host: AllToAll | None = None
        if self.link.wire is not None:
            self.link.exchange(self.tag, sources.parts, self._arriving.parts)
        else:
            self._on_host = self.link.expect_on_host(self.tag, self._arriving.parts, self._checked)
            self._on_host.send(sources.parts)

    def wait(self, source: int) -> None:
        """Let the current stream wait for all parts. They come in one copy."""
        if self._arriving is None:
            return
        if self._on_host is not None:
            for each in range(self.link.world_size):
                self._on_host.wait(each)
        self.link.pinned.put(self._arriving)
        self._arriving = None

    def finish(self) -> None:
        if self._on_host is not None:
            self._on_host.finish()

    def _without_own(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [part[:0] if rank == self.link.rank else part for rank, part in enumerate(parts)]
