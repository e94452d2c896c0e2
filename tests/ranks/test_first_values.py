"""What ranks do about the values of a model at the start: all get rank 0's, and a model that all have already is not sent."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from threads import built, here
from torch import nn
from worlds import Worlds, digest

import gradwire as gw
from gradwire.engine import session
from gradwire.transport import agreement, broadcast_bytes, bytes_of
from gradwire.transport.messages import Messages

NAN = 0x7FC00001
"""The bits of a NaN that carries a number."""


class Parts(nn.Module):
    """Parameters that are trained and frozen, and buffers, of several dtypes and strides. The same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = built(0, lambda: nn.Linear(40, 30))
        self.short = nn.Parameter(torch.arange(30, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.arange(12.0).reshape(3, 4).t(), requires_grad=False)
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("unknown", torch.full((5,), NAN, dtype=torch.int32).view(torch.float32))
        self.register_buffer("seen", torch.tensor([True, False, True]))
        self.register_buffer("large", torch.arange(600_000.0))
        self.register_buffer("image", torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * (self.layer(inputs) + self.short)


@contextmanager
def sent() -> Iterator[list[int]]:
    """The tensors of each broadcast of models inside."""
    found = list[int]()

    def counted(link: object, tensors: list[torch.Tensor], root: int = 0) -> None:
        found.append(len(tensors))
        broadcast_bytes(link, tensors, root)

    session.broadcast_bytes = counted
    try:
        yield found
    finally:
        session.broadcast_bytes = broadcast_bytes


def flip(tensor: torch.Tensor) -> None:
    """Change the last bit of the last element."""
    memory = tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    memory[-tensor.element_size()] ^= 1


def bits(model: nn.Module) -> dict[str, bytes]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: bytes(bytes_of(each).tolist()) for name, each in named.items() if name != "large"} | {
        "large": bytes(bytes_of(model.large[-9:]).tolist())
    }


def begin(name: str, other: int) -> tuple[dict[str, bytes], dict[str, bytes], list[int]]:
    """The values of the model before and after the start, where one rank has another bit of one tensor; and what was sent."""
    model = Parts()
    if here.rank == other:
        flip(model.layer.weight if name == "weight" else getattr(model, name))
    before = bits(model)
    with sent() as found:
        gw.parallelize(model, plan=gw.QSGD(bits=4)).detach()
    return before, bits(model), found


NAMES = ["weight", "short", "scale", "frozen", "steps", "unknown", "seen", "large", "image"]


def begin_each(other: int) -> list[tuple[dict[str, bytes], dict[str, bytes], list[int]]]:
    return [begin(name, other) for name in NAMES]


@pytest.mark.parametrize("other", [2, 0])
def test_one_bit_of_one_rank_is_enough_to_send_the_model(worlds: Worlds, other: int) -> None:
    ranks = worlds.run(3, begin_each, other)
    for name, *starts in zip(NAMES, *ranks, strict=True):
        befores, afters, found = zip(*starts, strict=True)
        assert befores[other] != befores[1], name
        assert all(after == befores[0] for after in afters), name
        assert [len(each) for each in found] == [1, 1, 1], name


def test_a_model_that_all_ranks_have_is_not_sent(worlds: Worlds) -> None:
    for before, after, found in worlds.run(3, begin, "short", -1):
        assert after == before and found == []


class Laid(nn.Module):
    """Tensors that lie in other memory on each rank, and that have other values."""

    def __init__(self) -> None:
        super().__init__()
        shape, rank = (50, 40, 30), here.rank
        self.small = nn.ParameterList(torch.full((9 + at,), float(rank)) for at in range(3))
        self.plain = nn.Parameter(torch.full((300, 200), float(rank)))
        turned = torch.arange(60_000.0).reshape(shape) + rank
        turned = turned.transpose(0, rank).contiguous().transpose(0, rank) if rank else turned
        self.register_buffer("turned", turned)
        self.register_buffer("flags", torch.arange(70_001) % 3 == rank)
        self.register_buffer("count", torch.full((), rank))
        self.register_buffer("gap", torch.full((200, 200 + rank), rank, dtype=torch.int16)[:, :200])


def lay() -> tuple[str, dict[str, bool], int]:
    """A digest of the values after the start, whether large tensors arrived where they lie, and copies from other memory."""
    model = Laid()
    places = {each.data_ptr(): name for name, each in [*model.named_parameters(), *model.named_buffers()]}
    arrived, copied = set[str](), list[int]()
    receive, copy = Messages._receive, agreement.copy_from

    def seen(messages: Messages, source: int, tag: int, into: torch.Tensor | None) -> object:
        arrived.add("" if into is None else places.get(into.data_ptr(), ""))
        return receive(messages, source, tag, into)

    def counted(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        copied.append(flat.numel())
        copy(flat, tensors)

    Messages._receive, agreement.copy_from = seen, counted
    try:
        gw.parallelize(model, plan=gw.QSGD(bits=4)).detach()
    finally:
        Messages._receive, agreement.copy_from = receive, copy
    where = {name: name in arrived for name in ("plain", "flags", "turned")}
    return digest([*model.parameters(), *model.buffers()]), where, sum(copied)


def test_values_arrive_where_tensors_lie(worlds: Worlds) -> None:
    """However these lie on each rank: what is not contiguous there goes through a copy."""
    (root, at_root, _), *others = worlds.run(3, lay)
    assert not any(at_root.values())
    small = 4 * (9 + 10 + 11)
    for rank, (values, arrived, copied) in enumerate(others, 1):
        assert values == root, rank
        assert arrived == {"plain": True, "flags": True, "turned": False}, rank
        assert copied == small + 4 * 60_000 + 2 * 40_000, rank


def change() -> tuple[list[int], bool]:
    """What a change of the model on all ranks alike sends, and then one with values of each rank's own."""
    model = Parts()
    handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
    with sent() as alike:
        model.frozen.requires_grad_(True)
        handle.attach()
    with sent() as unlike:
        model.register_parameter("late", nn.Parameter(torch.full((3,), float(here.rank))))
        handle.attach()
    handle.detach()
    return [len(alike), len(unlike)], bool((model.late == 0).all())


def test_changes_of_a_model_too(worlds: Worlds) -> None:
    assert worlds.run(2, change) == [([0, 1], True)] * 2
