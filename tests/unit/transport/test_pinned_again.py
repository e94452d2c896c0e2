"""Page-locked memory that is allocated again: lists of operations on the memory before are dropped, so the system has it back."""

from types import SimpleNamespace
from typing import Any

import torch

from gradwire.collectives.schemes import AllReduce
from gradwire.transport import Grid
from gradwire.transport.pinned import PinnedRing
from gradwire.transport.staged_link import StagedLink
from gradwire.transport.streams import Streams

STEPS = 8


def staged_link() -> StagedLink:
    """A link of rank 0 of two, whose wire sends nothing."""
    made: Any = StagedLink.__new__(StagedLink)
    made.rank, made.world_size, made._lists, made._lists_for = 0, 2, {}, None
    made.pinned = PinnedRing(Streams(), pinned=False)
    made.wire = SimpleNamespace(run=lambda *_: None, shared_with=[])
    return made


def test_lists_of_exchanges_go_with_the_memory() -> None:
    link, most = staged_link(), 0
    for numel in (100, 200, 400, 800):
        for _ in range(STEPS):
            parts = [torch.zeros(0), torch.zeros(numel)]
            sources, arriving = link.pinned.fetch(parts), link.pinned.place(parts)
            link.exchange(7, sources.parts, arriving.parts)
            most = max(most, len(link._lists))
    assert most == len(link._lists) == 2, "two pairs of slots"


def test_sums_go_with_the_memory() -> None:
    link: Any = staged_link()
    link.streams = Streams()
    meter: Any = SimpleNamespace(begins=lambda streams: None)
    small, most = AllReduce(torch.zeros(100), Grid.of(["a", "b"], 0)), 0
    small._sum._on_wire = None  # as on a device
    for larger in (200, 400, 800):
        for _ in range(STEPS):
            small.run(0, link, meter, None)
            link.pinned.put(link.pinned.fetch([torch.zeros(larger)]))
            most = max(most, len(small._sum._staged))
    assert most <= 4, "four slots"
