"""Machines that fall silent without closing: packets to and from a node vanish in the middle of training."""

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.testbed import EmulatedCluster, namespaces, permission_problem
from gradwire.testbed.namespaces import needs_user_namespace
from gradwire.transport.heartbeats import IDLE_S, INTERVAL_S, usual_silence_s

pytestmark = pytest.mark.network

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SOURCE = SUPPORT.parents[1] / "src"
RANKS = 3
FOUND_S, ROOM_S = 12.0, 10.0
"""What is promised, and what more a test that runs with others allows; the group's timeout is 60 s."""
BUSY_S = 11.0
"""What rank 0 computes in the scenario "alone", and hears of nothing meanwhile."""


@pytest.fixture
def cluster() -> Iterator[EmulatedCluster]:
    if (reason := permission_problem()) is not None or needs_user_namespace():
        pytest.skip(f"no network namespaces here: {reason or 'not root'}")
    with EmulatedCluster(RANKS, inter="1gbit") as made:
        yield made
    assert namespaces.existing(f"gradwire-{namespaces.this_owner()}-") == []


class Training:
    """Runs power_loss.py, and cuts the link of a node for as long as asked whenever the ranks are ready."""

    def __init__(self, cluster: EmulatedCluster, victims: dict[str, int], outage_s: float | None = None) -> None:
        """`victims`: by scenario the node to cut off, until all ranks were told where there is no `outage_s`."""
        self.told: dict[str, dict[int, tuple[float, str]]] = {scenario: {} for scenario in victims}
        """By scenario and rank: after how many seconds it was told what."""
        self.ends: dict[str, dict[int, str]] = {scenario: {} for scenario in victims}
        self._cluster, self._victims, self._outage_s = cluster, victims, outage_s
        self._cut_at, self.lines = 0.0, [""]
        paths = os.pathsep.join([str(SUPPORT), str(SOURCE)])
        argv = [sys.executable, "-u", str(SUPPORT / "power_loss.py"), *victims]
        code = cluster.run(argv, env={"PYTHONPATH": paths}, on_line=self._line, timeout=140.0)
        assert code == 0, "\n".join(self.lines[-40:])

    def _line(self, rank: int, stream: str, line: str) -> None:
        self.lines.append(f"[{rank}] {line}")
        what, scenario, words = [*line.split(" ", 2), "", ""][:3]
        if what == "ready" and (victim := self._victims[scenario]) >= 0:
            self._cluster.set_link(victim, up=False)
            self._cut_at = time.monotonic()
            if self._outage_s is not None:
                time.sleep(self._outage_s)
                self._cluster.set_link(victim, up=True)
        elif what == "told":
            self.told[scenario][rank] = time.monotonic() - self._cut_at, words
            if len(self.told[scenario]) == RANKS:
                self._cluster.set_link(self._victims[scenario], up=True)
        elif what == "end":
            self.ends[scenario][rank] = words


def expect_named(training: Training, scenario: str, victim: int, within_s: float) -> None:
    told = training.told[scenario]
    assert sorted(told) == list(range(RANKS)), training.lines
    for rank, (seconds, words) in told.items():
        alone = scenario == "alone" and rank == 0
        assert seconds < within_s + (BUSY_S if alone else 0), (scenario, rank, seconds, words)
        if rank == victim:
            found = re.search(r"ranks? ([\d, ]+) did not answer, nor did the kernel", words)  # those that it waited for
            assert found is not None and {*map(int, found[1].split(", "))} <= {*range(RANKS)} - {victim}, words
        else:
            assert f"rank {victim} did not answer, nor did the kernel" in words, words


@pytest.mark.timing
def test_a_machine_without_power_is_found_in_an_exchange(cluster: EmulatedCluster) -> None:
    expect_named(Training(cluster, {"wires": 2}), "wires", 2, FOUND_S)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    "victims",
    [{"gloo": 0, "alone": 2, "pipelined": 1}, {"sharded": 2, "delayed": 0, "local": 1}],
    ids=["gloo, alone, pipelined", "sharded, delayed, local"],
)
def test_a_machine_without_power_is_found_in_all_schedules(cluster: EmulatedCluster, victims: dict[str, int]) -> None:
    """Also where gloo carries gradients, and where a rank computes; and where the machine is the store's host."""
    training = Training(cluster, victims)
    for scenario, victim in victims.items():
        expect_named(training, scenario, victim, FOUND_S + ROOM_S)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_short_outage_is_survived(cluster: EmulatedCluster) -> None:
    outage_s = usual_silence_s(60.0) - 0.5
    training = Training(cluster, {"flap": 1}, outage_s)
    assert len(set(training.ends["flap"].values())) == 1, training.lines
    assert sorted(training.ends["flap"]) == list(range(RANKS)), training.lines


@pytest.mark.slow
@pytest.mark.thorough
def test_an_outage_that_is_asked_for_is_survived(cluster: EmulatedCluster) -> None:
    outage_s = 12.0
    assert usual_silence_s(60.0) + IDLE_S + INTERVAL_S < outage_s < 25.0, "the scenario's silence_s"
    training = Training(cluster, {"patient": 1}, outage_s)
    assert len(set(training.ends["patient"].values())) == 1, training.lines
    assert sorted(training.ends["patient"]) == list(range(RANKS)), training.lines


def test_the_usual_silence_follows_the_timeout() -> None:
    assert [usual_silence_s(timeout_s) for timeout_s in (5, 60, 600, 1800, 86400)] == [7, 7, 10, 30, 30]


@pytest.mark.parametrize("silence_s", [3.9, 120.5, float("nan"), "long"])
def test_a_silence_that_kernels_cannot_count_is_refused(silence_s: Any) -> None:
    with pytest.raises(gw.PlanError, match="silence_s is"):
        gw.parallelize(torch.nn.Linear(2, 2), silence_s=silence_s)


@pytest.mark.slow
@pytest.mark.thorough
def test_slow_and_stopped_ranks_are_not_taken_for_dead(cluster: EmulatedCluster) -> None:
    """One computes for 15 s, one is stopped for 12 s; the others' messages fill the windows of their connections."""
    training = Training(cluster, {"slow": -1})
    assert len(set(training.ends["slow"].values())) == 1, training.lines
    assert sorted(training.ends["slow"]) == list(range(RANKS)), training.lines
