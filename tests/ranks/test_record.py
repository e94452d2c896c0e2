"""Recording: what `handle.record` writes is what happened, and training goes on as without it."""

import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import Worlds, digest, seeded

import gradwire as gw
from gradwire.core.schedules import Schedule
from gradwire.errors import StepStateError
from gradwire.exchange.exchange import PhaseTask, TaskTimes
from gradwire.record.recording import Watched
from gradwire.record.run import Run
from gradwire.record.timeline import Moments, Pass, measured_timeline
from gradwire.sim.timeline import Timeline

STEPS = 7


def trained(folder: str | None, policy: gw.Policy) -> tuple[str, list[str]]:
    """Digest of the weights, and what the ranks other than 0 were told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=policy)
    rank = dist.get_rank()

    def step(number: int) -> torch.Tensor:
        inputs = torch.randn(8, 40, generator=seeded(rank, number))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    told = []
    if folder is None:
        for number in range(STEPS):
            step(number)
    else:
        with handle.record(folder, error_steps=3) as recording:
            for number in range(STEPS):
                loss = step(number)
                recording.log(loss=loss if number != 4 else float("nan"))
                with torch.no_grad():
                    model(torch.zeros(1, 40))  # an evaluation is no step
        for ask in (recording.run, handle.timeline):
            try:
                ask()
            except StepStateError as error:
                told.append(str(error))
    return digest(model.parameters()), told


def recorded_and_not(folder: str) -> tuple[bool, list[str]]:
    policy = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=4)), bucket_bytes=20_000, chunk_bytes=10_000)
    with_it, told = trained(folder, policy)
    return with_it == trained(None, policy)[0], told


def test_a_recorded_run_is_what_happened(worlds: Worlds, tmp_path: Path) -> None:
    (same, told), (same_there, told_there) = worlds.run(2, recorded_and_not, str(tmp_path))
    assert same and same_there, "recording changed what was learned"
    assert told == [] and "ask on rank 0" in told_there[0].lower() and "rank 0" in told_there[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    run = Run.read(tmp_path)
    assert Run.from_json(run.to_json()) == run
    assert (run.model, run.world_size, run.nodes, run.device) == ("Sequential", 2, 1, "cpu")
    assert [step.step for step in run.steps] == list(range(STEPS))
    assert [step.loss is None for step in run.steps] == [False] * 4 + [True] + [False] * 2
    assert run.notes == ("The loss was not finite in 1 steps, first in step 4.",)
    assert all(after.end_s > before.end_s for before, after in pairwise(run.steps))
    assert all(step.step_us > 0 and step.codec_us > 0 for step in run.steps)
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {tensor.name for tensor in run.tensors} == names == set(run.plan.tensors)
    weight = next(tensor for tensor in run.tensors if tensor.name == "0.weight")
    assert [step for step, _ in weight.error] == [0, 3, 6]
    assert all(0.05 < error < 0.4 for _, error in weight.error), "4 bits lose 17 % of Gaussian data"
    assert weight.bits[0][0] == 0 and 4 < weight.bits[0][1] < 4.5
    assert run.gradient_bytes == 4 * (40 * 300 + 300 + 300 * 3 + 3)
    assert 0 < run.wire_bytes < run.gradient_bytes / 4
    assert run.memory.gradient_bytes == 0, "compressed gradients stay where they are"
    assert run.memory.residual_bytes >= run.gradient_bytes > run.memory.payload_bytes > run.wire_bytes


def test_the_timeline_shows_the_tasks_of_the_plan_where_they_ran(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, recorded_and_not, str(tmp_path))
    run = Run.read(tmp_path)
    timeline = run.timeline
    assert isinstance(timeline, Timeline) and timeline.sent_bytes == run.wire_bytes
    computation = [event for event in timeline.events if event.bucket < 0]
    assert [event.what for event in computation][:2] == ["optimizer", "forward"]
    assert {event.tensor for event in computation if event.what == "backward"} == set(run.plan.tensors)
    for before, after in pairwise(computation):
        assert after.start_us == pytest.approx(before.end_us)
    for index, bucket in enumerate(run.plan.buckets):
        for chunk in range(run.buckets[index].chunks):
            tasks = [event for event in timeline.events if (event.bucket, event.chunk) == (index, chunk)]
            words = [event.what for event in tasks if event.resource == "intra link"]
            assert words == list(bucket.link_tasks)
            assert all(bucket.option[event.index].startswith(event.what) for event in tasks)
            coded = {event.what for event in tasks if event.resource == "compute"}
            assert coded == ({"comp", "decomp"} if "comp:cpu" in bucket.option else set())
    assert all(0 <= event.start_us <= event.end_us <= timeline.step_us for event in timeline.events)
    parts = timeline.optimizer_us + timeline.forward_us + timeline.backward_us
    parts += timeline.exposed_comm_us + timeline.exposed_codec_us + timeline.idle_us
    assert parts == pytest.approx(timeline.step_us, abs=1.0)


def of_two_plans(folder: str) -> list[tuple[int, list[int], int]]:
    """The number of buckets of the plan, those of the timeline, and those with times; after steps with many buckets, then as
    another plan is taken up, and after a step of it."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    many, one = (gw.Uniform(gw.QSGD(bits=4), bucket_bytes=size) for size in (8_000, 10**6))
    handle = gw.parallelize(model, plan=many)
    found = []

    def look() -> None:
        if dist.get_rank():
            return
        run = recording.run()
        drawn = {event.bucket for event in run.timeline.events if event.bucket >= 0} if run.timeline is not None else set()
        found.append((len(run.buckets), sorted(drawn), sum(each.exchange_us is not None for each in run.buckets)))

    with handle.record(folder, error_steps=0) as recording:
        for number in range(8):
            if number == 7:
                look()
                handle.session.change_to(handle.session.plan_of(one))
                look()
            model(torch.ones(2, 40)).sum().backward()
            model.zero_grad()
        look()
    return found


