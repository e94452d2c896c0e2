"""The tables of steps on many nodes; nothing is measured."""

from typing import Any

import pytest

from benchmarks import many_nodes
from benchmarks.many_nodes import AUTO, DDP, EXACT, FLOOR
from gradwire.bench.runner import BenchRequest


def result(nodes: int, **times: float | None) -> dict[str, Any]:
    found = dict.fromkeys(many_nodes.methods_of(nodes), 400.0) | {FLOOR: 200.0} | times
    methods = {name: {"step_ms": step_ms, "decided": [], "failure": None} for name, step_ms in found.items()}
    methods[FLOOR]["forward_ms"] = 70.0
    methods[AUTO] |= {"planned_mb": 3.0, "codec_ms": 10.0, "cpu_ms": 50.0}
    methods[AUTO]["decided"] = [{"step": 9, "chosen": "plan A", "predicted_ms": 380.0, "cost_s": 1.25}]
    return {"nodes": nodes, "job": "transformer", "link": "100mbit", "processors": 2, "methods": methods}


@pytest.mark.parametrize(("nodes", "cpu_ms", "bound"), [(4, 50.0, 310.0), (4, 160.0, 320.0), (16, 50.0, 400.0)])
def test_what_is_possible_is_the_largest_bound(nodes: int, cpu_ms: float, bound: float) -> None:
    """200 ms of computation, 70 of forward and 3 MB at 100 Mb/s in 240, or the processors of all ranks."""
    given = result(nodes)
    given["methods"][AUTO]["cpu_ms"] = cpu_ms
    assert many_nodes.possible_ms(given) == bound


def test_without_a_limit_computation_is_the_bound() -> None:
    given = result(4) | {"link": "unlimited"}
    assert many_nodes.possible_ms(given) == 200.0


def test_a_row_for_each_number_of_nodes() -> None:
    lines = many_nodes.tables_of([result(4, **{DDP: 800.0}), result(8, **{EXACT: 500.0, AUTO: None})])
    rows = [line for line in lines if line.startswith(("| 4 |", "| 8 |"))]
    assert rows[0] == "| 4 | 200 | 800 | 400 | 400 | 400 | 400 | 2.00 | 2.00 | 310 | 0.78 | 0.95 | 1.00 |"
    assert rows[1] == "| 8 | 200 | 400 | 500 | 400 | 400 | failed | - | 0.80 | failed | - | - | - |"
    assert many_nodes.chosen_of([result(4)])[2:] == ["| 4 | transformer | 100mbit | plan A | 9 | 1.2 |"]


@pytest.mark.parametrize("nodes", many_nodes.NODES)
def test_the_bench_takes_every_method(nodes: int) -> None:
    methods = list(many_nodes.methods_of(nodes).values())
    BenchRequest(list(many_nodes.JOBS), list(many_nodes.LINKS), methods, device="sleeping", nodes=nodes)


def test_the_page_speaks_of_what_was_measured() -> None:
    page = many_nodes.page_of([result(4), result(8)])
    assert "transformer has 6.09 million parameters.\n" in page and "BERT" not in page
    assert "2 bits with weights on 4, 3 bits with weights on 8.\n" in page
    assert "BERT-medium's layers 25.4 million.\n" in many_nodes.page_of([result(32), result(32) | {"job": "bert"}])
