"""Ranks that die, stall, raise or count wrong: the others raise in time, in words, and nobody hangs."""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from threads import Threads, here
from worlds import Given, Outcome, World, Worlds, gradwire_threads

import gradwire as gw
from gradwire.kernels import cpu

TIMEOUT_S = 6.0
"""Of the process group: within it the others raise."""
MARGIN_S = 12.0
"""For a machine that does other things too."""


def step_until_told(
    plan: gw.Policy, victim: int, how: int, at_step: int, busy_s: list[float], buffers: bool
) -> tuple[str, str, float, tuple[Any, ...]]:
    """Train; the victim sends itself a signal. The others return the error's type, words, seconds, and (ranks, step, bucket).

    `busy_s` is how long each rank computes before that step.
    """
    rank = dist.get_rank()
    model = Given([300, 2000, 5])
    if buffers:
        model.register_buffer("statistics", torch.zeros(3))
    gw.parallelize(model, plan=plan)
    for step in range(at_step + 1):
        gradients = model.random_gradients(rank, step)
        if step == at_step:
            if rank == victim:
                os.kill(os.getpid(), how)
                time.sleep(60)
            time.sleep(busy_s[rank])
            started = time.monotonic()
            try:
                model(gradients).backward()
            except gw.GradwireError as error:
                about = error.ranks, error.step, error.bucket
                first = type(error).__name__, str(error), time.monotonic() - started, about
                try:
                    model(gradients).backward()
                except gw.GradwireError as again:
                    assert str(again) == first[1], f"the next backward says something else: {again}"
                    assert (again.ranks, again.step, again.bucket) == about
                    return first
                raise AssertionError("the next backward went on after a failure") from None
        model(gradients).backward()
    raise AssertionError("nobody noticed")


COMPRESSED = gw.Uniform(gw.QSGD(bits=4), bucket_bytes=4000, chunk_bytes=2000)
PLAIN = gw.Uniform(gw.Identity())
# world size, plan, victim, signal, step, seconds of each rank before that step
FAULTS: dict[str, tuple[Any, ...]] = {
    "killed, 2 ranks": (2, COMPRESSED, 1, signal.SIGKILL, 3),
    "killed host of the store, 3 ranks": (3, COMPRESSED, 0, signal.SIGKILL, 2),
    "killed, 3 ranks, all-reduce": (3, PLAIN, 2, signal.SIGKILL, 2),
    "stalled, 2 ranks, first step": (2, COMPRESSED, 1, signal.SIGSTOP, 0),
    "stalled, 3 ranks": (3, COMPRESSED, 1, signal.SIGSTOP, 3),
    "stalled host of the store, 3 ranks": (3, COMPRESSED, 0, signal.SIGSTOP, 2),
    "stalled before it sends its buffers": (2, COMPRESSED, 0, signal.SIGSTOP, 1),
    "stalled, 3 ranks, all-reduce": (3, PLAIN, 2, signal.SIGSTOP, 2),
    "stalled, 2 ranks, all-gather": (2, gw.Uniform(gw.Cast(), scheme="allgather"), 0, signal.SIGSTOP, 1),
    "killed long before, 3 ranks": (3, COMPRESSED, 2, signal.SIGKILL, 2, [0.5, 0.5, 0]),
    "killed, another busy": (3, COMPRESSED, 2, signal.SIGKILL, 2, [0, 2.0, 0]),
}


@pytest.fixture(scope="module")
def faults() -> Iterator[dict[str, list[Outcome]]]:
    """All of them at once, since they mostly wait."""
    running = {name: World(size, TIMEOUT_S) for name, (size, *_) in FAULTS.items()}
    try:
        for name, (_, *arguments) in FAULTS.items():
            busy_s = arguments[4] if len(arguments) > 4 else [0.0] * running[name].size
            running[name].start(step_until_told, *arguments[:4], busy_s, "buffers" in name)
        ends = {}
        for name, world in running.items():
            victim = FAULTS[name][2]
            others = set(range(world.size)) - {victim}
            ends[name] = world.collect(TIMEOUT_S + MARGIN_S + 20, needed=others)
        yield ends
    finally:
        for world in running.values():
            world.close()


@pytest.mark.whole
@pytest.mark.parametrize("name", FAULTS)
def test_the_others_name_the_bucket_and_the_rank_within_the_timeout(faults: dict[str, list[Outcome]], name: str) -> None:
    _, _, victim, _, step, *_ = FAULTS[name]
    for rank, outcome in enumerate(faults[name]):
        if rank == victim:
            continue
        assert outcome.kind == "returned", outcome.value
        kind, words, seconds, (ranks, of_step, bucket) = outcome.value
        assert kind == "CommunicationError"
        assert seconds < TIMEOUT_S + MARGIN_S
        what = "rank 0's buffers before forward" if "buffers" in name else "bucket"
        assert f"step {step}: rank {rank} waited for {what}" in words
        who = re.search(r"ranks? ([0-9, ]+) did not answer", words)
        assert who is not None, words
        blamed = [int(word) for word in who[1].split(", ")]
        # with rank 0 the roll call is gone too: then whoever did not answer may be blamed beside it
        assert victim in blamed if victim == 0 else blamed == [victim], words
        assert victim in ranks and of_step == step
        named = re.search(r"waited for bucket (\d+)", words)
        assert bucket == (int(named[1]) if named else None)


