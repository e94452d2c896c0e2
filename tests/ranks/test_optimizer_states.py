"""The state of optimizers: the same on ranks that step by the same gradients, and each rank's own in local steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_auto_schedules import InTurn
from threads import Threads, built, here
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from worlds import Worlds, digest, seeded

import gradwire as gw

EXACT = gw.Identity()
LOCAL = gw.Uniform(EXACT, schedule=gw.LocalSteps(every=4))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Job:
    """A small model; one layer is in channels_last, and another has a gradient in some steps only."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer] = adam) -> None:
        torch.manual_seed(0)
        convolution = torch.nn.Conv2d(3, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.model = torch.nn.ModuleDict({"conv": convolution, "often": torch.nn.Linear(64, 5), "rarely": torch.nn.Linear(5, 5)})
        self.model.forward = self._forward  # type: ignore[method-assign]
        self.optimizer, self.steps = make_optimizer(self.model.parameters()), 0

    def _forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.model["often"](self.model["conv"](inputs).relu().flatten(1))
        return self.model["rarely"](found) if self.steps % 3 == 1 else found

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model.train()
            inputs = torch.randn(2, 3, 4, 4, generator=seeded(dist.get_rank(), self.steps))
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1

    def digests(self) -> tuple[str, list[tuple[int, list[tuple[str, str]]]]]:
        """Of the weights, and of the optimizer's state."""
        state = self.optimizer.state_dict()["state"]
        kept = [(at, [(key, digest([each])) for key, each in sorted(values.items())]) for at, values in sorted(state.items())]
        return digest(self.model.parameters()), kept


def same(told: list[Any]) -> bool:
    return all(each == told[0] for each in told)


def changed(make_optimizer: Callable[[Any], torch.optim.Optimizer], again: bool) -> list[Any]:
    """The state in and after local steps, as a driver changes the schedule, or a script that parallelizes again."""
    job = Job(make_optimizer)
    handle = gw.parallelize(job.model, job.optimizer, plan=LOCAL if again else EXACT, drift_check_steps=1)
    if not again:
        handle.session.driver = InTurn([gw.Uniform(EXACT), LOCAL])  # three exchanges of each
        job.train(3)
    job.train(11)
    assert handle.plan.schedule.word == "local"
    told = [job.digests()[1]]
    job.train(1)
    if again:
        handle.detach()
        handle = gw.parallelize(job.model, job.optimizer, plan=EXACT, drift_check_steps=1)
    job.train(1)
    assert handle.plan.schedule.word == "backward"
    told.append(job.digests())
    job.train(1)
    told.append(job.digests())
    handle.detach()
    return told


@pytest.mark.parametrize("again", [False, True], ids=["changed", "parallelized again"])
@pytest.mark.parametrize("make_optimizer", [adam, momentum])
def test_local_steps_have_states_of_their_own_and_other_schedules_after_them_one(
    worlds: Worlds, make_optimizer: Callable[[Any], torch.optim.Optimizer], again: bool
) -> None:
    alone, begun, ended = zip(*worlds.run(3, changed, make_optimizer, again), strict=True)
    assert not same(list(alone)), "each rank trains alone: else this test shows nothing"
    assert same(list(begun)) and same(list(ended))


def loaded(ranks: tuple[int, ...], plan: gw.Policy) -> tuple[list[Any], list[Any]]:
    """The state after a start where only some ranks have one, before and after a few steps."""
    job = Job()
    if dist.get_rank() in ranks:
        job.train(1 + dist.get_rank())
    handle = gw.parallelize(job.model, job.optimizer, plan=plan)
    begun = job.digests()
    job.train(6)
    handle.flush()
    handle.detach()
    return [*begun], [*job.digests()]


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_a_start_takes_rank_0s_optimizer_state(worlds: Worlds, ranks: tuple[int, ...]) -> None:
    begun, ended = zip(*worlds.run(2, loaded, ranks, gw.Uniform(EXACT)), strict=True)
    assert same(list(begun)) and same(list(ended))
    assert bool(begun[0][1]) == (0 in ranks)


def test_a_start_of_local_steps_leaves_each_rank_its_state(worlds: Worlds) -> None:
    first, second = (begun for begun, _ in worlds.run(2, loaded, (0, 1), LOCAL))
    assert first[0] == second[0] and first[1] != second[1]


def some_without_optimizer() -> bool:
    """Rank 0 passes its optimizer, and rank 1 none, which the schedule does not need."""
    job, first = Job(), dist.get_rank() == 0
    job.train(2)
    handle = gw.parallelize(job.model, job.optimizer if first else None, plan=EXACT)
    job.train(2)
    handle.detach()
    return True


def test_a_rank_that_passes_no_optimizer_keeps_nobody_waiting(worlds: Worlds) -> None:
    assert worlds.run(2, some_without_optimizer) == [True, True]


def uneven(schedule: str, more: int) -> list[Any]:
    job = Job()
    plan = gw.Uniform(EXACT, schedule=schedule)
    handle = gw.parallelize(job.model, job.optimizer, plan=plan, drift_check_steps=2)
    told = []
    for _ in range(3):
        with handle.join():
            job.train(5 + (3 if dist.get_rank() == more else 0))
        told.append(job.digests())
        job.steps = 8 * len(told)
    handle.detach()
    return told


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("schedule", ["backward", "pipelined", "delayed"])
def test_after_uneven_epochs_all_ranks_have_the_state_of_the_one_that_trained_last(
    worlds: Worlds, schedule: str, more: int
) -> None:
    assert same(worlds.run(2, uneven, schedule, more))


def gradients_after(set_to_none: bool) -> list[Any]:
    job = Job(momentum)
    handle = gw.parallelize(job.model, job.optimizer, plan=EXACT)
    with handle.join():
        for _ in range(2 + 2 * dist.get_rank()):
            job.train(1)
            if not set_to_none:
                for parameter in job.model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
    handle.detach()
    return [None if each.grad is None else float(each.grad.abs().max()) for each in job.model.parameters()]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_without_a_batch_leave_no_gradient_to_which_the_next_backward_adds(worlds: Worlds, set_to_none: bool) -> None:
    for left in worlds.run(2, gradients_after, set_to_none):
        assert left == [None if set_to_none else 0.0] * 6


class PassesOn:
    """An optimizer in a wrapper that passes the closure by its place, as Accelerate's does."""

    def __init__(self, wrapped: torch.optim.Optimizer) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def step(self, closure: Any = None) -> None:
        self._wrapped.step(closure)


def with_state_made(schedule: Any, makes: bool, wrapped: bool = False) -> str:
    """The weights after some steps. makes: torch makes the state of the new optimizer before, on rank 0 alone."""
    model = built(0, lambda: torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = gw.Uniform(gw.Identity(), schedule=schedule)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    if makes and not here.rank:
        given: Any = [PassesOn(optimizer)] if wrapped else optimizer
        get_optimizer_state_dict(model, given)
    for step in range(4):
        model(torch.full((1, 3), float(step + here.rank))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return digest(model.parameters())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("schedule", [gw.Backward(), gw.LocalSteps(every=4), gw.Delayed()], ids=str)
def test_the_step_by_which_torch_makes_a_state_is_no_step_of_a_schedule(threads: Threads, schedule: Any, wrapped: bool) -> None:
    made, plain = (threads.run(2, with_state_made, schedule, makes, wrapped) for makes in (True, False))
    assert made == plain
