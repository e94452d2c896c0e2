"""The tables of the league between two sites; nothing is measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import wan
from benchmarks.campaigns.requests import RepositoryRequest
from benchmarks.campaigns.rivals import RIVAL_PREFIX, every_of
from gradwire.bench.names import UNLIMITED
from gradwire.errors import FormatError


def course(last: float, first: float = 4.0) -> dict[str, Any]:
    """A loss that falls in a line for 10 seconds."""
    return {"steps": 10, "samples": 160, "step_ms": 1000.0, "held_out": [(0.0, first), (10.0, last)]}


def result(**more: Any) -> dict[str, Any]:
    methods = {"DDP": course(3.5), "torchft's DiLoCo, float32": course(3.0), "auto": course(3.2), "islands, 4 bits": course(2.0)}
    return {"job": "transformer", "delay_ms": 50, "mbps": 100, "loss_percent": 0.1, "seconds": 10.0, "methods": methods, **more}


def test_the_goal_is_the_last_loss_of_the_best_other_method() -> None:
    cell = result()
    assert wan.best_of(cell, wan.RIVALS) == "torchft's DiLoCo, float32"
    assert wan.sooner(cell, "islands, 4 bits") == pytest.approx(2.0)
    assert wan.sooner(cell, "auto") is None
    [row] = wan.summary_of([cell])[2:]
    assert "0.1 % lost" in row and row.endswith("| islands, 4 bits | 2.00 | never |")


def test_a_method_that_failed_sets_no_goal_and_is_named() -> None:
    cell = result(failed={"torchft's DiLoCo, float32": "rank 1 died"}, unfinished=True)
    assert wan.best_of(cell, wan.RIVALS) == "DDP"
    table = "\n".join(wan.table_of(cell))
    assert "torchft's DiLoCo, float32 (failed)" in table and "not to its end" in table
    del cell["methods"]["DDP"]
    assert wan.sooner(cell, "auto") is None and "| - | - |" in wan.summary_of([cell])[2]


def test_methods_that_came_later_join_the_others(tmp_path: Path) -> None:
    later = "Hivemind, mean of weights, float16"
    raced = {later: course(2.9), "auto": course(2.8)}
    cell = wan.merged(result()["methods"], result(methods=raced, unfinished=True), raced)
    assert list(cell["methods"]) == ["DDP", "torchft's DiLoCo, float32", later, "auto", "islands, 4 bits"]
    assert cell["methods"]["auto"] == course(2.8) | {"later": True}
    assert f"in a run of their own: {later}, auto." in "\n".join(wan.table_of(cell))
    path = tmp_path / "cell.json"
    path.write_text(json.dumps(cell))
    assert list(wan.measured_before(path, 10.0)) == ["DDP", "torchft's DiLoCo, float32", "islands, 4 bits"]
    path.write_text(json.dumps(wan.merged({}, result(failed={"auto": "it broke"}), ())))
    assert "auto" not in wan.measured_before(path, 10.0) and "DDP" in wan.measured_before(path, 10.0)
    assert wan.measured_before(path, 45.0) == {} and wan.measured_before(tmp_path / "none.json", 10.0) == {}


def test_the_picture_has_a_panel_for_each_cell(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    wan.draw(tmp_path / "wan.png", [result(), result(delay_ms=100)])
    assert (tmp_path / "wan.png").stat().st_size > 5_000


def test_the_bench_takes_every_method() -> None:
    methods = [method for method in wan.METHODS.values() if not method.startswith(RIVAL_PREFIX)]
    RepositoryRequest(["transformer"], [UNLIMITED], methods, nodes=wan.NODES, sites=wan.SITES, wan="50ms rate 20mbit loss 0.1%")
    assert every_of(wan.METHODS["islands, 4 bits"]) == wan.EVERY
    with pytest.raises(FormatError, match="islands@30"):
        RepositoryRequest(["transformer"], [UNLIMITED], ["islands@none"])
