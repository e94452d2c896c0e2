"""What the benchmark of local steps keeps, and the tables it makes; nothing is measured."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import local, local_equal, local_step
from benchmarks import race as races
from benchmarks.campaigns import rivals
from benchmarks.campaigns.requests import RepositoryRequest
from benchmarks.paired import REFERENCE
from benchmarks.race import Race, is_whole
from gradwire.auto.accuracy import SPARSELOCO
from gradwire.auto.local_losses import at_constant_rate, steps_to_make_up
from gradwire.bench.names import check_method
from gradwire.bench.results import Cell, Decided, StepEvent
from gradwire.errors import FormatError

OURS, OTHER = "local, 4 bits", "SparseLoCo"


def turn(race: Race, name: str, steps: int, loss: float, first: int = 0) -> bool:
    """Steps of 100 ms, and an evaluation."""
    for step in range(first, first + steps):
        assert not race.told(StepEvent(local.METHODS[name], step, 1e5, 3.0))
    return race.told(StepEvent(local.METHODS[name], first + steps - 1, 1e5, 3.0, held_out=loss))


def race_of(*names: str) -> Race:
    about = {"link": "10mbit", "nodes": 2, "every": 30, "seconds": 60.0}
    race = Race({name: local.METHODS[name] for name in names}, about, local.JOB, "10mbit", nodes=2, race_s=60.0)
    for name in names:
        race.told(StepEvent(local.METHODS[name], -1, 0.0, 0.0, held_out=4.0))
        turn(race, name, 10, 3.0)
    return race


def ended(name: str, failure: str | None = None) -> Cell:
    us = [] if failure else [1e5] * 20
    held_out = () if failure else ((0, 4.0), (20, 2.0))
    return Cell(
        job=local.JOB, link="10mbit", gbps=0.01, method=local.METHODS[name], failure=failure, step_us=us, held_out=held_out
    )  # fmt: skip


def test_after_each_turn_there_is_a_result() -> None:
    race = race_of(local.AUTO, OURS)
    found = race.result()
    assert found["unfinished"] and found["methods"][OURS]["held_out"] == [(0.0, 4.0), (pytest.approx(1.0), 3.0)]
    assert turn(race, OURS, 5, 2.5, first=10)
    assert race.result()["methods"][OURS] | {"held_out": []} == {
        "steps": 15, "samples": 15 * race._batch, "step_ms": pytest.approx(100.0), "held_out": []
    }  # fmt: skip


def test_a_method_that_fails_is_named_and_the_others_stay(tmp_path: Path) -> None:
    race = race_of(local.AUTO, OURS, OTHER)
    race.ended([ended(local.AUTO), ended(OURS, "rank 1: ValueError: diverged"), ended(OTHER)])
    found, path = race.result(), tmp_path / "10mbit-2-30.json"
    assert race.failed == {OURS: "rank 1: ValueError: diverged"} == found["failed"]
    assert found["methods"][OTHER]["steps"] == 20 and found["methods"][OURS]["steps"] == 10
    path.write_text(json.dumps(found))
    assert not is_whole(path)
    table = "\n".join(local.table_of(found))
    assert f"{OURS} (failed" in table and f"| {OTHER} | 20 |" in table and "| 2.0 | 1.00 |" in table


def test_where_the_ranks_end_all_have_failed_and_what_was_told_stays() -> None:
    race = race_of(local.AUTO, OURS)
    race.ended([ended(local.AUTO, "exit code 1"), ended(OURS, "exit code 1")])
    found = race.result()
    assert found["methods"].keys() == found["failed"].keys() == {local.AUTO, OURS}
    assert "never" in "\n".join(local.table_of(found))  # there is no goal


def test_a_whole_run_is_not_measured_again(tmp_path: Path) -> None:
    race, path = race_of(local.AUTO), tmp_path / "10mbit-2-30.json"
    race.ended([ended(local.AUTO)])
    path.write_text(json.dumps(race.result()))
    assert is_whole(path) and not is_whole(tmp_path / "none.json")


def test_a_run_with_a_failure_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """And with the results of all links."""
    links: list[str] = []

    def run_bench(request: Any, problem: None, watch: Any) -> Any:
        links.extend(request.links)
        assert not any(method.startswith("rival:") for method in request.methods)
        for method in request.methods:
            watch.step(StepEvent(method, 0, 1e5, 3.0))
            watch.step(StepEvent(method, 0, 1e5, 3.0, held_out=3.0))
        failed = "it broke" if len(links) == 1 else None
        cells = [
            ended(name, failed if name == OURS else None) for name in local.METHODS if name == local.AUTO or "4 bits" in name
        ]
        return type("Done", (), {"cells": cells})

    monkeypatch.setattr(races, "run_bench", run_bench)
    monkeypatch.setattr(local, "emulation_problem", lambda: None)
    monkeypatch.setattr(local, "absent", lambda _: "torchft is not here")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{local.BEGIN}\nold\n{local.END}\nafter\n")
    monkeypatch.setattr(local, "PAGE", page)
    monkeypatch.setattr(local, "FOLDER", tmp_path / "local")
    arguments = ["--links", "10mbit", "20mbit", "--only", "4 bits", "torchft"]
    assert local.run(arguments) == 1
    said = capsys.readouterr()
    assert f"10mbit: {OURS} failed: it broke" in said.err and "torchft is not here" in said.err
    assert links == ["10mbit", "20mbit"] and sorted(path.name for path in local.FOLDER.iterdir()) == [
        "10mbit-2-30.json",
        "20mbit-2-30.json",
    ]
    assert local.run(arguments) == 0 and links[2:] == ["10mbit"], "only what failed is measured again"
    made = page.read_text()
    assert made.index("before") < made.index("10mbit, 2 nodes") < made.index("20mbit, 2 nodes") < made.index("after")
    assert "old" not in made

    path = local.FOLDER / "10mbit-2-30.json"
    found = json.loads(path.read_text())
    found["methods"][OTHER] = found["methods"][OURS]
    path.write_text(json.dumps(found))
    assert local.run([*arguments, "--again"]) == 0
    kept = json.loads(path.read_text())["methods"]
    assert kept[OTHER] == found["methods"][OTHER] | {"earlier": True} and "earlier" not in kept[OURS]
    assert page.read_text().count(f"{OTHER} (in an earlier run)") == 1
    assert local.run([*arguments, "--again", "--seconds", "60"]) == 0
    assert OTHER not in json.loads(path.read_text())["methods"], "of other seconds"


def test_other_periods_have_their_own_methods() -> None:
    for every in (5, 10):
        for name, method in local.methods_of(every).items():
            if not method.startswith(rivals.RIVAL_PREFIX):
                assert check_method(method) == method
            assert name in (local.AUTO, local.WITH_LOCAL) or f"@{every}" in method or f'"every": {every}' in method


def test_what_was_said_is_beside_what_it_took() -> None:
    """Steps of 100 ms. Auto needs 20 of them for its last loss. With local steps it needs 10, and was said to need 16: 4 until it
    had decided, and 16 times 1.5 half steps."""
    race = race_of(local.AUTO, local.WITH_LOCAL, OTHER)
    said = Decided(chosen="local", plain=False, step=4, cost_us=0.0, learns_us=7.5e4)
    sooner = msgspec.structs.replace(ended(local.WITH_LOCAL), held_out=[(0, 4.0), (10, 2.0)], decided=[said])
    race.ended([ended(local.AUTO), sooner, ended(OTHER)])
    result = json.loads(json.dumps(race.result()))
    assert "decided" not in result["methods"][local.AUTO]
    found = {name: local.said_over_took(name, each, result) for name, each in result["methods"].items()}
    expected = local.expected_steps(OTHER, 30, 2)
    assert expected == at_constant_rate(steps_to_make_up(0.054), SPARSELOCO)
    assert found == {local.AUTO: None, local.WITH_LOCAL: pytest.approx(1.6), OTHER: pytest.approx(expected)}
    assert "| 1.0 | 2.00 | 1.60 |" in "\n".join(local.table_of(result))
    result["methods"][OTHER]["held_out"][-1][1] = 2.5
    assert local.said_over_took(OTHER, result["methods"][OTHER], result) is None, "it never had that loss"


def test_steps_for_one_are_a_table_of_the_longest_races() -> None:
    def race(every: int, steps: int) -> dict[str, Any]:
        curves = {local.AUTO: steps, OTHER: 2 * steps}
        curves = {
            name: {"steps": n, "step_ms": 1e3, "held_out": [(at, 4.0 - at / n) for at in range(0, n, 10)]}
            for name, n in curves.items()
        }
        return {"nodes": 2, "every": every, "methods": curves}

    made = "\n".join(local.steps_table([race(30, 600), race(5, 300), race(30, 140)]))
    assert "| SparseLoCo | 2 | 5 | 1.10 | 2.00 | 2.00 | - | - |" in made
    assert "| SparseLoCo | 2 | 30 | 1.87 | 2.00 | 2.00 | 2.00 | - |" in made
    assert local.steps_table([]) == []


def test_steps_beside_their_prediction() -> None:
    steps = {"floor": {"measured_ms": 100.0}, "streaming": {"measured_ms": 110.0, "predicted_ms": 99.0}}
    made = "\n".join(local_step.step_table({"links": {"10mbit, 2 nodes": steps}}))
    assert "| 10mbit, 2 nodes | streaming | 110 | 1.10 | 99 | 0.90 |" in made
    for method in local.STEPPED.values():
        assert check_method(method) == method


def test_rivals_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    request = RepositoryRequest(jobs=["mlp"], links=["unlimited"], methods=["ddp"])
    monkeypatch.setattr(rivals, "absent", lambda _: "")
    request.check_method("rival:torchft-diloco@30")
    request.check_method("rival:hivemind-mean@30")
    for wrong in ("rival:hivemind-mean", "rival:torchft-diloco@0", "rival:torchft-diloco", "rival:other@30"):
        with pytest.raises(FormatError, match="there is no method"):
            request.check_method(wrong)
    monkeypatch.setattr(rivals, "absent", lambda _: "torchft is not installed. Put it ..")
    with pytest.raises(FormatError, match="cannot run: torchft is not installed"):
        request.check_method("rival:torchft-diloco@30")


def test_the_table_at_equal_samples() -> None:
    arm = local_equal.arm_of("4 bits", 30)
    losses = {REFERENCE: (2.0, 2.2, 2.1), arm: (2.1, 2.31, 2.205)}
    finals = {name: {str(seed): {"loss": loss, "accuracy": 0.5} for seed, loss in enumerate(of)} for name, of in losses.items()}
    made = local_equal.equal_table({"steps": 300, "ranks": 4, "finals": {"transformer": finals}})
    assert "300 steps each, 3 seeds" in made
    assert "| transformer, 4 bits | - | - | +5.0% ± 0.0% | - |" in made
    assert local_equal.equal_table({}) == "Not measured yet.\n"


def test_the_arms_at_equal_samples_are_5_10_30_and_100_steps() -> None:
    assert {local_equal.arm_of("4 bits", every) for every in (5, 10, 30, 100)} <= local_equal.ARMS.keys()
    with pytest.raises(SystemExit):
        local.run(["--equal", "--steps", "250"])
