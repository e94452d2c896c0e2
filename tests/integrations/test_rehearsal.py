"""The step that a member makes alone before it asks for others."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.exchange import Exchange, TensorMeta
from gradwire.integrations import rehearsal
from gradwire.integrations.rehearsal import rehearse

TENSORS = {"weight": TensorMeta((64, 48)), "half": TensorMeta((7,), torch.bfloat16)}
TWO_BITS = gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors in each whole step of an exchange."""
    made: list[int] = []
    average = Exchange.average_

    def counted(self: Exchange, tensors: Any) -> None:
        average(self, tensors)
        made.append(len(tensors))

    monkeypatch.setattr(rehearsal.Exchange, "average_", counted)
    return made


@pytest.mark.parametrize("plan", [gw.Identity(), gw.QSGD(bits=4), TWO_BITS, gw.PowerSGD(rank=2)], ids=repr)
def test_it_makes_a_step_and_leaves_no_thread(steps: list[int], plan: Any) -> None:
    before = set(threading.enumerate())
    rehearse(TENSORS, plan, timedelta(seconds=60))
    assert steps == [2]
    assert not [each.name for each in set(threading.enumerate()) - before if each.name.startswith("gradwire")]


@pytest.mark.parametrize("plan", [gw.SignSGD(), gw.Policy(default=gw.QSGD(bits=4), rules=[("half", gw.Signum())])], ids=repr)
def test_votes_are_refused(plan: Any) -> None:
    """Zeros of joiners would vote."""
    with pytest.raises(gw.PlanError, match="a vote of all members"):
        rehearse(TENSORS, plan, timedelta(seconds=60))


def test_a_plan_that_cannot_run_is_left_to_the_meeting(steps: list[int]) -> None:
    rehearse(TENSORS, "no such plan", timedelta(seconds=60))
    assert steps == []
