"""A bit that flips on the way from one rank to another: all ranks raise in that step, and none uses its gradients."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flips import FlippingBackend, FlippingWire
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.core import SHARED_MEMORY
from gradwire.transport import rendezvous


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


def step_with_a_flip(plan: Any, phase: int, wired: bool, at_step: int) -> tuple[str, str, int, bool]:
    """Rank 0's message of this phase to rank 1 is changed. The error, digest of the weights, its step, and whether they are those
    from before the step."""
    able, os.environ[SHARED_MEMORY] = rendezvous.why_no_wires, "off"
    if not wired:
        rendezvous.why_no_wires = lambda: "the test wants none"
    model = Given([3000, 20, 500])
    handle = gw.parallelize(model, plan=plan)
    rendezvous.why_no_wires = able
    del os.environ[SHARED_MEMORY]
    link = handle.session.lanes.data[0].link
    assert (link.wire is not None) == wired
    sends = dist.get_rank() == 0
    if wired and sends:
        between = FlippingWire(link.wire, 1)
    elif sends:
        link.backend = FlippingBackend(link.backend)
    for step in range(6):
        model.zero_grad()
        before = digest(model.parameters())
        if step == at_step and sends and wired:
            (reduce,), *_ = handle.session.exchange._buckets[0].chunks[0].phases
            between.flip_at = 16 + 5 + (16 + reduce.sent[1].nbytes if phase else 0)
        elif step == at_step and sends:
            link.backend.at_part = phase
        try:
            model(model.random_gradients(dist.get_rank(), step)).backward()
        except gw.CommunicationError as error:
            with pytest.raises(gw.CommunicationError):
                model(model.random_gradients(dist.get_rank(), step)).backward()
            handle.detach()
            return str(error), digest(model.parameters()), step, before == digest(model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    raise AssertionError("nobody noticed")


PLANS = {
    "two phases": gw.QSGD(bits=4),
    "feedback": gw.ErrorFeedback(gw.QSGD(bits=2)),
    "vectors": gw.Uniform(gw.QSGD(bits=2)),
}


@pytest.mark.parametrize("wired", [True, False], ids=["wire", "gloo"])
@pytest.mark.parametrize("phase", [0, 1], ids=["reduce", "gather"])
@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_are_told_in_the_same_step(worlds: Worlds, plan: str, phase: int, wired: bool) -> None:
    (first, *weights), (second, *others) = worlds.run(2, step_with_a_flip, PLANS[plan], phase, wired, 3)
    assert weights == others and weights[1:] == [3, True]
    word = ("alltoall", "allgather")[phase]
    assert "step 3: bytes of bucket 0 (p" in second and word in second
    assert "changed on their way from rank 0 to rank 1" in second and "Restart all ranks from a checkpoint" in second
    assert second.partition(" What lanes did is in ")[0] in first and "rank 1 says" in first
