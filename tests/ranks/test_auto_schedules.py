"""plan="auto" where other schedules than `backward` are allowed: on real ranks, with made-up clocks."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from foretold import foretold
from test_engine_feedback import SIZES, Shuffled, residual_sum
from worlds import Given, Worlds, digest

import gradwire as gw
from gradwire.api.handle import Handle
from gradwire.auto.changes import StepPace
from gradwire.auto.decision import PlanDriver
from gradwire.auto.driver import Auto
from gradwire.auto.live import Live, Stepped
from gradwire.auto.trial import Candidate, Trial
from gradwire.core import TensorInfo
from gradwire.engine.session import Session

ALL = ("backward", "pipelined", "delayed")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


# ---- the engine changes schedules on a live job


class InTurn(PlanDriver):
    """A driver that changes to the next plan every three steps."""

    def __init__(self, policies: list[gw.Policy]) -> None:
        super().__init__(policies)
        self.policies, self.seen = policies, 0

    def first_policy(self, tensors: list[TensorInfo], ranks: int) -> gw.Policy:
        return self.policies[0]

    def finished(self, session: Session) -> None:
        self.seen += 1
        if self.seen % 3 == 0:
            policy = self.policies[self.seen // 3 % len(self.policies)]
            session.change_to(session.plan_of(policy))


FEEDBACK = gw.ErrorFeedback(gw.TopK(0.05))
IN_TURN = [
    gw.Uniform(gw.Identity()),
    gw.Uniform(gw.Identity(), schedule="pipelined"),
    gw.Uniform(FEEDBACK, schedule=gw.Delayed(k=2)),
    gw.Uniform(gw.Identity(), schedule="pipelined"),
    gw.Uniform(FEEDBACK),
    gw.Uniform(gw.Identity(), schedule=gw.Delayed(k=None)),
    gw.Uniform(FEEDBACK, schedule=gw.Delayed(k=5)),
]


def every_gradient_once() -> tuple[float, set[str], str, list[str]]:
    """With given gradients and plain SGD the weights say which gradients were used, and how often."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Shuffled(SIZES)
    begin = [parameter.detach().double() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = gw.parallelize(model, optimizer, plan=IN_TURN[0])
    handle.session.driver = InTurn(IN_TURN)
    true = [torch.zeros_like(weight) for weight in begin]
    kinds: list[str] = []
    for number in range(48):
        optimizer.zero_grad()
        model(model.random_gradients(rank, number)).backward()
        optimizer.step()
        if number % 10 == 9:
            handle.flush()
        means = model.mean_of(lambda r, s=number: model.random_gradients(r, s), world_size)
        for total, mean in zip(true, means, strict=True):
            total += mean
        kinds.append(handle.plan.schedule.word)
    state, off = handle.state_dict(), 0.0
    for (name, weight), before, total in zip(model.named_parameters(), begin, true, strict=True):
        held = residual_sum(state, name).expand(total.numel()).reshape(total.shape).contiguous()
        dist.all_reduce(held)
        off = max(off, ((before - weight.double()) / 0.5 + held - total).norm().item() / total.norm().item())
    same = digest(model.parameters())
    handle.detach()
    left = [name for each in (model, optimizer) for name in ("step", "state_dict", "parameters") if name in vars(each)]
    return off, set(kinds), same, left


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_gradient_counts_once_while_schedules_change(worlds: Worlds, world_size: int) -> None:
    told = worlds.run(world_size, every_gradient_once)
    assert len({same for _, _, same, _ in told}) == 1, "ranks differ"
    for off, kinds, _, left in told:
        assert off < 1e-5
        assert kinds == set(ALL)
        assert left == [], "something still stands before these methods"


BACK_AND_FORTH = [
    gw.Uniform(gw.Identity()),
    gw.Uniform(FEEDBACK, schedule=gw.Delayed(k=2)),
    gw.Uniform(gw.Identity(), schedule="pipelined"),
]


def counted(script: str) -> tuple[list[tuple[int, str]], int, str]:
    """The steps that count after each `optimizer.step()`, with the schedule then, and at the end; the weights."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Shuffled(SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = gw.parallelize(model, optimizer, plan=BACK_AND_FORTH[0])
    handle.session.driver = InTurn(BACK_AND_FORTH)
    steps: list[tuple[int, str]] = []
    for number in range(20):
        gradients = model.random_gradients(rank, number)
        (model.forward if script in ("parts", "left out") else model)(gradients).backward()
        if script == "clipped":
            handle.clip_grad_norm_(1.0)
        if script != "left out" or number != 2:  # the backward in which the schedule changes
            optimizer.step()
        optimizer.zero_grad()
        steps.append((handle.session.step, handle.plan.schedule.word))
    handle.flush()
    end, weights = handle.session.step, digest(model.parameters())
    handle.detach()
    return steps, end, weights


@pytest.mark.parametrize("script", ["model", "parts", "clipped", "left out"])
def test_each_step_counts_once_while_schedules_change(worlds: Worlds, script: str) -> None:
    (steps, end, weights), other = worlds.run(2, counted, script)
    assert other == (steps, end, weights)
    assert {word for _, word in steps} == set(ALL) and end == 20
    for made, (count, word) in enumerate(steps, start=1):
        assert made - (word == "delayed") <= count <= made


def twice(frozen: bool) -> str:
    """The weights where a second backward adds to the gradients of the one in which the schedule changes to `delayed`. frozen: a
    parameter was frozen before."""
    torch.manual_seed(0)
    model = Shuffled(SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = gw.parallelize(model, optimizer, plan=BACK_AND_FORTH[0])
    handle.session.driver = InTurn(BACK_AND_FORTH[:2])
    next(model.parameters()).requires_grad_(not frozen)
    word = "backward"
    while word == "backward":
        loss = model(model.random_gradients(dist.get_rank(), handle.session.step))
        loss.backward(retain_graph=True)
        if (word := handle.plan.schedule.word) == "delayed":
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    weights = digest(model.parameters())
    handle.detach()
    return weights


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backward_after_the_one_in_which_delayed_begins_is_exchanged(worlds: Worlds, frozen: bool) -> None:
    first, second = worlds.run(2, twice, frozen)
    assert first == second


def thaw(schedule: str) -> tuple[bool, bool]:
    """A handle whose policy is of `backward` runs another schedule when a parameter is thawed."""
    torch.manual_seed(0)
    model = Given([40, 30])
    model.p1.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity()))

    def step(number: int, thawed: bool) -> None:
        optimizer.zero_grad()
        model([g if thawed or index == 0 else None for index, g in enumerate(gradients(number))]).backward()
        optimizer.step()

    def gradients(number: int) -> list[torch.Tensor]:
        return model.random_gradients(dist.get_rank(), number)

    for number in range(2):
        step(number, thawed=False)
    handle.session.change_to(handle.session.plan_of(gw.Uniform(gw.Identity(), schedule=schedule)))
    for number in range(2, 4):
        step(number, thawed=False)
    changed = handle.plan.schedule.word == schedule
    handle.flush()
    model.p1.requires_grad_(True)
    for number in range(4, 7):
        step(number, thawed=True)
    handle.flush()
    handle.detach()
    torch.manual_seed(0)
    begin = Given([40, 30])
    with torch.no_grad():
        for index, (weight, before) in enumerate(zip(model.parameters(), begin.parameters(), strict=True)):
            for number in range(0 if index == 0 else 4, 7):
                before -= 0.5 * list(model.mean_of(lambda r, n=number: model.random_gradients(r, n), 2))[index].float()
            assert torch.allclose(weight, before, atol=1e-5), f"p{index}"
    return changed, len(handle.plan.buckets) > 0


@pytest.mark.parametrize("schedule", ALL)
def test_a_parameter_that_is_thawed_under_another_schedule_is_taken_in(worlds: Worlds, schedule: str) -> None:
    assert worlds.run(2, thaw, schedule) == [(True, True)] * 2


def freeze() -> list[str]:
    """One that is frozen stays frozen, and schedules change all the same."""
    model = Given([40, 30])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity()))
    kinds, frozen = [], model.p1.detach().clone()
    for number, schedule in enumerate(("backward", "pipelined", "delayed", "backward")):
        if number == 1:
            handle.flush()
            frozen = model.p1.detach().clone()
            model.p1.requires_grad_(False)
        handle.session.change_to(handle.session.plan_of(gw.Uniform(gw.Identity(), schedule=schedule)))
        for turn in range(3):
            optimizer.zero_grad()
            gradients = model.random_gradients(dist.get_rank(), number, turn)
            model([gradients[0], None if number else gradients[1]]).backward()
            optimizer.step()
        kinds.append(handle.plan.schedule.word)
    handle.flush()
    assert not model.p1.requires_grad and torch.equal(model.p1, frozen)
    handle.detach()
    return kinds


def test_schedules_change_where_a_parameter_was_frozen_meanwhile(worlds: Worlds) -> None:
    assert worlds.run(2, freeze) == [["backward", "pipelined", "delayed", "backward"]] * 2


# ---- auto

Times = Callable[[gw.Plan, int], float]
"""Milliseconds of a step under a plan."""


class Scheduled:
    """A model in training, by an optimizer, whose clock passes as `times` says."""

    def __init__(self, model: Given, times: Times, closure: bool = False, **arguments: object) -> None:
        self.model, self.times, self.now, self.closure = model, times, 0.0, closure
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 20, 0.9)
        self.handle: Handle = gw.parallelize(model, self.optimizer, **arguments)  # type: ignore[arg-type]
        driver = self.handle.session.driver
        assert isinstance(driver, Auto)
        driver.clock = lambda: self.now

    def step(self, number: int) -> None:
        gradients = self.model.random_gradients(dist.get_rank(), number)
        began, step_ms = self.now, self.times(self.handle.plan, number)

        def backward() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(gradients)
            self.now += step_ms / 1e3
            loss.backward()
            return loss

        known = foretold(lambda plan: 1.04 ** (ALL.index(plan.schedule.word)))
        with known, mock.patch.multiple(Live, link_us=1000.0, exposed_us=0.0, began_s=began):
            if self.closure:
                self.optimizer.step(backward)
            else:
                backward()
                self.optimizer.step()
        self.scheduler.step()
        self.now += 100.0 * (number % 7 == 3)  # an evaluation


def fast(kind: str, other_ms: float = 16.0) -> Times:
    return lambda plan, step: 10.0 if plan.schedule.word == kind else other_ms


def beside_ddp(times: Times) -> tuple[bool, str, set[str], str]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    job = Scheduled(Given([70_000] * 6), times, accuracy="exact", schedules=ALL)
    torch.manual_seed(0)
    other = Given([70_000] * 6)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    ddp = torch.nn.parallel.DistributedDataParallel(other)
    same, kinds = True, set()
    for number in range(70):
        job.step(number)
        kinds.add(job.handle.plan.schedule.word)
        optimizer.zero_grad()
        ddp(other.random_gradients(rank, number)).backward()
        optimizer.step()
        scheduler.step()
        same &= number % 5 > 0 or digest(job.model.parameters()) == digest(other.parameters())
    chosen = job.handle.plan.schedule.word
    told = same, chosen, kinds, str(job.handle.decision)
    job.handle.detach()
    return told


def pipelined_beside_ddp() -> tuple[bool, str, set[str], str]:
    return beside_ddp(fast("pipelined"))


def test_exact_is_ddp_bit_for_bit_while_it_tries_the_pipelined_schedule(worlds: Worlds) -> None:
    for same, chosen, kinds, said in worlds.run(2, pipelined_beside_ddp):
        assert same
        assert chosen == "pipelined" and kinds == {"backward", "pipelined"}, said
        assert "pipelined: 10.0 ms a step" in said


def swapped_beside_ddp(kind: str) -> tuple[bool, str, set[str], str]:
    """The schedule that is fast in a trial is slow at all other times."""
    return beside_ddp(lambda plan, step: 12.9 if plan.schedule.word != kind else 10.0 if 3 <= step < 9 else 14.5)


@pytest.mark.parametrize(("first", "then"), [("pipelined", "backward"), ("backward", "pipelined")])
def test_a_second_look_changes_schedules_bit_for_bit(worlds: Worlds, first: str, then: str) -> None:
    for same, chosen, kinds, said in worlds.run(2, swapped_beside_ddp, first):
        assert same and chosen == then and kinds == {"backward", "pipelined"}, said
        assert "from now on: 12.9 ms a step" in said and "took 14.5 ms a step" in said


def saved_under_a_rival(kind: str) -> tuple[str, str, int, bool]:
    """A state is saved while a rival of a plan of this kind runs: the rival's kind. Then that of a run that loads the state, its
    decisions, and whether what the state had not sent is kept."""

    def times(plan: gw.Plan, step: int) -> float:
        is_tried = step > 2 and not job.handle.decisions
        return 12.9 if plan.schedule.word != kind else 10.0 if is_tried else 14.5

    torch.manual_seed(0)
    chosen_from: Any = {"schedules": ALL, "accuracy": "safe" if kind == "delayed" else "exact"}
    job = Scheduled(Shuffled(SIZES), times, **chosen_from)
    state: dict[str, torch.Tensor] = {}
    for number in range(70):
        job.step(number)
        if job.handle.decisions and job.handle.session.driver.searching:  # type: ignore[union-attr]
            state = job.handle.state_dict()
            break
    rival, names = job.handle.plan.schedule.word, [name for name, _ in job.model.named_parameters()]
    weights, optimizer = (copy.deepcopy(each.state_dict()) for each in (job.model, job.optimizer))
    job.handle.detach()
    again = Scheduled(Shuffled(SIZES), fast(kind), **chosen_from)
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(optimizer)
    again.handle.load_state_dict(state)
    loaded = again.handle.state_dict()
    same = all(torch.allclose(residual_sum(loaded, name), residual_sum(state, name), atol=1e-6) for name in names)
    for number in range(20):
        again.step(number)
    told = again.handle.plan.schedule.word, len(again.handle.decisions)
    again.handle.detach()
    return rival, *told, same


@pytest.mark.parametrize("kind", ["backward", "pipelined", "delayed"])
def test_a_state_of_a_rival_with_another_schedule_goes_on_with_the_chosen_one(worlds: Worlds, kind: str) -> None:
    for rival, resumed, decisions, same in worlds.run(2, saved_under_a_rival, kind):
        assert rival != kind
        assert (resumed, decisions, same) == (kind, 0, True)


def kept(kind: str) -> tuple[str, bool, str, int]:
    """Decide, train on; and save, load into another handle, and train there."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    job = Scheduled(Shuffled(SIZES), fast(kind), schedules=ALL)
    for number in range(110):
        job.step(number)
    same_w = digest(job.model.parameters())
    state = job.handle.state_dict()
    weights, optimizer = (copy.deepcopy(each.state_dict()) for each in (job.model, job.optimizer))
    torch.manual_seed(rank)
    again = Scheduled(Shuffled(SIZES), fast(kind), schedules=ALL)
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(optimizer)
    again.scheduler.load_state_dict(job.scheduler.state_dict())
    again.handle.load_state_dict(state)
    for each in (job, again):
        for number in range(110, 125):
            each.step(number)
    same = digest(job.model.parameters()) == digest(again.model.parameters())
    told = (
        job.handle.plan.schedule.word,
        same and again.handle.plan == job.handle.plan,
        same_w,
        len(job.handle.decisions),
    )
    for each in (job, again):
        each.handle.detach()
    return told


@pytest.mark.parametrize("kind", ["pipelined", "delayed"])
def test_the_fastest_schedule_is_kept_and_resumed_bit_for_bit(worlds: Worlds, kind: str) -> None:
    first, second = worlds.run(2, kept, kind)
    assert first == second
    chosen, resumed, _, decisions = first
    assert chosen == kind and resumed
    assert decisions == 1, "steady times were taken for a change"


def slow_corrections() -> tuple[str, list[str]]:
    """Corrections of the delayed schedule take long: the median of its steps is the best of all, their mean is not."""

    def times(plan: gw.Plan, step: int) -> float:
        if plan.schedule.word == "delayed":
            return 70.0 if step % plan.schedule.period == 0 else 5.0
        return 12.0 if plan.schedule.word == "pipelined" else 16.0

    torch.manual_seed(0)
    job = Scheduled(Shuffled(SIZES), times, schedules=ALL)
    for number in range(110):
        job.step(number)
    decision = job.handle.decision
    assert decision is not None
    told = job.handle.plan.schedule.word, [f"{each.name} {each.measured_us}" for each in decision.tried]
    job.handle.detach()
    return told


def test_corrections_count(worlds: Worlds) -> None:
    chosen, tried = worlds.run(2, slow_corrections)[0]
    assert any("Delayed" in each for each in tried), "none was tried"
    assert chosen == "pipelined", tried


def with_closures() -> tuple[set[str], str, int]:
    """Rank 1 alone gives its optimizer a closure."""
    torch.manual_seed(0)
    job = Scheduled(Shuffled(SIZES), fast("pipelined"), closure=dist.get_rank() == 1, schedules=ALL)
    kinds = set()
    for number in range(90):
        job.step(number)
        kinds.add(job.handle.plan.schedule.word)
    told = kinds, str(job.handle.decision), len(job.handle.decisions)
    job.handle.detach()
    return told


def test_what_one_ranks_script_cannot_run_is_left_out_on_all(worlds: Worlds) -> None:
    for kinds, said, decisions in worlds.run(2, with_closures):
        assert kinds == {"backward"} and decisions == 1
        assert "Not tried: pipelined, since SGD.step is called with a closure" in said
        assert "Not tried: delayed" in said


def not_allowed() -> tuple[str, list[str], str]:
    torch.manual_seed(0)
    job = Scheduled(Shuffled(SIZES), fast("backward"))
    for number in range(90):
        job.step(number)
    decision = job.handle.decision
    assert decision is not None
    state = job.handle.state_dict()
    plan = job.handle.session.plan_of(gw.Uniform(gw.Identity(), schedule="pipelined"))
    key = f"rank{dist.get_rank()}/decided"
    other = state | {key: torch.frombuffer(bytearray(plan.to_json(None).encode()), dtype=torch.uint8)}
    with pytest.raises(ValueError) as refused:
        job.handle.load_state_dict(other)
    job.step(60)
    told = job.handle.plan.schedule.word, [each.name for each in decision.elsewhere], str(refused.value)
    job.handle.detach()
    return told


def test_schedules_that_are_not_allowed_are_foreseen_and_never_run(worlds: Worlds) -> None:
    kind, names, refused = worlds.run(2, not_allowed)[0]
    assert kind == "backward"
    assert sorted(re.findall(r" buckets?, (\w+)", "; ".join(names))) == ["Delayed", "pipelined"], names
    assert "does not run" in refused and "'pipelined'" in refused


# ---- pure


def test_whole_cycles_count() -> None:
    """Steps of 10 and one of 60 in five are 20 each; a plain step of 25 is slower."""
    trial, seen = Trial([Candidate("A", 20.0, cycle=5), Candidate("plain", 25.0, plain=True)]), 0
    while (turn := trial.turn) is not None:
        seen += turn.candidate == 0
        trial.took(25.0 if turn.candidate else 60.0 if seen % 5 == 0 else 10.0)
    assert trial.chosen == 0 and set(trial.times[0]) == {20.0}


def test_an_evaluation_is_not_taken_for_a_step_whatever_plan_it_meets() -> None:
    """Plans run in turns of three steps; the one's optimizer takes 0.2 s between steps, the other's none."""
    pace, now, wrong = StepPace(), 0.0, 0
    for number in range(60):
        plan = number // 3 % 2
        if number % 3 == 0:
            pace.runs(plan)
        began = now + (0.2 if plan else 0.0) + 30.0 * (number % 4 == 2)
        ended = began + 0.9
        counted = ended - pace.step(began, ended)
        now = ended
        if number > 6 and number % 3:  # the first step of a turn is not counted
            wrong += abs(counted - (1.1 if plan else 0.9)) > 1e-6
    assert wrong == 0


def test_steps_that_come_late_are_seen_by_a_later_decision() -> None:
    """As where a GradScaler leaves out the first ones."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    watch = Stepped([optimizer])
    assert watch.look() == "the script did not call step() of the optimizers that it passed"
    optimizer.step()
    assert watch.look() == "" and not optimizer._optimizer_step_pre_hooks
    assert Stepped([]).look() == ""


def detached_early() -> tuple[int, int]:
    model = Given([(4, 4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, schedules=("backward", "pipelined"))
    hooks = []
    for number in range(2):
        model(model.random_gradients(dist.get_rank(), number)).backward()
        hooks.append(len(optimizer._optimizer_step_pre_hooks))
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return max(hooks), len(optimizer._optimizer_step_pre_hooks)


def test_nothing_stays_on_an_optimizer(worlds: Worlds) -> None:
    assert worlds.run(2, detached_early) == [(1, 0)] * 2
