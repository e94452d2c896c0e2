"""Methods of handles that a script calls under `torch.inference_mode()`: what they make serves training afterwards."""

import runpy
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from threads import Threads, built, here
from torch import nn
from worlds import digest, seeded

import gradwire as gw
from gradwire.engine import gradients

TWO_BITS = gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls"), weights=0.9)
PLANS: dict[str, Any] = {
    "plain sums": gw.Uniform(gw.Identity(), scheme="allreduce"),
    "error feedback": gw.Uniform(TWO_BITS),
    "low rank": gw.Uniform(gw.PowerSGD(rank=1, start_step=0)),
    "other specs later": gw.Uniform(gw.PowerSGD(rank=1, start_step=3), schedule=gw.Delayed(k=None)),
    "pipelined": gw.Uniform(gw.Identity(), schedule=gw.Pipelined()),
    "shards": gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True)),
    "delayed": gw.Uniform(TWO_BITS, schedule=gw.Delayed(k=2)),
    "local": gw.Uniform(TWO_BITS, schedule=gw.LocalSteps(every=2, outer=gw.Nesterov(), delay=1)),
}


class Script:
    """A model in training. `inside`: whether each call of the handle is in inference mode."""

    def __init__(self, plan: Any, inside: bool) -> None:
        self.inside, self.steps = inside, 0
        self.model: Any = built(0, lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        with self.mode():
            self.handle = gw.parallelize(self.model, self.optimizer, plan=plan, process_group=here.group)

    def mode(self) -> Any:
        return torch.inference_mode() if self.inside else nullcontext()

    def train(self, steps: int, raises: bool = False) -> None:
        for _ in range(steps):
            loss = self.model(torch.randn(5, 6, generator=seeded(self.steps, here.rank))).square().mean()
            self.steps += 1
            if raises:
                raise ValueError("as ordered")
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def trained(name: str, inside: bool) -> Iterator[str]:
    script = Script(PLANS[name], inside)
    script.train(3)
    yield "begun"
    with script.mode():
        state = script.handle.state_dict()
        script.handle.load_state_dict({key: value.clone() for key, value in state.items()})
    script.train(3)
    yield "loaded"
    with suppress(ValueError):
        script.train(1, raises=True)
    with script.mode():
        script.handle.reset()
    script.train(3)
    yield "reset"
    if name != "shards":  # whose parameters stay
        script.model[0].requires_grad_(False)
        with script.mode():
            script.handle.attach()
        script.train(2)
        script.model[0].requires_grad_(True)
        with script.mode():
            script.handle.attach()
        script.train(3)
    script.handle.detach()
    yield digest(script.model.state_dict().values())


def ends(name: str, inside: bool) -> list[str]:
    return list(trained(name, inside))


@pytest.mark.parametrize("name", PLANS)
def test_handles_do_in_inference_mode_what_they_do_outside(threads: Threads, name: str) -> None:
    assert threads.run(2, ends, name, True) == threads.run(2, ends, name, False)


def averaged(spec: gw.Spec, inside: bool) -> list[float]:
    tensor = torch.randn(3000, generator=seeded(here.rank))
    mode = torch.inference_mode if inside else nullcontext
    with mode():
        exchange = gw.Exchange({"a": tensor}, plan=spec, process_group=here.group)
    exchange.average_()
    with mode():
        exchange.load_state_dict(exchange.state_dict())
        exchange.change_to(gw.Plan.from_dict(exchange.plan.to_dict()))
    for _ in range(2):
        exchange.average_()
    exchange.close()
    return tensor.tolist()


@pytest.mark.parametrize("spec", [gw.Identity(), TWO_BITS, gw.PowerSGD(rank=1, start_step=1)], ids=repr)
def test_exchanges_do_too(threads: Threads, spec: gw.Spec) -> None:
    assert threads.run(2, averaged, spec, True) == threads.run(2, averaged, spec, False)


def test_gradwire_may_be_loaded_in_inference_mode() -> None:
    """The first use of `gw.parallelize` loads it."""
    with torch.inference_mode():
        found = runpy.run_path(gradients.__file__)
    assert found["_BASE_USES"] == gradients._BASE_USES
