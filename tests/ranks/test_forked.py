"""Processes that are forked from one that trains: they evaluate and save, and are told where they cannot train."""

import atexit
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import Worlds, digest, seeded

import gradwire as gw

PLANS: dict[str, Any] = {
    "compressed": gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2))),
    "plain sums": gw.Uniform(gw.Identity(), scheme="allreduce"),
    "pipelined": gw.Uniform(gw.Identity(), schedule=gw.Pipelined()),
    "shards": gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True)),
    "delayed": gw.Uniform(gw.QSGD(bits=4), schedule=gw.Delayed(k=None)),
    "local": gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule=gw.LocalSteps(every=2, delay=1)),
}


def in_a_fork(act: Callable[[], Any]) -> Any:
    """The result of a function in a forked process, which ends as an interpreter does."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        try:
            result = act()
        except BaseException as error:
            result = error
        os.write(writing, pickle.dumps(result))
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        data = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "it did not end"
    return pickle.loads(data)


class Script:
    def __init__(self, plan: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=plan)

    def loss(self, step: int) -> torch.Tensor:
        return self.model(torch.randn(5, 6, generator=seeded(step, dist.get_rank()))).square().mean()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.loss(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        try:
            return float(self.loss(99))
        finally:
            self.model.train()


def said(act: Callable[[], Any]) -> str:
    """The error that gradwire raises."""
    try:
        act()
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reads(plan: str) -> list[bool]:
    """Between steps with nothing under way: whether a forked process sees and saves what its parent does."""
    script = Script(PLANS[plan])
    script.train(0, 1, 2)

    def look() -> tuple[float, str, str]:
        return script.evaluate(), digest(script.model.state_dict().values()), digest(script.handle.state_dict().values())

    own = look()
    same = in_a_fork(look) == own
    script.train(3, 4)
    script.handle.detach()
    return [same]


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "shards"])
def test_a_forked_process_evaluates_and_saves(worlds: Worlds, plan: str) -> None:
    assert worlds.run(2, reads, plan) == [[True]] * 2


def trains(plan: str, forks: bool) -> tuple[list[str], str]:
    """What is said of a backward, of a training step, and of what needs other ranks, in a process that is forked when something
    may be under way. After `detach()` it trains. Then the weights of this process, which goes on."""
    script, words = Script(PLANS[plan]), list[str]()
    script.train(0, 1, 2)

    def child() -> list[str]:
        handle, told = script.handle, [said(lambda: script.train(3)), said(lambda: script.train(3))]
        told.append(said(lambda: handle.load_state_dict(handle.state_dict())))
        told.append(said(handle.attach))
        handle.detach()
        before = digest(script.model.parameters())
        script.train(3)
        return [*told, str(digest(script.model.parameters()) != before)]

    if forks:
        words = in_a_fork(child)
    script.train(3, 4)
    script.handle.flush()
    weights = digest(script.model.parameters())
    script.handle.detach()
    return words, weights


@pytest.mark.parametrize("plan", PLANS)
def test_a_forked_process_that_trains_is_told_and_its_parent_goes_on(worlds: Worlds, plan: str) -> None:
    for (words, weights), (_, expected) in zip(
        worlds.run(2, trains, plan, True), worlds.run(2, trains, plan, False), strict=True
    ):
        *told, trained = words
        assert all(each.startswith("StepStateError: ") and "this process was forked from process" in each for each in told), told
        assert "detach()" in told[0] and "spawn" in told[0]
        assert trained == "True"
        assert weights == expected


def looks_in_the_middle(plan: str) -> tuple[list[str], list[str]]:
    """What is said of looks in processes that are forked while something may be under way: they end."""
    script, looks, ends = Script(PLANS[plan]), list[str](), list[str]()

    def look() -> str:
        return said(script.model.state_dict) or said(script.evaluate)

    for step in range(4):
        script.train(step)
        looks.append(in_a_fork(look))
        ends.append(in_a_fork(lambda: ""))
    script.handle.detach()
    return looks, ends


@pytest.mark.parametrize("plan", PLANS)
def test_a_look_in_a_forked_process_does_not_wait_for_threads_that_it_has_not(worlds: Worlds, plan: str) -> None:
    for looks, ends in worlds.run(2, looks_in_the_middle, plan):
        assert all("this process was forked" in words or not words for words in looks), looks
        assert ends == [""] * 4


def detaches(plan: str) -> list[tuple[bool, list[str]]]:
    """Without and with a flush before the fork: whether a forked process that detaches has its parent's weights, and what was
    warned of there."""
    script, found = Script(PLANS[plan]), list[tuple[bool, list[str]]]()

    def child() -> tuple[str, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            script.handle.detach()
        return digest(script.model.parameters()), [str(each.message) for each in caught if each.filename == __file__]

    script.train(0, 1, 2)
    for flushes in (False, True):
        script.train(3)
        if flushes:
            script.handle.flush()
        weights, told = in_a_fork(child)
        found.append((weights == digest(script.model.parameters()), told))
    script.handle.detach()
    return found


@pytest.mark.parametrize("plan", ["pipelined", "delayed"])
def test_after_a_flush_a_forked_process_has_the_last_update(worlds: Worlds, plan: str) -> None:
    for (_, told), after_a_flush in worlds.run(2, detaches, plan):
        assert len(told) == 1 and "Call handle.flush() in the parent before the fork." in told[0]
        assert after_a_flush == (True, [])


def averages() -> tuple[str, list[float]]:
    tensor = torch.full((3000,), 1.0 + dist.get_rank())
    exchange = gw.Exchange({"a": tensor}, plan=gw.QSGD(bits=8))
    exchange.average_()
    words = in_a_fork(lambda: said(exchange.average_))
    exchange.average_()
    exchange.close()
    return words, [round(float(each), 3) for each in (tensor.min(), tensor.max())]


def test_an_exchange_in_a_forked_process_is_refused(worlds: Worlds) -> None:
    for words, ends in worlds.run(2, averages):
        assert words.startswith("StepStateError: this process was forked")
        assert ends == [1.5, 1.5]
