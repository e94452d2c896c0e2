"""Links between ranks of one process, a thread each: schemes as they are, without processes or sockets."""

import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch

from gradwire.transport import Meter
from gradwire.transport.keys import JobKey
from gradwire.transport.rings import Handles, Rings, ring_bytes
from gradwire.transport.streams import Streams
from gradwire.transport.tls import Connected, EncryptedSocket, Tls
from gradwire.transport.wire import Wire

__all__ = ["FakeLink", "drive", "links", "wires"]

Key = tuple[int, int, int]
"""Source, target, tag."""


class FakeLink:
    """The part of a link that schemes use. A part that does not come within half a minute is an error, not a hang."""

    streams = Streams()
    wire: Wire | None = None
    pinned = None

    def __init__(self, rank: int, world_size: int, channels: "dict[Key, queue.Queue[torch.Tensor]]") -> None:
        self.rank, self.world_size, self.channels = rank, world_size, channels
        self.sent_to = [0] * world_size
        """Bytes, counted as they leave."""

    def channel(self, source: int, target: int, tag: int) -> "queue.Queue[torch.Tensor]":
        """Made by whoever needs it first; setdefault, since both ends may be that at once."""
        return self.channels.setdefault((source, target, tag), queue.Queue())

    def expect(self, tag: int, received: Sequence[torch.Tensor]) -> "FakeExchange":
        return FakeExchange(self, tag, received)


class FakeExchange:
    def __init__(self, link: FakeLink, tag: int, received: Sequence[torch.Tensor]) -> None:
        self.link, self.tag, self.received = link, tag, received

    def send(self, sent: Sequence[torch.Tensor]) -> None:
        for to, part in enumerate(sent):
            if to != self.link.rank and part.numel():
                self.link.sent_to[to] += part.numel() * part.element_size()
                self.link.channel(self.link.rank, to, self.tag).put(part.clone())

    def wait(self, source: int) -> None:
        into = self.received[source]
        if source != self.link.rank and into.numel():
            part = self.link.channel(source, self.link.rank, self.tag).get(timeout=30)
            assert part.dtype is into.dtype and part.shape == into.shape
            into.copy_(part)

    def finish(self) -> None:
        pass


def links(world_size: int, wired: bool = False) -> list[FakeLink]:
    """One for each rank. `wired`: with real connections, on which C++ runs the schemes that it can; they count no bytes."""
    channels: dict[Key, queue.Queue[torch.Tensor]] = {}
    made = [FakeLink(rank, world_size, channels) for rank in range(world_size)]
    if wired:
        for link, wire in zip(made, wires(world_size), strict=True):
            link.wire = wire
    return made


def wires(
    world_size: int,
    timeout_s: float = 30.0,
    shared: bool = False,
    capacity: int = ring_bytes(2),
    mapped_once: bool = False,
    tls: bool = False,
    tcp: bool = False,
) -> list[Wire]:
    """One for each rank, all in this process. `shared`: messages pass through memory, in rings of this capacity. `mapped_once`:
    both ends have it at the same addresses, so that a sanitizer sees who else touches it. `tls`: connections are encrypted.
    `tcp`: they are of TCP, not UNIX sockets, which are quicker to make."""
    ends: list[dict[int, Connected]] = [{} for _ in range(world_size)]
    for low, high in combinations(range(world_size), 2):
        pair = over_tcp() if tcp else socket.socketpair()
        ends[low][high], ends[high][low] = encrypted(*pair) if tls else pair
    made = [Wire(world_size, each, timeout_s) for each in ends]
    for low, high in combinations(range(world_size), 2) if shared else ():
        handles = Handles.make(capacity)
        copies = Handles(os.dup(handles.memory), (os.dup(handles.bells[0]), os.dup(handles.bells[1])))
        of_maker, of_other = Rings(handles, True, capacity), Rings(copies, False, capacity)
        if mapped_once:
            of_other.addresses = of_maker.addresses[::-1]
        made[high].share(low, of_maker)
        made[low].share(high, of_other)
    return made


def over_tcp() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def encrypted(near: socket.socket, far: socket.socket) -> tuple[EncryptedSocket, EncryptedSocket]:
    """Both ends of a connection, after the handshake."""
    made = [Tls(JobKey(bytes(32)), None).socket(each, each is near) for each in (near, far)]
    for each in (near, far):
        each.setblocking(False)
    steps = [each.handshake() for each in made]
    while steps:
        steps = [each for each in steps if next(each, None) is not None]
    return made[0], made[1]


def drive(schemes: Sequence[Any], phases: int, wired: bool = False) -> list[FakeLink]:
    """One step of all ranks' schemes; returns the links, which know what was sent."""
    made, errors = links(len(schemes), wired), []

    def live(scheme: Any, link: FakeLink) -> None:
        try:
            scheme.post(link, 0, range(phases))
            for phase in range(phases):
                scheme.run(phase, link, Meter(), None)
        except BaseException as error:
            errors.append(error)

    jobs: list[Callable[[], None]] = [lambda s=s, k=k: live(s, k) for s, k in zip(schemes, made, strict=True)]
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in made:
        if link.wire is not None:
            link.wire.close()
    if errors:
        raise errors[0]
    left = {key: channel.qsize() for key, channel in made[0].channels.items() if channel.qsize()}
    assert not left, f"parts that nobody waited for: {left}"
    return made
