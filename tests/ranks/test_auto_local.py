"""plan="auto" and local steps on real ranks: the engine changes to them and back, and auto chooses them where they may run."""

import copy
import re
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_auto_schedules import InTurn
from worlds import Given, Worlds, digest, seeded

import gradwire as gw
from gradwire.api.handle import Handle
from gradwire.auto.driver import Auto
from gradwire.auto.live import Live
from gradwire.core.cluster import Cluster, Link

EXACT, TWO_BITS = gw.Identity(), gw.ErrorFeedback(gw.QSGD(bits=2))
SIZES = [(40, 30), (50, 20), (3,), (60, 7)]


def policies(spec: gw.Spec) -> list[gw.Policy]:
    local = [gw.LocalSteps(every=every) for every in (4, 1, 3)]
    ways = ("backward", local[0], "pipelined", local[1], local[2], "backward", "delayed")
    return [gw.Uniform(spec, schedule=way, bucket_bytes=1) for way in ways]


# ---- the engine changes schedules on a live job


def in_turn(spec: gw.Spec) -> tuple[float, list[str], str]:
    """How far W is from what all gradients give: with plain SGD, gradients that do not depend on weights, and means of W."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Given(SIZES)
    begin = [parameter.detach().double() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = gw.parallelize(model, optimizer, plan=policies(spec)[0])
    driver = InTurn(policies(spec))
    handle.session.driver = driver
    true, kinds, number = [torch.zeros_like(weight) for weight in begin], [], 0
    while driver.seen < 3 * 8 - 1:  # through all of them, and two steps of the first again
        optimizer.zero_grad()
        model(model.random_gradients(rank, number)).backward()
        optimizer.step()
        if number % 7 == 3:
            model.state_dict()  # a look changes nothing
        means = model.mean_of(lambda r, s=number: model.random_gradients(r, s), world_size)
        for total, mean in zip(true, means, strict=True):
            total += mean
        number += 1
        kinds.append(handle.plan.schedule.word)
    handle.flush()
    off = max(
        (((before - weight.double()) / 0.5 - total).norm() / total.norm()).item()
        for weight, before, total in zip(model.parameters(), begin, true, strict=True)
    )
    same = digest(model.parameters())
    handle.detach()
    assert not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks
    return off, kinds, same


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_gradient_counts_once_while_plans_change_to_local_steps_and_back(worlds: Worlds, world_size: int) -> None:
    told = worlds.run(world_size, in_turn, EXACT)
    assert len({same for *_, same in told}) == 1
    for off, kinds, _ in told:
        assert off < 1e-5
        assert set(kinds) == {"backward", "pipelined", "local", "delayed"}


def uneven(schedule: gw.LocalSteps) -> tuple[str, int]:
    """Loops of different length while plans change."""
    torch.manual_seed(0)
    model = Given(SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ways = [gw.Uniform(TWO_BITS), gw.Uniform(TWO_BITS, schedule=schedule, bucket_bytes=1)]
    handle = gw.parallelize(model, optimizer, plan=ways[0])
    driver = InTurn(ways)
    handle.session.driver = driver
    for _ in range(4):
        with handle.join():
            for number in range(5 + 6 * dist.get_rank()):
                optimizer.zero_grad()
                model(model.random_gradients(dist.get_rank(), number)).backward()
                optimizer.step()
    handle.flush()
    same = digest(model.parameters())
    handle.detach()
    return same, driver.seen


@pytest.mark.parametrize(
    "schedule",
    [
        gw.LocalSteps(every=2),
        gw.LocalSteps(every=2, delay=2),
        gw.LocalSteps(every=4, fragments=4, delay=1, mixing=0.5),
    ],
    ids=repr,
)
def test_plans_change_to_local_steps_and_back_where_a_rank_has_no_batch(worlds: Worlds, schedule: gw.LocalSteps) -> None:
    first, *others = worlds.run(3, uneven, schedule)
    assert all(other == first for other in others) and first[1] > 12


class Halves(torch.nn.Module):
    """A script calls its parts, and never the model."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)


