"""The kernels that a step launches on a GPU, and what the host's threads take for a step.

Launches are counted with tensors that have no memory, and with calls that only count. The host's time is, for each call that a
driver would get, the time that the call took on an H200. The processor time of a lane's Python between these calls is
printed: `pytest -s` shows it.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.collectives import ops
from gradwire.core import TensorInfo, rows_of
from gradwire.engine.gradients import _cut
from gradwire.exchange.layout import BucketBuffers, build_buckets, random_streams
from gradwire.transport import Grid, Group, Meter
from gradwire.transport.streams import Mark, Streams

META = torch.device("meta")
MOST_LAUNCHES = 250
MOST_HOST_MS = 15.0
FINDINGS = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu" / "h200.jsonl"


class CountingStreams(Streams):
    """Streams that count what a driver would be called for."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @contextmanager
    def encoding(self, after: Mark) -> Iterator[None]:  # type: ignore[override]
        self.calls.update(("wait_event", "switch"))
        yield

    @contextmanager
    def decoding(self) -> Iterator[None]:  # type: ignore[override]
        self.calls["switch"] += 1
        yield

    def mark(self) -> Mark:
        self.calls["record"] += 1
        return None

    def wait(self, mark: Mark) -> None:
        self.calls["wait_event"] += 1


class CountingLink:
    """A host-staged link to nobody, which counts exchanges, and the calls for copies through the host's memory."""

    wire = pinned = None

    def __init__(self, rank: int) -> None:
        self.rank, self.exchanges, self.streams = rank, 0, CountingStreams()

    def expect(self, tag: int, received: list[torch.Tensor]) -> "CountingExchange":
        self.exchanges += 1
        return CountingExchange(self, received)

    def all_reduce(self, tensor: torch.Tensor) -> "CountingExchange":
        self.exchanges += 1
        return CountingExchange(self, [tensor], whole=True)


class CountingExchange:
    """An exchange of parts of which each rank's own one stays on the device."""

    def __init__(self, link: CountingLink, received: list[torch.Tensor], whole: bool = False) -> None:
        self._calls, self._own = link.streams.calls, None if whole else link.rank
        self._calls["d2h_sync"] += whole
        self._received: list[torch.Tensor] | None = received

    def send(self, sent: list[torch.Tensor]) -> None:
        self._calls["d2h_sync"] += self._runs(sent)  # the lane's thread waits for the copies

    def wait(self, *source: int) -> None:
        if self._received is not None:
            self._calls.update({"copy": self._runs(self._received), "record": 1})
            self._received = None

    def finish(self) -> None:
        pass

    def _runs(self, parts: list[torch.Tensor]) -> int:
        """Copies of the parts: those on both sides of the own part are apart."""
        there = [bool(part.numel()) and rank != self._own for rank, part in enumerate(parts)]
        return sum(has_bytes for has_bytes, _ in groupby(there))


def bert_large() -> list[tuple[int, ...]]:
    """The shapes of BERT-large, last layer first: 335 million elements."""
    shapes: list[tuple[int, ...]] = [(30522, 1024), (512, 1024), (2, 1024), (1024,), (1024,)]
    for _ in range(24):
        shapes += [(1024, 1024), (1024,)] * 4 + [(1024,)] * 2
        shapes += [(4096, 1024), (4096,), (1024, 4096), (1024,), (1024,), (1024,)]
    return [*shapes, (1024, 1024), (1024,), (2, 1024), (2,)][::-1]


def step_of(buffers: BucketBuffers, link: Any) -> None:
    """The work of a lane in one step."""
    phases = range(len(buffers.bucket.link_tasks))
    for chunk in buffers.chunks:
        chunk.post(link, 0, phases)
        for phase in phases:
            chunk.run(phase, link, Meter(), None)
            with link.streams.decoding():  # as `Executor._run_tasks` does behind each task
                link.streams.mark()