def test_times_are_those_of_the_plan_that_ran_last(worlds: Worlds, tmp_path: Path) -> None:
    first, _ = worlds.run(2, of_two_plans, str(tmp_path))
    assert first == [(2, [0, 1], 2), (1, [], 0), (1, [0], 1)]


def alone(folder: str) -> list[str]:
    """Errors of a recording without a step, and a run that a script's error ended."""
    model = nn.Linear(3, 2)
    handle = gw.parallelize(model, plan=gw.Identity())
    told = []
    with handle.record(folder) as recording:
        for act in (lambda: recording.log(1.0), handle.timeline):
            try:
                act()
            except StepStateError as error:
                told.append(str(error))
    told.append(str(len(Run.read(folder).steps)))
    try:
        with handle.record(folder, error_steps=0) as recording:
            model(torch.ones(1, 3)).sum().backward()
            recording.log(torch.ones(2))
    except ValueError as error:
        told.append(str(error))
    told.append(str(len(Run.read(folder).steps)))
    return told


def test_no_step_one_step_and_a_loop_that_fails(worlds: Worlds, tmp_path: Path) -> None:
    (told,) = worlds.run(1, alone, str(tmp_path))
    assert "before the first forward" in told[0] and "no step has a timeline" in told[1]
    assert told[2] == "0" and "loss has shape (2,)" in told[3] and told[4] == "1"


