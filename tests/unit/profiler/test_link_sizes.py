"""The sizes with which a link is measured, on made-up links."""

from typing import Any

import pytest
import torch

from gradwire.costs import fit_line
from gradwire.profiler import links


def sweep(monkeypatch: pytest.MonkeyPatch, latency_us: float, gbps: float, seconds: float) -> tuple[list[float], float, Any]:
    """The sizes, the seconds that they took, and the line through the times, of a link with this latency and rate."""
    spent: list[float] = []

    def run(link: Any, traffic: Any, nbytes: int, messages: int, device: torch.device) -> links._Batches:
        us = latency_us + nbytes * 8e-3 / gbps
        spent.append((1 + links.BATCHES * messages) * us / 1e6)
        return links._Batches([us] * links.BATCHES, [1.0] * links.BATCHES, [0.0] * links.BATCHES)

    monkeypatch.setattr(links, "_run", run)
    points, cpu_points, waits = links._sweep(None, None, 1, torch.device("cpu"), seconds)  # type: ignore[arg-type]
    assert len(points) == len(cpu_points) and {size for size, _ in points} == {size for size, _ in waits}
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
