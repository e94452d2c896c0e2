"""Pipelined steps that are interrupted, resumed, looked at by one rank alone, or cut off by a dead rank: nobody hangs."""

import gc
import io
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreters import Interpreters
from script_ends import End, ends_of
from test_pipelined import LOSSY, PLAIN, adamw, loss_of, policy, state_of, tied
from worlds import World, Worlds, digest

import gradwire as gw
from gradwire.engine.torch_hooks.lazy_tensors import is_later

TIMEOUT_S = 6.0


class Run:
    """A training that can be saved and taken up."""

    def __init__(self, schedule: str | gw.Pipelined, spec: Any = LOSSY) -> None:
        self.model = tied()
        self.optimizer = adamw(self.model)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=policy(spec, schedule))

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            loss_of(self.model, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.handle

    def end(self) -> list[str]:
        ends = [
            digest(self.model.parameters()),
            digest(state_of(self.optimizer)),
            digest(self.handle.state_dict().values()),
        ]
        self.handle.detach()
        return ends


def interrupted(schedule: str) -> list[list[str]]:
    whole, first, second = Run(schedule), Run(schedule), Run(schedule)
    whole.steps(0, 7)
    first.steps(0, 4)
    saved = io.BytesIO()
    torch.save([part.state_dict() for part in first.parts], saved)
    saved.seek(0)
    for part, state in zip(second.parts, torch.load(saved, weights_only=True), strict=True):
        part.load_state_dict(state)
    second.steps(4, 7)
    first.handle.detach()
    return [whole.end(), second.end()]


@pytest.mark.parametrize("schedule", ["pipelined", "backward"])
def test_a_resumed_run_equals_an_uninterrupted_one(worlds: Worlds, schedule: str) -> None:
    for whole, resumed in worlds.run(2, interrupted, schedule):
        assert whole == resumed


def one_rank_saves() -> list[str]:
    run = Run("pipelined")
    saved = []
    for step in range(3):
        run.steps(step, step + 1)
        if dist.get_rank() == 0:
            state = run.model.state_dict()
            saved.append(digest(value for name, value in state.items() if name != "head.weight"))  # tied
        dist.barrier()
        saved.append(digest(run.model.parameters()))
    run.handle.detach()
    return saved


def test_one_rank_may_save_before_a_barrier(worlds: Worlds) -> None:
    first, second = worlds.run(2, one_rank_saves)
    assert first[1::2] == second
    assert first[0::2] == first[1::2], "the saved weights are not those of the step"


class Held:
    """Keeps lanes of this rank from running gathers, until they may."""

    def __init__(self, handle: gw.Handle) -> None:
        self.may_go = threading.Event()
        self.phases: list[int] = []
        for bucket in handle.session.exchange._buckets:
            for chunk in bucket.chunks:
                chunk.run = self._held(chunk.run)  # type: ignore[method-assign]

    def _held(self, run: Any) -> Any:
        def held(phase: int, *arguments: Any) -> None:
            self.phases.append(phase)
            if phase == 1:
                assert self.may_go.wait(30)
            run(phase, *arguments)

        return held


def step_while_gathers_are_held() -> tuple[bool, bool, bool, list[int]]:
    run = Run("pipelined", PLAIN)
    run.steps(0, 2)
    run.handle.flush()
    held = Held(run.handle)
    run.steps(2, 3)
    weight = run.model.embed.weight
    later, frozen = is_later(weight), run.model.first.weight.requires_grad
    dist.barrier()
    threading.Timer(0.3, held.may_go.set).start()
    before = weight.detach().clone()  # waits
    usual = not is_later(weight)
    run.handle.detach()
    assert torch.equal(before, weight)
    return later and frozen, usual, held.may_go.is_set(), held.phases


def test_step_returns_while_gathers_run_and_the_first_use_waits(worlds: Worlds) -> None:
    for later, usual, let_go, phases in worlds.run(2, step_while_gathers_are_held):
        assert later and usual and let_go
        last_reduce = max(position for position, phase in enumerate(phases) if phase == 0)
        # each of two lanes begins its first gather when its own reduces are done
        assert phases[:last_reduce].count(1) <= 1


def die_before_the_gathers(victim: int) -> list[tuple[str, float]]:
    run = Run("pipelined")
    run.steps(0, 2)
    run.handle.flush()
    held = Held(run.handle)
    loss_of(run.model, 2).backward()
    while held.phases.count(1) < 2:
        time.sleep(0.01)
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    held.may_go.set()
    told = []
    for use in (
        run.optimizer.step,
        lambda: loss_of(run.model, 3),
        run.handle.flush,
        lambda: run.model.embed.weight.norm(),
    ):
        started = time.monotonic()
        try:
            use()
        except gw.GradwireError as error:
            told.append((f"{type(error).__name__}: {error}", time.monotonic() - started))
    run.handle.detach()
    assert not any(is_later(parameter) for parameter in run.model.parameters())
    return told


def test_a_rank_that_dies_before_its_gathers_is_named_by_the_others() -> None:
    with World(3, TIMEOUT_S) as world:
        world.start(die_before_the_gathers, 1)
        for rank, outcome in enumerate(world.collect(TIMEOUT_S + 25, needed={0, 2})):
            if rank == 1:
                continue
            assert outcome.kind == "returned", outcome.value
            assert len(outcome.value) == 3, "every use says so, but the step itself, which waits for nothing"
            assert all(words == outcome.value[0][0] for words, _ in outcome.value)
            words, seconds = outcome.value[0]
            assert words.startswith("CommunicationError") and "allgather" in words
            assert seconds < TIMEOUT_S + 15


def drop_after_a_step(schedule: gw.Pipelined, victim: int | None) -> tuple[list[bool], str]:
    """Drop all but one parameter while a step is under way. What of the rest is alive, and what the parameter says. The harness
    checks that no thread is left."""
    run, twin = Run(schedule, PLAIN), Run(schedule, PLAIN)
    run.steps(0, 2)
    twin.steps(0, 3)
    expected = digest([twin.model.embed.weight])
    held = Held(run.handle)
    loss_of(run.model, 2).backward()
    run.handle.session.exchange.await_gate()
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if victim is None:
        held.may_go.set()
    else:
        threading.Timer(0.5, held.may_go.set).start()
    run.optimizer.step()
    weight, parts = run.model.embed.weight, [weakref.ref(part) for part in (*run.parts, run.handle.session.lanes)]
    assert is_later(weight)
    del run, held
    gc.collect()
    try:
        said = str(digest([weight]) == expected)
    except gw.GradwireError as error:
        said = str(error)
    twin.handle.detach()
    return [part() is not None for part in parts], said


SCHEDULES = [gw.Pipelined(), gw.Pipelined(shard_optimizer=True)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["pipelined", "sharded"])
def test_a_model_that_is_dropped_after_a_step_is_stepped_and_freed(worlds: Worlds, schedule: gw.Pipelined) -> None:
    for alive, said in worlds.run(2, drop_after_a_step, schedule, None):
        assert not any(alive)
        assert said == "True", "the weights are not those of the last step"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["pipelined", "sharded"])