class Pause(nn.Module):
    """Forward and backward take their time, so that exchanges fall into both however the threads are scheduled."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        outputs = inputs * 1.0
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: time.sleep(0.03))
        return outputs


def overlapping(folder: str, schedule: str) -> None:
    model = nn.Sequential(nn.Linear(40, 300), Pause(), nn.ReLU(), nn.Linear(300, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = gw.Uniform(gw.QSGD(bits=4), schedule=schedule, bucket_bytes=4_000)
    handle = gw.parallelize(model, optimizer, plan=policy)
    with handle.record(folder) as recording:
        for number in range(STEPS):
            loss = model(torch.randn(8, 40, generator=seeded(dist.get_rank(), number))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recording.log(loss=loss)
    handle.detach()


@pytest.mark.parametrize("schedule", ["pipelined", "delayed"])
def test_steps_that_overlap_show_exchanges_in_their_own_time(schedule: str, worlds: Worlds, tmp_path: Path) -> None:
    worlds.run(2, overlapping, str(tmp_path), schedule)
    run = Run.read(tmp_path)
    assert STEPS - 1 <= len(run.steps) <= STEPS and all(step.loss is not None for step in run.steps)
    assert run.timeline is not None and run.timeline.schedule == schedule
    links = [event for event in run.timeline.events if event.resource == "intra link"]
    assert links and {event.step for event in links} <= {-1, 0}
    assert all(0 <= event.start_us <= run.timeline.step_us for event in run.timeline.events)


def test_an_exchange_that_began_in_the_step_before_is_shown_from_the_beginning_on() -> None:
    option = ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")

    def times(began: float, ended: float, phase: int = 1) -> TaskTimes:
        coding = 0.1 * (ended - began)
        return TaskTimes(PhaseTask(0, 0, phase), option, began, ended, [(began, began + coding), (ended - coding, ended)])

    before = [times(0.5, 0.9), times(0.99, 1.2), times(1.3, 1.5, 0)]
    own = [times(1.6, 1.8, 0), times(2.01, 2.2)]
    watched = Watched(Moments(1.0, [Pass(1.1, 1.4, [("w", 1.9)])], [], 2.0), 0.0, before, own)
    timeline = measured_timeline(watched.moments(), "pipelined", 1, (0, 0, 0))
    shown = [(e.what, round(e.start_us), round(e.end_us), e.step) for e in timeline.events if e.resource == "intra link"]
    assert shown == [
        ("allgather", 11_000, 179_000, -1),
        ("alltoall", 320_000, 480_000, -1),
        ("alltoall", 620_000, 780_000, 0),
    ]


def times_of(timeline: Timeline) -> list[str]:
    """The forwards, backwards and optimizer steps in their order; a backward counts once."""
    words = [event.what for event in timeline.events if event.bucket < 0]
    return [after for before, after in pairwise(["", *words]) if before != after]


def in_several_passes(folder: str, schedule: Schedule, batches: int, before: int = 0) -> list[int]:
    """4 exchanges, each after as many local steps as the schedule has, each step of so many batches. The recording begins
    after `before` of the steps."""
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.QSGD(bits=4), schedule=schedule))

    def step() -> None:
        for left in reversed(range(batches)):
            with handle.no_sync() if left else nullcontext():
                model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(before):
        step()
    with handle.record(folder) as recording:
        for _ in range(4 * schedule.begins_after(0) - before):
            step()
            recording.log(loss=1.0)
    handle.detach()
    return [step.local_steps or 0 for step in Run.read(folder).steps] if dist.get_rank() == 0 else []


@pytest.mark.parametrize("batches", [1, 2])
def test_a_record_of_local_steps_has_the_forwards_and_backwards_of_all_of_them(
    worlds: Worlds, tmp_path: Path, batches: int
) -> None:
    recorded, _ = worlds.run(2, in_several_passes, str(tmp_path), gw.LocalSteps(every=3), batches)
    run = Run.read(tmp_path)
    assert recorded == [3, 3, 3, 3] and run.round_steps == 3 and run.optimizer_steps == (2, 5, 8, 11)
    assert run.timeline is not None and run.timeline.steps == 3
    assert times_of(run.timeline) == ["optimizer", *["forward", "backward"] * batches] * 3
    assert 3 * run.timeline.step_us == pytest.approx(run.timeline.length_us)
    assert run.timeline.forward_us + run.timeline.backward_us < run.timeline.length_us


@pytest.mark.parametrize("batches", [1, 3])
def test_a_record_that_begins_between_two_exchanges_counts_the_local_steps_that_it_saw(
    worlds: Worlds, tmp_path: Path, batches: int
) -> None:
    recorded, _ = worlds.run(2, in_several_passes, str(tmp_path), gw.LocalSteps(every=3), batches, 2)
    run = Run.read(tmp_path)
    assert recorded == [1, 3, 3, 3] and run.optimizer_steps == (0, 3, 6, 9)


def test_a_record_of_accumulated_gradients_has_the_forwards_and_backwards_of_all_batches(worlds: Worlds, tmp_path: Path) -> None:
    recorded, _ = worlds.run(2, in_several_passes, str(tmp_path), gw.Backward(), 3)
    run = Run.read(tmp_path)
    assert recorded == [0, 0, 0, 0] and run.optimizer_steps == (0, 1, 2, 3)
    assert run.timeline is not None and run.timeline.steps == 1
    assert times_of(run.timeline) == ["optimizer", *["forward", "backward"] * 3]


class ReturnsAParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(inputs), self.scale


def hooks_left(folder: str, watch: str) -> int:
    model = ReturnsAParameter()
    handle = gw.parallelize(model, plan=gw.Identity())
    with handle.record(folder) if watch == "record" else handle.profile(folder, steps=2):
        for number in range(7):
            outputs, scale = model(torch.randn(8, 4, generator=seeded(number)))
            (outputs * scale).square().mean().backward()
            model.zero_grad()
    handle.detach()
    return len(model.scale._backward_hooks or ())


@pytest.mark.parametrize("watch", ["record", "profile"])
def test_no_hook_stays_on_a_parameter_that_the_model_returns(worlds: Worlds, tmp_path: Path, watch: str) -> None:
    assert worlds.run(1, hooks_left, str(tmp_path), watch) == [0]