def launches(spec: Any, size: int, monkeypatch: pytest.MonkeyPatch, local: int = 1) -> tuple[Counter[str], CountingLink, float]:
    """One step of one rank: the calls of kernels by name, and the copies of gradients; the link; the processor time in ms of the
    lane's thread without those calls. local: the ranks of a node."""
    counted: Counter[str] = Counter()

    def count(calls: Iterable[Any]) -> None:
        counted.update(call[0] for call in calls)

    monkeypatch.setattr(ops, "run_calls", count)
    shapes = {f"t{number}": shape for number, shape in enumerate(bert_large())}
    rank, nobody = size - 1, Any
    infos = [TensorInfo(name, shape, "float32", "gpu") for name, shape in shapes.items()]
    plan = gw.Policy(default=spec).plan(infos, size, local)
    tensors = {name: torch.empty(shape, device=META) for name, shape in shapes.items()}
    group = Group(nobody, rank, tuple(range(size)), timedelta(seconds=1), Grid.even(size // local, local, rank))  # type: ignore[arg-type]
    built = build_buckets(plan, tensors, group, random_streams(plan, rank, META), 0)
    ms: list[float] = []
    for _ in range(5):
        counted.clear()
        link = CountingLink(rank)
        began = time.thread_time()
        for buffers in built:
            step_of(buffers, link)
        ms.append(1e3 * (time.thread_time() - began))
    counted["gradients"] = sum(2 * len(_cut(buffers.slots)) for buffers in built)  # a copy of many tensors, and a multiplication
    return counted, link, min(ms)


@pytest.mark.parametrize("spec", [gw.QSGD(bits=4), gw.ErrorFeedback(gw.QSGD(bits=2))], ids=repr)
@pytest.mark.parametrize("size", [2, 8, 16])
def test_a_step_of_bert_large_takes_few_launches_on_any_number_of_ranks(
    size: int, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, link, _ = launches(spec, size, monkeypatch)
    encodes = sum(count for name, count in counted.items() if name.endswith("_encode"))
    pieces = counted["decode_sum"]
    assert encodes == 2 * pieces and link.exchanges <= 2 * pieces + 2
    assert counted.total() <= MOST_LAUNCHES


@pytest.mark.parametrize("spec", [gw.QSGD(bits=4), gw.ErrorFeedback(gw.QSGD(bits=2))], ids=repr)
@pytest.mark.parametrize("size", [20, 64, 120])
def test_the_launches_of_a_grid_do_not_grow_with_the_ranks(size: int, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece has three encodes, two sums and one decode, however many payloads. Vectors that travel uncompressed take more, as
    do the sums of shards with vectors."""
    counted, link, _ = launches(spec, size, monkeypatch)
    pieces, columns = counted["qsgd_encode"] // 3, rows_of(size)[0]
    assert link.exchanges == 4 * pieces and counted["qsgd_encode"] == 3 * pieces
    sums_term_by_term = 2 * pieces - counted["decode_sum"]
    assert counted["qsgd_decode"] <= pieces + sums_term_by_term * (columns - 1) and sums_term_by_term <= pieces
    assert counted.total() <= 1200


def test_a_rank_of_a_shorter_last_row_has_no_more_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It owns no shard: it encodes no whole sum, and adds up no row's sums."""
    counted, link, _ = launches(gw.QSGD(bits=4), 131, monkeypatch)
    pieces = counted["qsgd_encode"] // 2
    assert link.exchanges == 4 * pieces and counted["qsgd_encode"] == 2 * pieces and counted["decode_sum"] <= pieces
    assert counted["qsgd_decode"] <= pieces + (pieces - counted["decode_sum"]) * rows_of(131)[-1]
    assert counted.total() <= 1200


@pytest.mark.parametrize("spec", [gw.QSGD(bits=4), gw.ErrorFeedback(gw.QSGD(bits=2))], ids=repr)
@pytest.mark.parametrize(("nodes", "local"), [(2, 8), (4, 8), (16, 8)])
def test_the_launches_of_nodes_do_not_grow_with_the_nodes(
    nodes: int, local: int, spec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece has two encodes, a sum and a decode between nodes. Inside nodes gradients of all its ranks are added."""
    counted, link, _ = launches(spec, nodes * local, monkeypatch, local)
    pieces = counted["qsgd_encode"] // 2
    assert 4 * pieces <= link.exchanges <= 4 * pieces + 8 and counted["qsgd_encode"] == 2 * pieces
    sums_term_by_term = pieces - counted["decode_sum"]
    assert counted["qsgd_decode"] <= pieces + sums_term_by_term * (nodes - 1) and sums_term_by_term <= pieces // 4
    assert counted.total() <= 1000


# ---- the host's time


def prices_us() -> dict[str, float]:
    """What calls took the host of an H200, in microseconds."""
    rows = [json.loads(line) for line in FINDINGS.read_text().splitlines()]
    small = next(row for row in rows if row.get("what") == "host us of a small call")
    codecs = [row["host_us"] for row in rows if row["section"] == "speed" and row["call"].startswith("QSGD(bits=4, block=128)")]
    return {
        **{name: small[name] for name in ("add", "copy", "record", "wait_event", "d2h_sync")},
        "switch": 2 * small["device_of"],  # there and back
        "codec": median(codecs),
    }


@pytest.mark.parametrize("size", [2, 8, 16])
def test_the_calls_of_a_step_of_bert_large_take_the_host_few_milliseconds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    price = prices_us()
    counted, link, lane_ms = launches(gw.QSGD(bits=4), size, monkeypatch)
    copies = counted.pop("gradients")
    driver_us = counted.total() * price["codec"] + copies * price["add"]
    driver_us += sum(count * price[name] for name, count in link.streams.calls.items())
    print(f"{size} ranks: calls take {driver_us / 1e3:.1f} ms, and the lane's Python between them {lane_ms:.1f} ms here")
    assert driver_us / 1e3 <= MOST_HOST_MS
