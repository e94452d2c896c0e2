"""The sizes with which a link is measured, and the rate that is found, on made-up links."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.costs import fit_line
from gradwire.profiler import links
from gradwire.transport import Grid, LinkError


def sweep(
    monkeypatch: pytest.MonkeyPatch, latency_us: float, gbps: float, seconds: float, disturbed: int = -1
) -> tuple[list[float], float, Any]:
    """The sizes, the seconds that they took, and the line through the times, of a link with this latency and rate.

    disturbed: the number of the measurement in which the link stands still for three quarters of the time. It is made again."""
    spent: list[float] = []
    measured: list[int] = []

    def run(link: Any, traffic: Any, nbytes: int, messages: int, device: torch.device) -> links._Batches:
        us = (latency_us + nbytes * 8e-3 / gbps) * (4.0 if len(spent) == disturbed else 1.0)
        measured.append(nbytes)
        spent.append((1 + links.BATCHES * messages) * us / 1e6)
        return links._Batches([us] * links.BATCHES, [1.0] * links.BATCHES, [0.0] * links.BATCHES)

    monkeypatch.setattr(links, "_run", run)
    points, cpu_points, waits = links._sweep(None, None, 1, torch.device("cpu"), seconds)  # type: ignore[arg-type]
    first, *rest = measured  # the first one is measured before, for the latency
    assert [nbytes for nbytes in rest if rest.count(nbytes) > 1] == ([] if disturbed < 0 else [measured[disturbed]] * 2)
    assert (
        first == links.SIZES[0] and len(points) == len(cpu_points) and {size for size, _ in points} == {size for size, _ in waits}
    )
    return sorted({size for size, _ in points}), sum(spent), fit_line(points)


@pytest.mark.parametrize(("latency_ms", "mbps"), [(5, 100), (25, 100), (50, 100), (25, 20), (50, 20), (25, 500), (100, 10)])
def test_a_far_link_shows_its_rate_in_a_few_messages(monkeypatch: pytest.MonkeyPatch, latency_ms: float, mbps: float) -> None:
    sizes, spent_s, line = sweep(monkeypatch, 1e3 * latency_ms, mbps / 1e3, 0.12)
    assert line.alpha_us == pytest.approx(1e3 * latency_ms, rel=0.02)
    assert 8e-3 / line.us_per_byte == pytest.approx(mbps / 1e3, rel=0.02)
    assert len(sizes) == 2 and sizes[1] <= links.ENOUGH_BYTES
    assert spent_s < 0.12 * links.PATIENCE + 35e-3 * latency_ms


def test_a_near_link_is_measured_with_every_size_that_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, _, line = sweep(monkeypatch, 50.0, 10.0, 1.0)
    assert fast == list(links.SIZES) and 8e-3 / line.us_per_byte == pytest.approx(10.0, rel=0.01)
    busy, _, _ = sweep(monkeypatch, 300.0, 1.0, 0.005)
    assert busy == list(links.SIZES[: len(busy)]) and len(busy) > 3, "little time makes no link far"
    slow, spent_s, _ = sweep(monkeypatch, 500.0, 0.01, 0.12)
    assert slow == list(links.SIZES[: len(slow)]) and len(slow) >= 3 and spent_s < 0.12 * links.PATIENCE


@pytest.mark.parametrize("disturbed", range(2, 6))
def test_a_size_in_which_the_link_stood_still_is_measured_again(monkeypatch: pytest.MonkeyPatch, disturbed: int) -> None:
    sizes, _, line = sweep(monkeypatch, 10.0, 0.1, 0.1)
    again, spent_s, line_again = sweep(monkeypatch, 10.0, 0.1, 0.1, disturbed)
    assert again == sizes and line_again.us_per_byte == pytest.approx(line.us_per_byte) and spent_s < 0.1 * (1 + links.PATIENCE)


@pytest.mark.parametrize("nodes", [4, 8, 16])
@pytest.mark.parametrize("mbps", [10, 100])
def test_the_bytes_of_short_messages_are_no_latency(nodes: int, mbps: int) -> None:
    """On a link that is nothing but bytes a further message takes as long as its bytes."""
    points = [(float(nodes * n), 250 + (nodes - 1) * n * 8 / mbps) for n in links.SIZES[:4]]
    times = {"inter": points, "inter message": [(0.0, 1024 * 8 / mbps)], "allreduce": [(n, n * 8 / mbps) for n, _ in points]}
    found = links.measured_links(times, Grid.even(nodes, 1, 0)).cluster.inter
    assert found.gbps == pytest.approx(mbps / 1e3, rel=0.001) and found.message_us == pytest.approx(0.0, abs=0.1)


def test_small_sizes_promise_large_ones_no_rate() -> None:
    """Here waits for a processor made the smaller sizes look like latency; the largest ones had 0.1 Gb/s."""
    points = [(4.0 * n, 1400 * (n > 1024) + 3 * n * 8 / 115) for n in links.SIZES[:3]] + [(4.0 * 65536, 3 * 65536 * 8 / 100)]
    found = links.measured_links({"inter": points, "allreduce": points}, Grid.even(4, 1, 0)).cluster.inter
    assert 0.099 < found.gbps <= 0.1


def test_a_link_that_stood_still_for_the_largest_size_has_the_rate_of_the_others() -> None:
    points = [(4.0 * n, 50 + 3 * n * 8 / 100) for n in links.SIZES[:5]] + [(4.0 * links.SIZES[5], 3 * links.SIZES[5] * 8 / 20)]
    found = links.measured_links({"inter": points, "allreduce": points}, Grid.even(4, 1, 0)).cluster.inter
    assert found.gbps == pytest.approx(0.1)


@pytest.mark.parametrize("broken", [0, 1])
def test_no_lane_is_still_at_work_after_one_of_them_failed(broken: int) -> None:
    """`broken`: which of three lanes loses a rank. The last one takes longest."""
    ended, run = threading.Event(), ThreadPoolExecutor(2)

    def perform(lane: int) -> None:
        if lane == broken:
            raise LinkError(1, ConnectionError("rank 1 is gone"))
        if lane == 2:
            time.sleep(0.3)
            ended.set()

    own, *others = [SimpleNamespace(announce=lambda *_: None, perform=lambda lane=lane: perform(lane)) for lane in range(3)]
    lanes = [SimpleNamespace(submit=lambda job: run.submit(job, None)) for _ in others]
    made: Any = zip(lanes, others, strict=True)
    spread = links._Spread(own, [*made])  # type: ignore[arg-type]
    spread.announce(links._SPREAD_BYTES, 1)
    with run:
        with pytest.raises(LinkError, match="rank 1 is gone"):
            spread.perform()
        assert ended.is_set()


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
@pytest.mark.parametrize("nbytes", [1000, 2**20, 2**24, 2**26])
def test_the_memory_of_exchanges_is_bounded(ranks: int, nbytes: int) -> None:
    """Parts of 64 MiB for each of 16 ranks would fill 2 GB of a GPU beside the model."""
    link: Any = SimpleNamespace(rank=0, world_size=16, wire=None)
    parts = links._Exchanges(link, range(ranks), torch.device("cpu"))._parts(nbytes)
    assert [part.nbytes for part in parts] == [0] + [nbytes] * (ranks - 1) + [0] * (16 - ranks)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert parts[0].untyped_storage().nbytes() <= min((ranks - 1) * nbytes, 2**26) + 16 * 512
    addresses = [part.data_ptr() for part in parts[1:ranks]]
    assert len({*addresses}) == ranks - 1, "each message has a checksum of its own"
    if ranks * nbytes <= 2**26 and nbytes % 512 == 0:
        assert all(after - before == nbytes for before, after in pairwise(addresses)), "none lies in the cache for another"