def by_parts() -> tuple[int, str, list[str]]:
    """The exchanges of 24 local steps under a driver that asks for other schedules, the weights then, and what is said."""
    torch.manual_seed(0)
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ways = [gw.Uniform(EXACT, schedule=gw.LocalSteps(every=2)), gw.Uniform(EXACT)]
    handle = gw.parallelize(model, optimizer, plan=ways[0])
    handle.session.driver = InTurn(ways)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(24):
            model.decode(model.encode(torch.randn(5, 6, generator=seeded(dist.get_rank(), step)))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    told = handle.session.step, digest(model.parameters()), [str(each.message) for each in caught]
    handle.detach()
    return told


def test_local_steps_go_on_where_a_script_calls_parts_and_another_schedule_cannot_begin(worlds: Worlds) -> None:
    """It begins with a forward of the model. Ranks that waited for one would exchange nothing any more, and drift apart."""
    (steps, weights, words), (_, others, _) = worlds.run(2, by_parts)
    assert steps == 12 and weights == others
    assert sum("a change from local steps to another schedule was dropped" in each for each in words) == 1


def residuals() -> list[float]:
    """The largest residual after each step, in which weights change by a millionth of the gradients."""
    torch.manual_seed(0)
    model, largest = Given(SIZES), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    ways = [gw.Uniform(TWO_BITS), gw.Uniform(TWO_BITS, schedule=gw.LocalSteps(every=2))]
    handle = gw.parallelize(model, optimizer, plan=ways[0])
    handle.session.driver = InTurn(ways)
    for number in range(9):
        optimizer.zero_grad()
        model(model.random_gradients(dist.get_rank(), number)).backward()
        optimizer.step()
        kept = [value.abs().max().item() for key, value in handle.state_dict().items() if "/residual/" in key]
        largest.append(max(kept, default=0.0))
    handle.detach()
    return largest


def test_residuals_of_gradients_and_of_weights_do_not_mix(worlds: Worlds) -> None:
    for largest in worlds.run(2, residuals):
        assert min(largest[:2]) > 0.01, "gradients left nothing"
        assert max(largest[3:8]) < 1e-4, "a residual of gradients went over to weights"
        assert largest[5] > 0.0, "weights left nothing"


def thawed() -> tuple[float, str]:
    """The largest residual, and the schedule, after a parameter was thawed. Before, weights changed by a thousand gradients."""
    torch.manual_seed(0)
    model = Given(SIZES)
    model.p1.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(TWO_BITS))
    handle.session.change_to(handle.session.plan_of(gw.Uniform(TWO_BITS, schedule=gw.LocalSteps(every=2))))
    for number in range(8):
        if number == 6:
            handle.flush()
            model.p1.requires_grad_(True)
        optimizer.zero_grad()
        gradients = model.random_gradients(dist.get_rank(), number)
        model([None if index == 1 and number < 6 else each for index, each in enumerate(gradients)]).backward()
        optimizer.step()
    kept = [value.abs().max().item() for key, value in handle.state_dict().items() if "/residual/" in key]
    schedule = handle.plan.schedule.word
    handle.detach()
    return max(kept), schedule


def test_residuals_of_weights_are_not_sent_as_gradients_where_a_parameter_is_thawed(worlds: Worlds) -> None:
    for largest, schedule in worlds.run(2, thawed):
        assert schedule == "backward"
        assert 0.01 < largest < 20.0


# ---- auto

Times = Callable[[gw.Plan, int], tuple[float, float]]
"""Milliseconds of a step under a plan, and for how many of them it waits."""


class Clocked:
    """A model in training whose clock passes as `times` says, on a link that is measured to have 10 Mb/s."""

    def __init__(self, times: Times, **arguments: object) -> None:
        torch.manual_seed(0)
        self.model, self.times, self.now = Given([(200, 300)] * 6), times, 0.0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.handle: Handle = gw.parallelize(self.model, self.optimizer, **arguments)  # type: ignore[arg-type]
        driver = self.handle.session.driver
        assert isinstance(driver, Auto)
        driver.clock = lambda: self.now

    def step(self, number: int) -> None:
        gradients = self.model.random_gradients(dist.get_rank(), number)
        began, (step_ms, exposed_ms) = self.now, self.times(self.handle.plan, number)

        def measured(live: Live, seconds: float) -> Cluster:
            return Cluster(nodes=2, ranks_per_node=1, intra=Link(50.0, 0.01), inter=Link(50.0, 0.01))

        with (
            mock.patch("gradwire.auto.driver.cluster_of", measured),
            mock.patch("gradwire.auto.change_watch.cluster_of", measured),
            mock.patch.multiple(Live, link_us=1000.0, exposed_us=1e3 * exposed_ms, began_s=began),
        ):
            self.optimizer.zero_grad()
            loss = self.model(gradients)
            self.now += step_ms / 1e3
            loss.backward()
            self.optimizer.step()


