"""The kernels that a step launches on a GPU: counted with tensors that have no memory, and with calls that only count."""

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.collectives import ops
from gradwire.core import TensorInfo
from gradwire.engine.gradients import _cut
from gradwire.exchange.layout import build_buckets, random_streams
from gradwire.transport import Grid, Group, Meter
from gradwire.transport.streams import Streams

META = torch.device("meta")
MOST_LAUNCHES = 250


class CountingLink:
    """A link to nobody, which counts exchanges."""

    streams, wire, pinned = Streams(), None, None

    def __init__(self) -> None:
        self.exchanges = 0

    def expect(self, *arguments: Any) -> "CountingLink":
        self.exchanges += 1
        return self

    all_reduce = expect

    def send(self, *arguments: Any) -> None:
        pass

    wait = finish = send


def bert_large() -> list[tuple[int, ...]]:
    """The shapes of BERT-large, last layer first: 335 million elements."""
    shapes: list[tuple[int, ...]] = [(30522, 1024), (512, 1024), (2, 1024), (1024,), (1024,)]
    for _ in range(24):
        shapes += [(1024, 1024), (1024,)] * 4 + [(1024,)] * 2
        shapes += [(4096, 1024), (4096,), (1024, 4096), (1024,), (1024,), (1024,)]
    return [*shapes, (1024, 1024), (1024,), (2, 1024), (2,)][::-1]


def launches(spec: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], int]:
    """The calls of kernels in one step of one rank, by name, and the copies of gradients; and the exchanges."""
    counted: Counter[str] = Counter()

    def count(calls: Iterable[Any]) -> None:
        counted.update(call[0] for call in calls)

    monkeypatch.setattr(ops, "run_calls", count)
    shapes = {f"t{number}": shape for number, shape in enumerate(bert_large())}
    rank, nobody = size - 1, Any
    plan = gw.Policy(default=spec).plan([TensorInfo(name, shape, "float32", "gpu") for name, shape in shapes.items()], size)
    tensors = {name: torch.empty(shape, device=META) for name, shape in shapes.items()}
    group = Group(nobody, rank, tuple(range(size)), timedelta(seconds=1), Grid.even(size, 1, rank))  # type: ignore[arg-type]
    link: Any = CountingLink()
    for buffers in build_buckets(plan, tensors, group, random_streams(plan, rank, META), 0):
        counted["gradients"] += 2 * len(_cut(buffers.slots))  # a copy of many tensors, and a multiplication
        for chunk in buffers.chunks:
            chunk.post(link, 0, range(len(buffers.bucket.link_tasks)))
            for phase in range(len(buffers.bucket.link_tasks)):
                chunk.run(phase, link, Meter(), None)
    return counted, link.exchanges


@pytest.mark.parametrize("spec", [gw.QSGD(bits=4), gw.ErrorFeedback(gw.QSGD(bits=2))], ids=repr)
@pytest.mark.parametrize("size", [2, 8, 16])
def test_a_step_of_bert_large_takes_few_launches_on_any_number_of_ranks(
    size: int, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, exchanges = launches(spec, size, monkeypatch)
    encodes = sum(count for name, count in counted.items() if name.endswith("_encode"))
    pieces = counted["decode_sum"]
    assert encodes == 2 * pieces and exchanges <= 2 * pieces + 2
    assert counted.total() <= MOST_LAUNCHES