def killed_with_a_worker(plan: gw.Policy) -> float:
    """Rank 1 is killed, and a process that it forked lives on, as a DataLoader's worker does. The seconds until rank 0 hears."""
    model = Given([300, 2000, 5])
    gw.parallelize(model, plan=plan)
    model(model.random_gradients(0)).backward()
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(gw.CommunicationError, match="rank 1 did not answer"):
        model(model.random_gradients(1)).backward()
    return time.monotonic() - began


@pytest.mark.parametrize("plan", [COMPRESSED, PLAIN], ids=["wires", "gloo"])
def test_a_worker_that_outlives_its_rank_does_not_hide_its_death(plan: gw.Policy) -> None:
    world = World(2, 30.0)
    try:
        world.start(killed_with_a_worker, plan)
        survivor, _ = world.collect(60, needed={0})
    finally:
        world.close()
    assert survivor.kind == "returned", survivor.value
    assert survivor.value < 12  # usually 1, the roll call's patience; 20 if the worker hid it


# ---- uneven scripts


class Raises(torch.autograd.Function):
    """Whose backward raises ValueError."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("as ordered")


class Chain(torch.nn.Module):
    """Two linear layers, and on wish an exception between them in backward."""

    def __init__(self, buffers: bool = False) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.between = torch.nn.BatchNorm1d(4, affine=False) if buffers else torch.nn.Identity()
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.between(self.first(x))
        return self.last(Raises.apply(hidden) if self.raises else hidden).sum()


def raise_in_backward(plan: gw.Policy, buffers: bool, forward_before: bool) -> list[str]:
    """On all ranks alike. What the later steps say, and which threads are left after detach."""
    model = Chain(buffers)
    handle = gw.parallelize(model, plan=plan)
    model(torch.ones(2, 4)).backward()
    waiting = [model(torch.ones(2, 4)) for _ in range(2)] if forward_before else []
    model.raises = True
    with pytest.raises(ValueError, match="as ordered"):
        model(torch.ones(2, 4)).backward()
    model.raises = False
    told = []
    for _ in range(2):
        with pytest.raises(gw.StepStateError) as caught:
            (waiting.pop() if waiting else model(torch.ones(2, 4))).backward()
        told.append(str(caught.value))
    handle.detach()
    return [*told, str(gradwire_threads())]


@pytest.mark.parametrize("plan", [gw.Uniform(gw.QSGD(bits=4)), gw.Uniform(gw.QSGD(bits=4), bucket_bytes=1), PLAIN])
@pytest.mark.parametrize(
    ("buffers", "forward_before"),  # not both: buffers that change between two forwards are refused by torch itself
    [(False, False), (True, False), (False, True)],
    ids=["plain", "buffers", "forward before"],
)
def test_a_step_after_one_that_raised_is_refused(worlds: Worlds, plan: gw.Policy, buffers: bool, forward_before: bool) -> None:
    for first, second, threads in worlds.run(2, raise_in_backward, plan, buffers, forward_before):
        assert "2 of 4 gradients came" in first
        assert "an exception in it" in first
        assert second == first
        assert threads == "[]"


def raise_before_the_first_gradient() -> bool:
    """Nothing has begun: the step can be tried again."""
    model = Given([3])
    gw.parallelize(model, plan=gw.Identity())
    with pytest.raises(ValueError, match="as ordered"):
        Raises.apply(model([torch.ones(3)])).backward()
    model([torch.ones(3)]).backward()
    return torch.equal(model.p0.grad, torch.ones(3))


def test_an_exception_before_the_first_gradient_spoils_nothing(worlds: Worlds) -> None:
    assert worlds.run(2, raise_before_the_first_gradient) == [True, True]


def raise_and_throw_away() -> None:
    """The harness checks that no thread is left."""
    model = Chain()
    gw.parallelize(model, plan=gw.QSGD())
    model.raises = True
    with pytest.raises(ValueError, match="as ordered"):
        model(torch.ones(2, 4)).backward()


def test_a_model_given_up_in_the_middle_of_a_step_leaves_no_thread(worlds: Worlds) -> None:
    worlds.run(2, raise_and_throw_away)


def uneven(leave: bool) -> str:
    """Rank 0 runs one backward more than rank 1, which leaves or goes on without gradwire."""
    model = Given([300, 5])
    handle = gw.parallelize(model, plan=gw.QSGD())
    backwards = 3 if dist.get_rank() == 0 else 2
    for step in range(backwards):
        try:
            model(model.random_gradients(step)).backward()
        except gw.CommunicationError as error:
            return str(error)
    if leave:
        handle.detach()
    else:
        time.sleep(TIMEOUT_S + 1)
    return "all done"


@pytest.mark.parametrize("leave", [True, False], ids=["left", "there"])
def test_one_backward_too_many_raises(leave: bool) -> None:
    world = World(2, TIMEOUT_S)
    try:
        world.start(uneven, leave)
        first, second = world.collect(3 * TIMEOUT_S)
    finally:
        world.close()
    assert second.value == "all done"
    assert first.kind == "returned", first.value
    assert "step 2: rank 0 waited for bucket 0" in first.value
    assert "did not run the same number of backward passes" in first.value


def codec_fails(in_c: bool) -> tuple[str, str, float, tuple[int, ...]]:
    """On rank 1 an encode raises; rank 0 waits for its part, and is told while rank 1 still holds its handle."""
    model = Given([300, 5])
    handle = gw.parallelize(model, plan=gw.QSGD())
    model(model.random_gradients(0)).backward()
    if dist.get_rank() == 1:
        scheme = handle.session.exchange._buckets[0].chunks[0]
        assert scheme.runs_in_c
        if in_c:  # a kernel refuses the segments
            cpu._table_of(scheme.piece.shards[0]).rows[1] = 1000
        else:
            scheme.run = lambda *arguments: torch.zeros(2) + torch.zeros(3)
    began = time.monotonic()
    with pytest.raises(gw.GradwireError) as caught:
        model(model.random_gradients(1)).backward()
    waited_s = time.monotonic() - began
    dist.barrier()
    handle.detach()
    return type(caught.value).__name__, str(caught.value), waited_s, caught.value.ranks


@pytest.mark.parametrize("in_c", [True, False], ids=["kernel", "python"])
def test_a_fault_of_our_own_is_not_blamed_on_the_network(in_c: bool) -> None:
    world = World(2, 20.0)
    try:
        (other, waited, waited_s, blamed), (kind, words, _, own) = world.run(codec_fails, in_c)
    finally:
        world.close()
    assert waited_s < 12  # the group's timeout is 20 s
    assert kind == "StepStateError"
    assert "rank 1 could not do its part of bucket 0" in words
    assert ("reaches past the flat buffer" if in_c else "size of tensor a") in words
    assert other == "CommunicationError"
    assert "rank 0 waited for bucket 0" in waited
    assert blamed == own == (1,)
    assert "A rank died" not in waited and "from a checkpoint. These ranks cannot go on" in waited


def codec_exits(raised: type[BaseException]) -> str:
    """On rank 1 an encode ends its thread, which is the lane's."""
    model = Given([300, 5], seed=0)
    handle = gw.parallelize(model, plan=gw.QSGD(), process_group=here.group)
    if here.rank == 1:

        def leave(*_: object) -> None:
            raise raised

        handle.session.exchange._buckets[0].chunks[0].run = leave  # type: ignore[method-assign]
    with pytest.raises(gw.GradwireError) as caught:
        model(model.random_gradients(0)).backward()
    here.gather(None)
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_a_codec_that_ends_its_thread_is_named_on_all_ranks(threads: Threads, raised: type[BaseException]) -> None:
    other, own = threads.run(2, codec_exits, raised)
    words = f"step 0: rank 1 could not do its part of bucket 0 (p1 .. p0), chunk 0, alltoall: {raised.__name__}. The network"
    assert own.startswith(words) and f"rank 1 says: {words}" in other


