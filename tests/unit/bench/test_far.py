"""The tables of steps over far links; nothing is measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from benchmarks import far
from benchmarks.sleeping_cells import found_by, is_whole, ratio
from gradwire.auto.decision import AutoDecision, Tried
from gradwire.bench.methods import Gradwire
from gradwire.bench.names import UNLIMITED
from gradwire.bench.results import BetweenSites, Cell, StepTimes
from gradwire.bench.runner import BenchRequest, run_bench
from gradwire.bench.statistics import wire_us
from gradwire.testbed import EmulatedCluster, RelayCounts


def result(delay: int, **times: float | None) -> dict[str, Any]:
    methods = {name: {"step_ms": times.get(name, 400.0), "decided": [], "failure": None, "cpu_ms": 1.0} for name in far.METHODS}
    methods["auto"]["decided"] = [{"step": 40, "chosen": "plan A"}, {"step": 90, "chosen": "plan B"}]
    return {"nodes": 8, "mbps": 100, "delay_ms": delay, "methods": methods}


def test_a_row_for_each_delay_and_a_table_for_each_cluster() -> None:
    near, long = result(0, DDP=3000.0), result(50, **{"4 bits, delayed": 250.0, "DDP": None})
    assert far.hiding(near) == (400.0, 400.0) and far.hiding(long) == (400.0, 250.0)
    lines = far.tables_of([near, long, result(50) | {"nodes": 2}])
    assert sum("machines" in line for line in lines) == 2
    assert any(line.startswith("| 50 ms | 400 | failed | 400 | 400 | 250 |") and line.endswith("| 1.60 |") for line in lines)
    assert far.chosen_of([near])[2:] == ["| 8 | 100 Mb/s | 0 ms | auto | plan B | 90 |"]


def with_all(result: dict[str, Any]) -> dict[str, Any]:
    """A result of today: 3.125 MB leave each of two sites in a step."""
    auto = {
        "step_ms": 500.0,
        "crossing_mb": 6.25,
        "phases": 2,
        "cpu_ms": 40.0,
        "decided": [{"step": 40, "chosen": "A", "predicted_ms": 450.0}],
    }
    result["methods"]["auto"] |= auto
    result["methods"]["no communication"] |= {"step_ms": 200.0, "forward_ms": 70.0}
    between = {"wire_bytes": 625_000_000, "cpu_s": 10.0}
    return result | {"processors": 2, "between_sites": between}


def test_what_is_possible_is_the_last_gradients_way_the_wire_or_the_processors() -> None:
    wire_ms = wire_us(3_125_000, 0.1) / 1e3
    assert 250 < wire_ms < 270
    assert far.possible_ms(with_all(result(0))) == pytest.approx(70 + wire_ms)
    assert far.possible_ms(with_all(result(50))) == pytest.approx(70 + wire_ms + 50)
    assert far.possible_ms(with_all(result(200))) == pytest.approx(max(70 + wire_ms + 200, 200 + 300))
    busy = with_all(result(0))
    busy["methods"]["auto"]["cpu_ms"] = 90.0
    assert far.possible_ms(busy) == pytest.approx((8 * 90.0 + 100.0) / 2), "the relay takes 10 s for 100 times as many bytes"


def test_rows_show_the_possible_and_the_prediction_and_older_ones_a_dash() -> None:
    def row_of(found: dict[str, Any]) -> list[str]:
        lines = [line for line in far.tables_of([found]) if line.startswith(("| delay", "| 50 ms"))]
        names, values = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        return [values[names.index(name)] for name in ("possible", "of possible", "predicted", "predicted, all")]

    assert row_of(with_all(result(50))) == ["381", "0.76", "0.90", "-"]
    older = with_all(result(50))
    del older["between_sites"], older["methods"]["auto"]["crossing_mb"]
    older["methods"]["auto"]["decided"][-1]["predicted_ms"] = None
    assert row_of(older) == row_of(result(50)) == ["-", "-", "-", "-"]


def test_rows_from_the_warm_up_of_codecs_are_marked() -> None:
    old = result(10)
    for found in old["methods"].values():
        del found["cpu_ms"]
    rows = [line for line in far.tables_of([old, result(50)]) if line.startswith(("| 10 ms", "| 50 ms"))]
    assert [row.split(" | ")[0] for row in rows] == [r"| 10 ms \*", "| 50 ms"]


def test_what_was_not_measured_is_no_ratio() -> None:
    assert found_by(None) == {"step_ms": None, "decided": [], "failure": "nothing was measured"}
    assert is_whole(result(0), far.METHODS) and not is_whole(result(0, DDP=None), far.METHODS)
    assert (
        ratio(*far.hiding(result(10, **{"4 bits": None}))) == ratio(*far.hiding(result(10, **{"4 bits, delayed": None}))) == "-"
    )


def test_a_decision_keeps_what_was_predicted_and_what_the_trial_measured() -> None:
    tried = Tried("plan A", 400e3, 486e3, 2)
    method = SimpleNamespace(handle=SimpleNamespace(decisions=[AutoDecision(12, "at the start", tried, tried, (), 7, 2e6, 0.0)]))
    decided = Gradwire.decided.fget(method)
    step = StepTimes(median_us=5e5, minimum_us=4e5, p10_us=45e4, p90_us=6e5, mean_us=5e5, stdev_us=1.0, steps=20)
    found = found_by(Cell(job=far.JOB, link=UNLIMITED, gbps=None, method="gradwire:auto", step=step, decided=decided))
    assert found["decided"] == [{"step": 12, "chosen": "plan A", "cost_s": 2.0, "predicted_ms": 400.0, "measured_ms": 486.0}]


def request() -> BenchRequest:
    """Raises FormatError where the bench does not take a method."""
    methods = list(far.METHODS.values())
    return BenchRequest([far.JOB], [UNLIMITED], methods, device="sleeping", nodes=8, sites=far.SITES, wan="50ms", alone_steps=0)


@pytest.mark.parametrize("late", [3, 600])
def test_what_the_relay_did_between_sites_is_kept(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    counts = RelayCounts(10_000, 0, 7, 0, 0, late, 0.0042, 1.0, 0, 5_000_000)
    network = mock.create_autospec(EmulatedCluster, instance=True, sites=2)
    network.wan_counts.return_value, network.run.return_value = counts, 1
    network.__enter__.return_value = network
    monkeypatch.setattr("gradwire.bench.runner._cluster", lambda _: network)
    done = run_bench(request(), None, mock.MagicMock())
    assert done.between_sites == BetweenSites(
        frames=10_000, late_frames=late, latest_ms=4.2, full_queue_segments=7, dropped_frames=0, wire_bytes=5_000_000, cpu_s=1.0
    )
    asked = {"device": "sleeping", "sites": far.SITES, "wan": "50ms"}
    assert done.to_dict().items() >= asked.items() and "intra" not in done.to_dict()
    notes = [note for note in done.notes if "was not as ordered" in note]
    assert len(notes) == (late > 100) and all("600 of 10000 frames" in note for note in notes)


def test_methods_of_a_delay_run_in_several_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[BenchRequest] = []

    def run_bench(request: BenchRequest, *_: object) -> Any:
        asked.append(request)
        return SimpleNamespace(cell=lambda *_: None, notes=(), between_sites=None)

    for name, value in {"FOLDER": tmp_path, "PAGE": tmp_path / "page.md", "run_bench": run_bench}.items():
        monkeypatch.setattr(far, name, value)
    monkeypatch.setattr(far, "emulation_problem", lambda: None)
    assert far.run(["--delays", "50"]) == 1, "every method failed"
    assert [each.steps // each.turn_steps for each in asked] == [4]
