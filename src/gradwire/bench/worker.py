"""Runs one rank of a cell group: builds all methods of a job and runs them in turns.

Executed once per rank as `python -m gradwire.bench.worker ORDER.json`, with torchrun's variables in the environment.

1. Load the data and warm up the process. Build every method, in the same order on all ranks, each with its own process group.
2. Let each deciding method take steps until its decision, and until the end of a second look at it, at most `deciding_steps`.
   Then warm up every method, and, for at most as many steps, the codecs that begin with more bits.
3. Measure in rounds of turns. The order rotates from round to round, so a drift of the machine affects all methods
   alike. The ranks synchronise between turns, outside of the measured time.
4. Measure the kernels of each method's plan alone.
5. Train the methods of `go_on_to` on, still in turns, and evaluate them on held-out batches.
   In a race (`race_s`), the methods train for equal seconds instead of 2, 3 and 5.
6. Check and close the methods, measure the idle link, and write the records of all ranks on rank 0.

A method that fails on any rank takes no further part; its error message is its result.
"""

import contextlib
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from gradwire.bench.jobs import Job, make_job
from gradwire.bench.methods import Builder, Method, build
from gradwire.bench.models import ModelJob
from gradwire.bench.ranks import Ranks, die_with, sent_by_interface
from gradwire.bench.recorded import method_folder
from gradwire.bench.results import Decided, MethodRecord, StepEvent, WorkerOrder, WorkerRecord, print_event
from gradwire.bench.sleeping_jobs import SleepingJob
from gradwire.errors import GradwireError
from gradwire.profiler import measure_links, measured_links
from gradwire.transport import Grid, Group, Link, LinkError

LINK_SECONDS = 0.25
GO_ON_TURN_STEPS = 25
RACE_TURN_S, RACE_TURNS = 3.0, 30
"""Shortest turn in a race, in seconds, and number of turns of a long race. A turn ends with a wait for pending exchanges."""
HELD_OUT = 8
HELD_OUT_FROM = 900_000
"""Number of held-out batches, and step of the first one. No run trains for so many steps."""
PER_RANK = ("wall_us", "cpu_us", "forward_us", "backward_us", "loss", "sent_bytes", "planned_bytes", "crossing_bytes", "codec_us")
SHARED = ("failure", "counted", "decided", "held_out", "phases")
"""Fields of a `MethodRecord` with one value for all ranks, from rank 0. The other fields have a value from each rank."""


class Contestant(msgspec.Struct):
    """One method and its measurements on this rank."""

    name: str
    method: Method | None = None
    failure: str | None = None
    wall_us: list[float] = []
    cpu_us: list[float] = []
    forward_us: list[float] = []
    backward_us: list[float] = []
    loss: list[float] = []
    counted: tuple[int, int] | None = None
    held_out: list[tuple[int, float]] = []
    sent_bytes: list[int] = []
    planned_bytes: int | None = None
    crossing_bytes: int | None = None
    phases: int | None = None
    codec_us: float | None = None
    decided: list[Decided] = []