def test_a_model_that_is_dropped_after_a_failure_is_freed(schedule: gw.Pipelined) -> None:
    """What is left of it raises the failure."""
    with World(2, TIMEOUT_S) as world:
        world.start(drop_after_a_step, schedule, 1)
        outcome = world.collect(TIMEOUT_S + 25, needed={0})[0]
    assert outcome.kind == "returned", outcome.value
    alive, said = outcome.value
    assert not any(alive)
    assert "rank 1 did not answer" in said


SCRIPT = """
import sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
import gradwire as gw

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ending = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
plan = gw.Uniform(gw.Identity(), schedule="pipelined", bucket_bytes=40_000)
handle = gw.parallelize(model, optimizer, plan=plan)
for step in range(3):
    if step == 2 and ending == "slow":
        handle.flush()
        for bucket in handle.session.exchange._buckets if rank == 1 else ():
            for chunk in bucket.chunks:
                chunk.run = lambda phase, *a, run=chunk.run: (time.sleep(1.2 * phase), run(phase, *a))
    model(torch.ones(4, 100)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if ending == "save":
    if rank == 0:
        torch.save(model.state_dict(), Path(sys.argv[0]).with_name("model.pt"))
    dist.barrier()
if ending == "slow" and rank == 1:
    handle.flush()
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def ends(interpreters: Interpreters, folder: Path) -> dict[str, End]:
    return ends_of(interpreters, SCRIPT, ["save", "slow"], folder)


@pytest.mark.parametrize("ending", ["save", "slow"])
def test_a_script_may_end_right_after_a_step(ends: dict[str, End], folder: Path, ending: str) -> None:
    """slow: the other rank's gathers take longer than interpreters wait for threads."""
    for rank in range(2):
        end = ends[f"{ending}.{rank}"]
        assert (end["exit"], end["out"]) == (0, "done\n"), end["err"]
        assert "Error" not in end["err"]
    if ending == "save":
        saved = torch.load(folder / "model.pt", weights_only=True)
        assert saved["0.weight"].isfinite().all()
