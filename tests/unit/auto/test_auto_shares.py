"""The parts of the samples that auto proposes to ranks of different speed; nothing is measured."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from benchmarks import unequal
from gradwire.auto import measuring
from gradwire.auto.changes import StepPace
from gradwire.auto.decision import AutoDecision, Tried
from gradwire.auto.driver import Auto
from gradwire.core import Cluster, Link
from gradwire.transport import MergedValues


class MadeUpMoments:
    """Gradients of two tensors in each of two steps; the second is the last one of its step."""

    def __init__(self, *_: object) -> None:
        self.rows = [[70.0, 100.0], [80.0, 110.0]]
        self.needed_s = self.wall_s = 1.0

    def ended(self, *_: float) -> None: ...

    def remove(self) -> None: ...


def speeds(inputs: float, other: Callable[[list[float]], list[float]]) -> tuple[float, ...]:
    """The speeds that a look finds, where another rank sends what `other` makes of this rank's time and inputs."""
    live: Any = SimpleNamespace(job=None, device=None, infos=[], inputs=inputs, hold=lambda on: None, queues=False)
    live.exchange = lambda numbers: lambda: [list(numbers), other(list(numbers))]
    live.merged = lambda most: MergedValues(b"", tuple(most))
    pace = StepPace()
    with (
        mock.patch.object(measuring, "StepMoments", MadeUpMoments),
        mock.patch.object(measuring, "Clock", mock.MagicMock()),
        mock.patch.object(measuring, "profile_of", lambda *_: None),
    ):
        look = measuring.Look(live)
        for _ in range(2):
            pace.step(None, 1.0)
            look.ended(live, 0.0, 120.0, pace)
    return look.speeds


def test_speed_is_input_elements_over_the_time_until_the_last_gradient() -> None:
    assert speeds(50.0, lambda own: own) == (0.5, 0.5)
    assert speeds(50.0, lambda own: [200.0, 25.0]) == (0.5, 0.125)


def test_batches_that_nobody_saw_count_as_equal() -> None:
    assert speeds(0.0, lambda own: [200.0, 25.0]) == (0.01, 0.005)


def test_of_each_moment_the_latest_rank_is_told() -> None:
    """Ranks exchange two numbers each, however many tensors there are; the moments are merged."""
    numbers, found = list[int](), list[list[float]]()
    live: Any = SimpleNamespace(job=None, device=None, infos=[], inputs=1, hold=lambda on: None, queues=False)
    live.exchange = lambda own: lambda: [numbers.append(len(own)) or [*own]]
    others = (130.0, 9.0, 0.5, 75.0, -math.inf, 70.0, -math.inf)
    live.merged = lambda most: MergedValues.of_parts([MergedValues(b"", tuple(most)), MergedValues(b"", others)])
    pace, moments = StepPace(), MadeUpMoments()
    moments.rows = [[70.0, 100.0], [80.0, math.nan]]
    with (
        mock.patch.object(measuring, "StepMoments", lambda *_: moments),
        mock.patch.object(measuring, "Clock", mock.MagicMock()),
        mock.patch.object(measuring, "profile_of", lambda live, infos, rows, *_: found.extend(rows)),
    ):
        look = measuring.Look(live, 1)
        pace.step(None, 1.0)
        assert look.ended(live, 0.0, 120.0, pace) == (None, 130.0)
    assert numbers == [2] and found[0][:3] == [75.0, 100.0, 80.0] and math.isnan(found[0][3]) and len(found) == 1


@pytest.mark.parametrize(("shares", "words"), [((2 / 3, 1 / 3), "33 to 67 %"), ((0.51, 0.49), ""), ((), "")])
def test_the_line_proposes_unequal_batches_where_they_help(shares: tuple[float, ...], words: str) -> None:
    plain = Tried("uncompressed in 1 bucket", 100.0, 100.0, 3)
    decision = AutoDecision(5, "at the start", plain, plain, (plain,), 5, 0.0, 0.0, batch_share=shares)
    assert ("handle.decision.batch_share" in str(decision)) == bool(words)
    assert words in str(decision)


@pytest.mark.parametrize(("shares", "count"), [((0.75, 0.25), 12), ((), None)])
def test_the_benchmark_of_unequal_ranks_takes_a_proposal_or_names_its_lack(shares: tuple[float, ...], count: int | None) -> None:
    trainer: Any = SimpleNamespace(handle=SimpleNamespace(decision=SimpleNamespace(batch_share=shares)), rank=0, count=None)
    with nullcontext() if shares else pytest.raises(RuntimeError, match="share processors"):
        assert unequal.Trainer.take_share(trainer)
    assert trainer.count == count


@pytest.mark.parametrize(("processors", "shares"), [(None, (0.75, 0.25)), (2.0, (0.75, 0.25)), (1.0, ())])
def test_ranks_that_share_processors_get_no_shares(processors: float | None, shares: tuple[float, ...]) -> None:
    link = Link(1.0, 1.0)
    driver = Auto("safe", ("backward",), 2)
    driver._speeds = (3.0, 1.0)
    driver._watch.cluster = Cluster(nodes=1, ranks_per_node=2, intra=link, inter=link, processors=processors)
    assert driver._batch_share() == shares