class Contest:
    """All methods of one job on this rank."""

    def __init__(self, order: WorkerOrder, job: Job, ranks: Ranks, builder: Builder = build) -> None:
        self.order, self.job, self.ranks, self.builder = order, job, ranks, builder
        self.contestants = [Contestant(name) for name in order.methods]

    def run(self) -> None:
        """Execute the steps 1 to 6 of the module's description, without the link."""
        self._warm_up()
        for contestant in self.contestants:
            self._guarded(contestant, self._build)
        if self.order.race_s > 0:
            self._race()
        else:
            self._measure_in_turns()
        for contestant in self.contestants:
            self._guarded(contestant, self._finish)

    def _warm_up(self) -> None:
        """Train a separate model for two steps, so that one-time work is no method's time: loading the data, which
        takes some ranks longer than others, and torch's first operations."""
        with contextlib.suppress(Exception):  # every method will report the error
            model = self.job.make_model(self.order.seed)
            optimizer = self.job.make_optimizer(model)
            for step in range(2):
                self.job.loss(model, self.job.batch(self.ranks.rank, self.ranks.world_size, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
        self.ranks.meet()

    def _measure_in_turns(self) -> None:
        for contestant in self.contestants:
            # all steps until the decision in one turn: a turn ends with a wait, which must not fall into the trial of a plan
            if contestant.method is not None and contestant.method.deciding:
                self._take_turn(contestant, self.order.deciding_steps, until_decided=True)
        for contestant in self.contestants:
            self._take_turn(contestant, max(self.order.warmup_steps, self._warm_up_left(contestant)))
        before = [len(contestant.loss) for contestant in self.contestants]
        for turn, done in enumerate(range(0, self.order.steps, self.order.turn_steps)):
            begin = turn % len(self.contestants)
            for contestant in self.contestants[begin:] + self.contestants[:begin]:
                self._take_turn(contestant, min(self.order.steps - done, self.order.turn_steps))
        for contestant, first in zip(self.contestants, before, strict=True):
            contestant.counted = (first, len(contestant.loss))
            self._guarded(contestant, self._look_at_plan)
        self._go_on()

    def _warm_up_left(self, contestant: Contestant) -> int:
        """Steps until the method's codecs run as they go on, at most `deciding_steps`."""
        left = 0 if contestant.method is None else contestant.method.warm_up_steps - len(contestant.loss)
        return min(left, self.order.deciding_steps)

    def _race(self) -> None:
        """Let the floor take its steps. Of the others, the one that has trained for the least time takes each turn."""
        trained_s = {}
        longest_turn_s = max(RACE_TURN_S, self.order.race_s / RACE_TURNS)
        for contestant in self.contestants:
            if contestant.name == "floor":
                self._take_turn(contestant, self.order.warmup_steps + self.order.steps)
            else:
                self._guarded(contestant, self._evaluate)
                trained_s[contestant.name] = 0.0
        step_s = dict.fromkeys(trained_s, self.order.race_s)  # the first turn has one step
        while going := [
            each for each in self.contestants if each.failure is None and trained_s.get(each.name, math.inf) < self.order.race_s
        ]:
            contestant = min(going, key=lambda each: trained_s[each.name])
            seconds = min(longest_turn_s, self.order.race_s - trained_s[contestant.name])
            steps = max(1, math.ceil(seconds / step_s[contestant.name]))
            self._take_turn(contestant, steps)
            self._guarded(contestant, self._evaluate)
            # the mean over ranks, as in the results, so that all ranks do the same
            turn_s = statistics.fmean(self.ranks.gather(sum(contestant.wall_us[-steps:]) / 1e6))
            trained_s[contestant.name] += turn_s
            step_s[contestant.name] = max(turn_s / steps, 1e-3)
        for contestant in self.contestants:
            if contestant.failure is None and contestant.method is not None:
                decided = max((each.step for each in contestant.method.decided), default=0)
                first = max(decided, self.order.warmup_steps)
                contestant.counted = (min(first, len(contestant.loss) - 1), len(contestant.loss))
            self._guarded(contestant, self._look_at_plan)

    def _go_on(self) -> None:
        """Train the methods until they reach their goals in the same round. With fewer steps left, turns are shorter."""
        goals = self.order.go_on_to
        going = [contestant for contestant in self.contestants if contestant.name in goals]

        def left(contestant: Contestant) -> int:
            return 0 if contestant.failure else max(0, goals[contestant.name] - len(contestant.loss))

        rounds = math.ceil(max(map(left, going), default=0) / GO_ON_TURN_STEPS)
        for rounds_left in range(rounds, 0, -1):
            for contestant in going:
                if steps := math.ceil(left(contestant) / rounds_left):
                    self._take_turn(contestant, steps)
                    self._guarded(contestant, self._evaluate)

    def _guarded(self, contestant: Contestant, action: Callable[[Contestant], None]) -> None:
        """Execute the action on all ranks. If it fails on one rank, all ranks record the failure."""
        if contestant.failure is not None:
            return
        problem = None
        try:
            action(contestant)
        except Exception as error:  # any error is the method's result
            problem = f"{type(error).__name__}: {error}"
        said = [f"rank {rank}: {words}" for rank, words in enumerate(self.ranks.gather(problem)) if words is not None]
        contestant.failure = "; ".join(said) or None
        if contestant.failure is not None and contestant.method is not None:
            with contextlib.suppress(Exception):
                contestant.method.close()

    def _build(self, contestant: Contestant) -> None:
        contestant.method = self.builder(contestant.name, self.job, self.order.seed, self.ranks.new_group())
        if self.order.record is not None:
            contestant.method.record(method_folder(Path(self.order.record), contestant.name))

    def _take_turn(self, contestant: Contestant, steps: int, until_decided: bool = False) -> None:
        if steps > 0 and contestant.failure is None:
            gc.collect()
            self.ranks.meet()
            self._guarded(contestant, lambda _: self._steps(contestant, steps, until_decided))

    def _steps(self, contestant: Contestant, steps: int, until_decided: bool) -> None:
        """Take so many steps; with `until_decided`, none after the method's decision, which is the same one on all ranks."""
        method = contestant.method
        assert method is not None
        sent_before, first, last = sent_by_interface(), len(contestant.loss), False
        while not last:
            step = len(contestant.loss)
            batch = self.job.batch(self.ranks.rank, self.ranks.world_size, step)
            cpu, wall = time.process_time(), time.perf_counter()
            loss = method.step(batch)
            last = step == first + steps - 1 or (until_decided and not method.deciding)
            if last:
                method.settle()
            contestant.wall_us.append((time.perf_counter() - wall) * 1e6)
            contestant.cpu_us.append((time.process_time() - cpu) * 1e6)
            contestant.forward_us.append(method.forward_us)
            contestant.backward_us.append(method.backward_us)
            contestant.loss.append(loss)
            if last:
                self.ranks.meet()  # other ranks may still receive from this rank
            sent = sent_by_interface()
            contestant.sent_bytes.append(sent - sent_before)
            sent_before = sent
            if self.ranks.rank == 0:
                print_event(StepEvent(contestant.name, step, contestant.wall_us[-1], loss))
        for step, loss in enumerate(contestant.loss[first:], first):
            if not math.isfinite(loss):
                raise ValueError(f"the loss of step {step} is {loss}: training diverged, so its times mean nothing")

    def _evaluate(self, contestant: Contestant) -> None:
        """Evaluate on rank 0. The other ranks wait, because the cores are few."""
        assert contestant.method is not None
        if self.ranks.rank == 0:
            world_size = self.ranks.world_size
            batches = [self.job.batch(at % world_size, world_size, HELD_OUT_FROM + at) for at in range(HELD_OUT)]
            loss = contestant.method.held_out_loss(batches)
            if not math.isfinite(loss):
                raise ValueError(f"the held-out loss after {len(contestant.loss)} steps is {loss}: training diverged")
            contestant.held_out.append((len(contestant.loss), loss))
            if contestant.loss:
                last = contestant.wall_us[-1], contestant.loss[-1]
                print_event(StepEvent(contestant.name, len(contestant.loss) - 1, *last, held_out=loss))

    def _look_at_plan(self, contestant: Contestant) -> None:
        assert contestant.method is not None
        method = contestant.method
        contestant.planned_bytes, contestant.crossing_bytes = method.bytes_planned, method.crossing_bytes
        contestant.phases = method.phases
        self.ranks.meet()
        seconds = contestant.method.codec_seconds()
        contestant.codec_us = None if seconds is None else seconds * 1e6

    def _finish(self, contestant: Contestant) -> None:
        assert contestant.method is not None
        contestant.method.check()
        contestant.decided = contestant.method.decided
        contestant.method.close()

    def records(self) -> list[MethodRecord]:
        """Return the records of all methods, with the values of all ranks."""
        records = []
        for mine in self.contestants:
            if mine.failure is not None:
                mine.loss = []  # JSON cannot hold a NaN
            by_rank = self.ranks.gather({field: getattr(mine, field) for field in PER_RANK})
            fields: dict[str, Any] = {field: [rank[field] for rank in by_rank] for field in PER_RANK}
            fields |= {field: getattr(mine, field) for field in SHARED}
            fields["wrong_on_purpose"] = mine.method is not None and mine.method.wrong_on_purpose
            records.append(MethodRecord(method=mine.name, **fields))
        return records


def link_rate(ranks: Ranks) -> float | None:
    """Return the payload rate of a node's idle link in gigabits per second; None if the measurement fails."""
    group, device = Group.of(ranks.new_group()).meet(), torch.device("cpu")
    grid = Grid.even(ranks.world_size // ranks.local_world_size, ranks.local_world_size, ranks.rank)
    link = Link(group, "rate", device, group.timeout)
    try:
        cluster = measured_links(measure_links(link, grid, device, LINK_SECONDS), grid).cluster
        return (cluster.inter if cluster.nodes > 1 else cluster.intra).gbps
    except (GradwireError, LinkError):
        return None
    finally:
        link.close()


def main(order_path: str, builder: Builder = build) -> None:
    """Execute the order. builder: builds a method by its name."""
    order = WorkerOrder.load(order_path)
    die_with(order.runner)
    torch.set_num_threads(1)
    job: Job = make_job(order.job, order.seed) if order.model is None else ModelJob(order.model, order.seed)
    if order.device == "sleeping":
        job = SleepingJob(job)
    ranks = Ranks(order.collective_timeout_s, communicating=set(order.methods) != {"floor"})
    contest = Contest(order, job, ranks, builder)
    contest.run()
    record = WorkerRecord(
        job=job.name,
        parameters=sum(parameter.numel() for parameter in job.make_model(order.seed).parameters()),
        world_size=ranks.world_size,
        ranks_per_interface=ranks.local_world_size,
        warmup_steps=order.warmup_steps,
        measured_gbps=link_rate(ranks) if ranks.world_size > 1 else None,
        methods=contest.records(),
    )
    if ranks.rank == 0:
        record.save(order.result)
    ranks.meet()
    ranks.close()


if __name__ == "__main__":
    main(sys.argv[1])
