"""The work of Python before the first step of many ranks, which share processors: calls are counted, since times vary."""

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch

import gradwire as gw
from gradwire.core import TensorInfo
from gradwire.exchange.exchange import Lent
from gradwire.exchange.layout import BucketBuffers, _Rows, build_buckets, cut, random_streams
from gradwire.kernels import cpu
from gradwire.transport import Grid, Group, Operations

T = TypeVar("T")
RANKS, NUMEL = 64, 6_000_000


def calls_of(act: Callable[[], T]) -> tuple[int, T]:
    """How many functions are called, and what `act` returns."""
    count = 0

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        made = act()
    finally:
        sys.setprofile(None)
    return count, made


def built() -> list[BucketBuffers]:
    """The buckets of one of many ranks, with gradients where autograd leaves them."""
    tensors = {f"t{number}": torch.empty(NUMEL // 24) for number in range(24)}
    infos = [TensorInfo(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]
    plan = gw.Uniform(gw.QSGD(bits=4)).plan(infos, RANKS, RANKS)
    lent, nobody = Lent(tensors), Any
    group = Group(nobody, 5, tuple(range(RANKS)), timedelta(seconds=1), Grid.even(1, RANKS, 5))  # type: ignore[arg-type]
    return build_buckets(plan, tensors, group, random_streams(plan, 5, torch.device("cpu")), 0, None, lent.addresses)


class NoMemory:
    """A wire to ranks with which no memory is shared."""

    shared_with: list[int] = []  # noqa: RUF012


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
def test_a_list_of_kernel_calls_takes_few_calls_of_python() -> None:
    chunks: list[Any] = [chunk for buffers in built() for chunk in buffers.chunks]
    works = [work for chunk in chunks for phase in chunk.phases for each in phase for work in works_of(each)]
    kernels = sum(len(work.calls()) for work in works)

    def lists() -> list[Operations]:
        return [chunk._operations(phase, NoMemory()) for chunk in chunks for phase in range(len(chunk.phases))]

    count, made = calls_of(lists)
    assert len(works) == kernels > 500 and sum(len(each.array) for each in made) > kernels
    assert count < 65 * kernels


def works_of(transfer: Any) -> Iterator[Any]:
    yield from transfer.before
    for works in transfer.arrivals.values():
        yield from works
    yield from transfer.after


def test_the_segments_of_a_shard_are_found_without_a_search() -> None:
    tensors, parts = 2000, 64
    bucket = gw.Uniform(gw.QSGD(bits=4)).plan([TensorInfo(f"t{n}", (300,), "float32") for n in range(tensors)]).buckets[0]
    members = [torch.empty(300) for _ in bucket.tensors]
    rows, end = _Rows(bucket, members, 128, 0, None), 300 * len(members)
    edges = [end * part // parts for part in range(parts + 1)]

    def shards() -> list[Any]:
        return [rows.between(*run, torch.device("cpu")) for run in pairwise(edges)]

    count, made = calls_of(shards)
    assert sum(row.numel for segments in made for row in segments.rows) == end
    assert count < 12 * (len(members) + parts)


class Walked(list[int]):
    """Counts how often it is walked through."""

    walks = 0

    def __iter__(self) -> Iterator[int]:
        self.walks += 1
        return super().__iter__()


def test_a_bucket_is_cut_without_a_search_for_each_part() -> None:
    numels = Walked([300] * 100)
    assert cut(numels, 128, 0, 30_000, 64) == cut([300] * 100, 128, 0, 30_000, 64)
    assert numels.walks <= 2