def different_steps() -> str:
    """A rank whose steps are counted otherwise pairs its step with another one of its peer."""
    model = Given([30])
    handle = gw.parallelize(model, plan=gw.QSGD())
    model(model.random_gradients()).backward()
    if dist.get_rank() == 0:
        handle.session.reducer.step = 7
    with pytest.raises(gw.StepStateError) as caught:
        model(model.random_gradients()).backward()
    handle.detach()
    return str(caught.value)


def test_ranks_at_different_steps_are_told(worlds: Worlds) -> None:
    for told in worlds.run(2, different_steps):
        assert "1 to 7" in told


def drop_a_lane_on_its_own_thread() -> bool:
    """The last reference to a lane may go where its own job ends: it must not wait for itself."""
    from datetime import timedelta

    from gradwire.transport import Group, Lane, Link

    group = Group.of(None).meet()
    lanes = [Lane("gradwire-own", Link(group, "own", torch.device("cpu"), timedelta(seconds=5)))]
    done = threading.Event()

    def job(link: Link) -> None:
        done.wait(5)
        lanes.clear()

    with unraisable() as told:
        lanes[0].submit(job)
        done.set()
        deadline = time.monotonic() + 20
        while any(thread.startswith("gradwire") for thread in gradwire_threads()) and time.monotonic() < deadline:
            time.sleep(0.01)
    return not told and not gradwire_threads()


@contextlib.contextmanager
def unraisable() -> Iterator[list[Any]]:
    """What Python could only print."""
    told: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, told.append
    try:
        yield told
    finally:
        sys.unraisablehook = before


def test_a_lane_that_goes_on_its_own_thread_goes_quietly(worlds: Worlds) -> None:
    assert worlds.run(2, drop_a_lane_on_its_own_thread) == [True, True]
