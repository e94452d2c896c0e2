"""MemoryError at any line of gradwire's own part of a step: an error on all ranks, or a step that all ranks forget; no hang."""

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from short_memory import short_memory
from worlds import Given, World, digest

import gradwire as gw
from gradwire.engine.schedules.pipelined import PipelinedSchedule
from gradwire.engine.schedules.sharded import ShardedSchedule

MOST_S = 20.0
"""For a step and its error; the group's timeout is 30 s."""

PLANS: dict[str, dict[str, Any]] = {
    "backward": {},
    "flat buffers": {"scheme": "ring"},
    "pipelined": {"schedule": gw.Pipelined()},
    "delayed": {"schedule": gw.Delayed(k=3)},
    "local": {"schedule": gw.LocalSteps(every=1)},
}


def steps(plan: str, line: int) -> tuple[bool, str, float, str, int]:
    """Some steps; rank 1 is short of memory in the third. Whether the handle failed, the weights, the longest step, where it was
    short, and how many lines a step has."""
    torch.manual_seed(0)
    model = Given([600, 5, 300])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.QSGD(bits=4), bucket_bytes=2000, **PLANS[plan]))
    failed, longest, where, lines, ordered = False, 0.0, "", 0, False
    while (done := handle.session.reducer.next_step) < 5 and not failed:
        began, seen, steps_now = time.monotonic(), [], False
        now = done == 2 and dist.get_rank() == 1 and not ordered
        try:
            gradients = model.random_gradients(dist.get_rank(), done)
            with short_memory(line if now else -1) as seen:
                optimizer.zero_grad()
                model(gradients).backward()
                steps_now = True
                optimizer.step()
            lines = max(lines, len(seen))
        except (MemoryError, gw.GradwireError) as error:
            ordered, where = True, where or (seen[-1] if now else "")
            try:
                if isinstance(error, MemoryError) and steps_now:
                    optimizer.step()  # the step had not begun, and a script may call it again
                else:
                    handle.reset()
            except gw.GradwireError:
                failed = True
        longest = max(longest, time.monotonic() - began)
    weights = ""
    try:
        handle.session.settle()
        weights = digest(model.parameters()) if not failed else ""
    except gw.GradwireError:
        failed = True
    handle.detach()
    return failed, weights, longest, where, lines


def run_lines(plan: str, lines: list[int]) -> list[tuple[bool, str, float, str, int]]:
    ends = []
    for line in lines:
        ends.append(steps(plan, line))
        dist.barrier()
    return ends


def check(plan: str, every: int) -> None:
    world = World(2, 30.0)
    try:
        *_, count = world.run(run_lines, plan, [10**9])[1][0]
        lines = list(range(1, count + 1, every))
        assert count > 100
        for at in range(0, len(lines), 20):
            first, second = world.run(run_lines, plan, lines[at : at + 20], deadline_s=200)
            for line, (failed, weights, waited, _, _), (others_failed, others, long, where, _) in zip(
                lines[at:], first, second, strict=False
            ):
                assert (failed, weights) == (others_failed, others), (line, where)
                assert max(waited, long) < MOST_S, (line, where)
    finally:
        world.close()


@pytest.mark.parametrize("plan", PLANS)
def test_some_lines(plan: str) -> None:
    check(plan, 53)


def left_when_the_last_bucket_arrived(sharded: bool) -> str:
    """Trains until memory is short when the last bucket of a step arrives, and leaves the handle to the garbage collector."""
    schedule: Any = ShardedSchedule if sharded else PipelinedSchedule
    plan: Any = gw.Policy(default=gw.Identity(), schedule=gw.Pipelined(shard_optimizer=sharded), bucket_bytes=2000)

    def arrived(self: Any, bucket: int) -> None:
        if not self._gathers.under_way:
            raise MemoryError("as ordered")
        usual(self, bucket)

    usual = schedule._arrived
    with mock.patch.object(schedule, "_arrived", arrived):
        model = Given([600, 5, 300])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gw.parallelize(model, optimizer, plan=plan)
        try:
            for step in range(3):
                optimizer.zero_grad()
                model(model.random_gradients(dist.get_rank(), step)).backward()
                optimizer.step()
        except gw.GradwireError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("sharded", [False, True])
def test_a_handle_that_failed_as_a_bucket_arrived_leaves_no_thread(sharded: bool) -> None:
    world = World(2, 30.0)
    try:  # the world looks for threads
        assert all(
            "could not do its part of the step" in words for words in world.run(left_when_the_last_bucket_arrived, sharded)
        )
    finally:
        world.close()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("plan", PLANS)
def test_every_line(plan: str) -> None:
    """Every one in `make test-all`, which takes a quarter of an hour."""
    check(plan, 1 if "GRADWIRE_ALL_CASES" in os.environ else 17)
