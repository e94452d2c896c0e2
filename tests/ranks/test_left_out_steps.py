"""Steps that a GradScaler leaves out on one rank, in schedules whose ranks step by gradients of their own."""

from typing import Any

import pytest
import torch
from delayed_steps import momentum
from test_delayed import adam, make_model
from threads import Threads, here
from worlds import digest, seeded

import gradwire as gw

FEEDBACK = gw.ErrorFeedback(gw.QSGD(bits=4))
SCHEDULES: dict[str, tuple[gw.Spec, Any]] = {
    "delayed": (gw.Identity(), gw.Delayed(k=3)),
    "delayed with residuals": (FEEDBACK, gw.Delayed(k=4, warmup_steps=2)),
    "delayed without local updates": (FEEDBACK, gw.Delayed(k=None, local_update=False)),
    "local": (gw.Identity(), gw.LocalSteps(every=3)),
    "local with a delay": (gw.QSGD(bits=4), gw.LocalSteps(every=4, delay=2, mixing=0.5)),
}


def trained(name: str, make_optimizer: Any, scaled: bool, looks: bool) -> tuple[str, int, float]:
    """Rank 1's gradients overflow in two steps, which its scaler leaves out. Without a scaler it has no gradients there."""
    spec, schedule = SCHEDULES[name]
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(spec, schedule=schedule), process_group=here.group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, enabled=scaled)
    for step in range(11):
        overflows = here.rank == 1 and step in (0, 5)
        inputs = torch.randn(5, 6, generator=seeded(step, here.rank))
        scaler.scale(model(inputs).square().mean() * (torch.inf if overflows else 1.0)).backward()
        if looks:
            model.state_dict()
        if overflows and not scaled:
            optimizer.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    end = digest(model.state_dict().values()), handle.stats().steps, scaler.get_scale()
    handle.detach()
    return end


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_left_out_counts_as_one_without_gradients(threads: Threads, name: str, make_optimizer: Any, looks: bool) -> None:
    plain = threads.run(2, trained, name, make_optimizer, False, looks)
    scaled = threads.run(2, trained, name, make_optimizer, True, looks)
    assert [each[:2] for each in scaled] == [each[:2] for each in plain]
    assert scaled[0][0] == scaled[1][0]
    assert scaled[0][2] > scaled[1][2], "rank 1 left out no step"


def refused(scaled: bool) -> list[str]:
    model = make_model()
    optimizer = momentum(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Identity(), process_group=here.group)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    others = gw.Delayed(k=3), gw.LocalSteps(every=3), gw.Pipelined()
    told = [handle.session.why_not(gw.Uniform(gw.Identity(), schedule=each).plan(handle.session.tensors, 2)) for each in others]
    handle.detach()
    return told


def test_auto_leaves_them_out_where_a_loss_is_scaled(threads: Threads) -> None:
    for delayed, local, pipelined in threads.run(2, refused, True):
        assert delayed == local and delayed.startswith("a GradScaler scales the loss, and each rank") and not pipelined
    assert threads.run(2, refused, False) == [["", "", ""]] * 2