def slow_link(plan: gw.Plan, number: int) -> tuple[float, float]:
    """Computation takes 40 ms, and any plan that exchanges in each step waits for 200 more."""
    return (40.0, 0.0) if number < 3 or plan.schedule.word == "local" else (240.0, 200.0)


def fast_link(plan: gw.Plan, number: int) -> tuple[float, float]:
    return 42.0, 2.0


def told(times: Times, steps: int, schedules: tuple[str, ...], accuracy: str) -> tuple[str, str, list[str], str, int]:
    job = Clocked(times, schedules=schedules, accuracy=accuracy)
    for number in range(steps):
        job.step(number)
    job.handle.flush()
    decision = job.handle.decision
    assert decision is not None
    found = (
        repr(job.handle.plan.schedule), str(decision), [each.name for each in decision.elsewhere],
        digest(job.model.parameters()), len(job.handle.decisions),
    )  # fmt: skip
    job.handle.detach()
    return found


def test_local_steps_that_are_allowed_run_on_a_slow_link(worlds: Worlds) -> None:
    first, second = worlds.run(2, told, slow_link, 150, ("backward", "local"), "safe")
    assert first == second
    schedule, words, _, _, decisions = first
    assert schedule.startswith("LocalSteps(every=") and schedule in words and decisions == 1
    assert "took 240.0 ms, and a step waited 200.0 ms for exchanges" in words
    assert "compare the held-out loss" in words
    assert re.search(r"expected to end \d\.\d % above that of synchronous SGD.* needs about \d\.\d\d times as many steps", words)


@pytest.mark.parametrize(("accuracy", "times"), [("safe", fast_link), ("exact", slow_link)])
def test_local_steps_do_not_run_where_they_bring_nothing_nor_where_nothing_may_be_lost(
    worlds: Worlds, accuracy: str, times: Times
) -> None:
    for schedule, words, *_ in worlds.run(2, told, times, 40, ("backward", "local"), accuracy):
        assert schedule == "Backward()" and "LocalSteps" not in words


def test_the_line_says_what_local_steps_would_bring_where_they_are_not_allowed(worlds: Worlds) -> None:
    for schedule, words, elsewhere, _, _ in worlds.run(2, told, slow_link, 40, ("backward",), "safe"):
        assert schedule == "Backward()"
        assert any("LocalSteps" in name for name in elsewhere)
        assert "LocalSteps" in words.partition("if schedules= allowed its schedule")[0]


def resumed() -> tuple[str, bool, bool]:
    """Decide for local steps, train on; and save, load into another handle, and train there."""
    job = Clocked(slow_link, schedules=("backward", "local"))
    for number in range(100):
        job.step(number)
    state = job.handle.state_dict()
    weights, optimizer = (copy.deepcopy(each.state_dict()) for each in (job.model, job.optimizer))
    again = Clocked(slow_link, schedules=("backward", "local"))
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(optimizer)
    again.handle.load_state_dict(state)
    for each in (job, again):
        for number in range(100, 330):
            each.step(number)
    same = digest(job.model.parameters()) == digest(again.model.parameters())
    with pytest.raises(ValueError) as refused:
        Clocked(slow_link).handle.load_state_dict(state)
    found = (
        job.handle.plan.schedule.word,
        same and again.handle.plan == job.handle.plan,
        "'local'" in str(refused.value),
    )
    for each in (job, again):
        each.handle.detach()
    return found


def test_chosen_local_steps_are_resumed_bit_for_bit(worlds: Worlds) -> None:
    assert worlds.run(2, resumed) == [("local", True, True)] * 2


def slower_link() -> tuple[list[str], list[str]]:
    """Local steps run until the batch grows: auto decides anew, among plans that exchange in each step first."""
    job, kinds, whys = Clocked(slow_link, schedules=("backward", "local")), [], []
    driver = job.handle.session.driver
    assert isinstance(driver, Auto)
    for number in range(400):
        with mock.patch.object(Live, "inputs", 1000 if number < 200 else 3000):
            job.step(number)
        kinds.append(job.handle.plan.schedule.word)
    whys = [each.why for each in job.handle.decisions]
    job.handle.detach()
    changes = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    return changes, whys


def test_auto_looks_again_while_local_steps_run(worlds: Worlds) -> None:
    for changes, whys in worlds.run(2, slower_link):
        assert changes[:3] == ["backward", "local", "backward"] and changes[-1] == "local"
        assert len(whys) == 2 and "inputs" in whys[1]
