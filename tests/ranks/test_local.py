"""The local schedule against DiLoCo in plain torch, and what it promises like every other schedule."""

import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch
from delayed_steps import gradient, momentum
from local_steps import LocalReference
from test_delayed import adam, make_model
from threads import Threads, here
from torch import nn
from worlds import Given, World, digest

import gradwire as gw
from gradwire.engine.schedules.local import LocalSchedule, OuterOptimizer

STEPS = 13
EXACT, TWO_BITS = gw.Identity(), gw.ErrorFeedback(gw.QSGD(bits=2))


def training(spec: gw.Spec, schedule: gw.LocalSteps, make_optimizer: Any = momentum) -> Any:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    plan = gw.Uniform(spec, schedule=schedule, bucket_bytes=1)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    return model, optimizer, handle


def step_on(model: nn.Module, optimizer: Any, step: int) -> None:
    gradient(model, step, here.rank)
    optimizer.step()
    optimizer.zero_grad()


def own_weights(model: Any) -> str:
    """Read without a method: a look would show the global ones."""
    return digest(getattr(layer, kind) for layer in (model[0], model[2]) for kind in ("weight", "bias"))


def engine(spec: gw.Spec, schedule: gw.LocalSteps, make_optimizer: Any, look: bool) -> tuple[list[Any], list[str]]:
    """W after each step, or only at the end; and digests of L, which a look does not change."""
    model, optimizer, handle = training(spec, schedule, make_optimizer)
    seen, own = [], []
    for step in range(STEPS):
        step_on(model, optimizer, step)
        own.append(own_weights(model))
        if look or step == STEPS - 1:
            seen.append([value.clone() for value in model.state_dict().values()])
    handle.detach()
    return seen, own


SCHEDULES = {
    "DiLoCo": gw.LocalSteps.diloco(every=3),
    "mean of weights": gw.LocalSteps(every=4),
    "mean of weights, own second moments": gw.LocalSteps(every=4, second_moment="own"),
    "every step": gw.LocalSteps(every=1, outer=gw.Nesterov(lr=0.3, momentum=0.5)),
    "a delay": gw.LocalSteps(every=4, outer=gw.Nesterov(), delay=2),
    "a delay of a whole period": gw.LocalSteps(every=3, delay=3),
    "mixed": gw.LocalSteps(every=3, delay=1, mixing=0.5),
    "two fragments": gw.LocalSteps(every=3, outer=gw.Nesterov(), fragments=2),
    "streaming": gw.LocalSteps(every=5, outer=gw.Nesterov(0.4, 0.9), fragments=4, delay=1, mixing=0.5),
    "a trust region": gw.LocalSteps(every=3, outer=gw.Nesterov(radius=0.25)),
    "a trust region for each fragment": gw.LocalSteps(every=4, outer=gw.Nesterov(0.5, 0.5, radius=0.1), fragments=2),
    "a trust region without momentum": gw.LocalSteps(every=3, outer=gw.Nesterov(2.0, 0.0, radius=0.3)),
}


FRAGMENTS = {1: None, 2: [[3, 2, 1], [0]], 4: [[3], [2], [1], [0]]}
"""Places of parameters; buckets come in the reverse order of registration."""


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_are_those_of_plain_diloco(threads: Threads, name: str, ranks: int, make_optimizer: Any) -> None:
    fragments = FRAGMENTS[SCHEDULES[name].fragments]
    expected = LocalReference(SCHEDULES[name], make_model, make_optimizer, gradient, ranks, fragments)
    expected.run(STEPS)
    looked = threads.run(ranks, engine, EXACT, SCHEDULES[name], make_optimizer, True)
    estimated = make_optimizer is adam and SCHEDULES[name].second_moment == "mean"
    for seen, _ in looked:
        if ranks == 2 and SCHEDULES[name].outer.radius is None and not estimated:
            assert [digest(weights) for weights in seen] == [digest(weights) for weights in expected.history]
        for found, weights in zip(seen, expected.history, strict=True):
            assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-6) for a, b in zip(found, weights, strict=True))
    unseen = threads.run(ranks, engine, EXACT, SCHEDULES[name], make_optimizer, False)
    assert {digest(seen[-1]) for seen, _ in unseen} == {digest(seen[-1]) for seen, _ in looked}
    assert [own for _, own in unseen] == [own for _, own in looked], "looking at weights changed what is computed on"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("spec", [gw.QSGD(bits=4), TWO_BITS, gw.ErrorFeedback(gw.TopK(0.1), decay=0.95)], ids=repr)
def test_global_weights_are_the_same_on_all_ranks(threads: Threads, spec: gw.Spec, ranks: int) -> None:
    ends = threads.run(ranks, engine, spec, gw.LocalSteps(every=3), adam, True)
    assert len({tuple(digest(weights) for weights in seen) for seen, _ in ends}) == 1
    assert len({own[-1] for _, own in ends}) == ranks, "ranks did not train alone"


@pytest.mark.parametrize("radius", [0.01, 0.3, 1e9])
@pytest.mark.parametrize("foreach", [False, True], ids=["", "by lists of tensors, as on GPUs"])
def test_a_trust_region_bounds_the_way_from_the_mean(radius: float, foreach: bool) -> None:
    """Also where the ranks changed nothing: then nothing moves, whatever the momentum is."""
    torch.manual_seed(0)
    weights = {name: torch.randn(size) for name, size in (("a", 7), ("b", 300), ("c", 1))}
    with mock.patch("torch.optim.sgd._default_to_fused_or_foreach", lambda *_, **__: (False, foreach)):
        outer = OuterOptimizer(gw.Nesterov(lr=0.7, momentum=0.9, radius=radius), weights)
        check_trust_region(radius, outer, weights)


def check_trust_region(radius: float, outer: OuterOptimizer, weights: dict[str, torch.Tensor]) -> None:
    free = {name: weight.clone() for name, weight in weights.items()}
    outer_free = OuterOptimizer(gw.Nesterov(lr=0.7, momentum=0.9), free)
    for step in range(6):
        gradients = {name: torch.randn_like(weight) * (step != 4) for name, weight in weights.items()}
        before = {name: weight.clone() for name, weight in weights.items()}
        outer.step({name: gradient.clone() for name, gradient in gradients.items()})
        outer_free.step({name: gradient.clone() for name, gradient in gradients.items()})
        ways = torch.cat([(weights[name] - (before[name] - gradients[name])).flatten() for name in weights])
        own = torch.cat([gradient.flatten() for gradient in gradients.values()])
        assert ways.norm() <= radius * own.norm() + 1e-4
        if radius == 0.01:
            assert ways.norm() >= 0.9 * radius * own.norm(), "it could have gone further"
        if step == 3:
            assert all(torch.equal(weights[name], free[name]) for name in weights) == (radius == 1e9)
    assert not any(torch.equal(weights[name], free[name]) for name in weights)


def test_a_trust_region_lets_what_is_not_finite_through() -> None:
    """A step that overflowed must be seen, and not be replaced by the mean."""
    weights = {"a": torch.ones(3)}
    OuterOptimizer(gw.Nesterov(radius=0.5), weights).step({"a": torch.tensor([1.0, float("nan"), 1.0])})
    assert weights["a"].isnan().any()


def test_residuals_decay(threads: Threads) -> None:
    kept, faded = (gw.ErrorFeedback(gw.QSGD(bits=2), decay=decay) for decay in (1.0, 0.5))
    ends = [threads.run(2, engine, spec, gw.LocalSteps(every=3), momentum, False)[0][0][0] for spec in (kept, faded)]
    assert digest(ends[0]) != digest(ends[1])


def as_backward(schedule: str | gw.LocalSteps) -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(EXACT, schedule=schedule), process_group=here.group)
    for step in range(STEPS):
        step_on(model, optimizer, step)
    weights = [value.clone() for value in model.state_dict().values()]
    handle.detach()
    return weights


@pytest.mark.parametrize("ranks", [2, 3])
def test_averaging_in_each_step_is_the_backward_schedule(threads: Threads, ranks: int) -> None:
    found = threads.run(ranks, as_backward, gw.LocalSteps(every=1))
    for own, expected in zip(found, threads.run(ranks, as_backward, "backward"), strict=True):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(own, expected, strict=True))


# ---- states


def saved_at(schedule: gw.LocalSteps, at: int) -> tuple[dict[str, torch.Tensor], Any, Any, str]:
    """The states of a run after `at` steps, and W at its end."""
    model, optimizer, handle = training(TWO_BITS, schedule)
    for step in range(STEPS):
        if step == at:
            saved = handle.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
            saved = (*saved[:2], {"state": {i: {k: v.clone() for k, v in s.items()} for i, s in saved[2]["state"].items()},
                                  "param_groups": saved[2]["param_groups"]})  # fmt: skip
        step_on(model, optimizer, step)
    end = digest(model.state_dict().values()) + own_weights(model)
    handle.detach()
    return (*saved, end)


def resumed(schedule: gw.LocalSteps, at: int, saved: Any, handle_first: bool) -> str:
    """W and L at the end of a run that goes on from a state."""
    own, weights, optimizers, _ = saved[here.rank]
    model, optimizer, handle = training(TWO_BITS, schedule)
    for act in sorted((False, True), reverse=handle_first):
        handle.load_state_dict(own) if act else model.load_state_dict(weights)
    optimizer.load_state_dict(optimizers)
    for step in range(at, STEPS):
        step_on(model, optimizer, step)
    end = digest(model.state_dict().values()) + own_weights(model)
    handle.detach()
    return end


@pytest.mark.parametrize("handle_first", [False, True])
@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        (gw.LocalSteps.diloco(every=4), 6),
        (gw.LocalSteps(every=4), 8),
        (gw.LocalSteps(every=4, outer=gw.Nesterov(), delay=3, mixing=0.5), 5),
        (gw.LocalSteps(every=4, delay=2), 4),
        (gw.LocalSteps(every=6, outer=gw.Nesterov(), fragments=2, delay=3, mixing=0.5), 8),
        (gw.LocalSteps(every=3, outer=gw.Nesterov(radius=0.3)), 7),
    ],
    ids=[
        *("in a period", "between two", "while an exchange runs", "as an exchange begins", "while a fragment is sent"),
        "with a trust region",
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(threads: Threads, schedule: Any, at: int, handle_first: bool) -> None:
    saved = threads.run(2, saved_at, schedule, at)
    assert threads.run(2, resumed, schedule, at, saved, handle_first) == [end for *_, end in saved]


def on_other_ranks(schedule: gw.LocalSteps, states: dict[str, torch.Tensor], weights: Any) -> tuple[str, str, int]:
    """W after the next two exchanges, L then, and the exchanges made."""
    model, optimizer, handle = training(TWO_BITS, schedule)
    model.load_state_dict(weights)
    handle.load_state_dict(states)
    for step in range(8):
        step_on(model, optimizer, step)
    momenta = digest(value for key, value in handle.state_dict().items() if "/outer/" in key)
    end = digest(model.state_dict().values()), momenta, handle.stats().steps
    handle.detach()
    return end


def test_another_number_of_ranks_goes_on_from_the_global_weights(threads: Threads) -> None:
    schedule = gw.LocalSteps.diloco(every=4)
    saved = threads.run(2, saved_at, schedule, 4)
    states = {key: value for own, *_ in saved for key, value in own.items()}
    ends = threads.run(3, on_other_ranks, schedule, states, saved[0][1])
    assert len({(weights, momenta) for weights, momenta, _ in ends}) == 1
    assert {steps for *_, steps in ends} == {3}
    without = {key: value for key, value in states.items() if "/outer/" not in key}
    assert threads.run(3, on_other_ranks, schedule, without, saved[0][1])[0][0] != ends[0][0], "momentum was not taken"


def refused_state(change: str) -> str:
    model, _, handle = training(EXACT, gw.LocalSteps(every=1))
    step_on(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    state = handle.state_dict()
    other = Given([5])
    before = gw.parallelize(other, torch.optim.SGD(other.parameters(), lr=0.1), plan=EXACT, process_group=here.group)
    key = next(iter(key for key in state if f"/{change}/" in key), f"rank{here.rank}/local_steps")
    state[key] = torch.ones(3) if change != "local_steps" else state.pop(key)
    if change == "local_steps":
        del state[key]
    with pytest.raises(ValueError) as caught:
        handle.load_state_dict(state)
    handle.detach()
    before.detach()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [("local_steps", "no local_steps"), ("local", "has 3 elements where the model's tensor has 54")],
)
def test_a_state_that_does_not_fit_is_refused(threads: Threads, change: str, words: str) -> None:
    for told in threads.run(2, refused_state, change):
        assert words in told


def of_different_steps(saved: Any, files: list[int]) -> tuple[str, bool]:
    """What is raised by a load of the rank's state of that save, and whether the handle then goes on as before."""
    schedule = gw.LocalSteps(every=4, delay=1)
    model, optimizer, handle = training(TWO_BITS, schedule)
    state = {rank: saved[file][rank][0] for rank, file in enumerate(files)}[here.rank]
    with pytest.raises(ValueError) as caught:
        handle.load_state_dict(state)
    step_on(model, optimizer, 0)
    steps = int(handle.state_dict()[f"rank{here.rank}/local_steps"])
    handle.detach()
    return str(caught.value), steps == 1


def test_states_of_two_saves_in_one_period_are_refused(threads: Threads) -> None:
    saved = [threads.run(2, saved_at, gw.LocalSteps(every=4, delay=1), at) for at in (6, 7)]
    for told, goes_on in threads.run(2, of_different_steps, saved, [0, 1]):
        assert goes_on and "the number of local steps in rank 0's state is 6, and in rank 1's 7" in told


def test_ranks_with_local_steps_of_their_own_load_theirs(threads: Threads) -> None:
    schedule = gw.LocalSteps(every=4, steps_of_ranks=(4, 2))
    assert all(threads.run(2, loads_of_one_moment, schedule))


def loads_of_one_moment(schedule: gw.LocalSteps) -> bool:
    """Whether a state loads that ranks save after different numbers of local steps."""
    model, optimizer, handle = training(TWO_BITS, schedule)
    for step in range(schedule.steps_of(here.rank)):
        step_on(model, optimizer, step)
    state = handle.state_dict()
    handle.load_state_dict(state)
    handle.detach()
    return int(state[f"rank{here.rank}/local_steps"]) == schedule.steps_of(here.rank)


def changed_plan_before_a_load() -> tuple[int, int]:
    """How many changes of the plan run that a step puts off: before a load, and after it."""
    model, optimizer, handle = training(EXACT, gw.LocalSteps(every=4))
    state, schedule, changes = handle.state_dict(), handle.session.schedule, list[int]()
    assert isinstance(schedule, LocalSchedule)
    found = []
    for loads in (False, True):
        step_on(model, optimizer, 0)
        with schedule._putting_off():
            schedule.when_idle(lambda: changes.append(0))
        if loads:
            handle.load_state_dict(state)
        step_on(model, optimizer, 1)
        found.append(len(changes))
        changes.clear()
    handle.detach()
    return found[0], found[1]


def test_a_change_of_the_plan_from_before_a_load_is_forgotten(threads: Threads) -> None:
    assert threads.run(2, changed_plan_before_a_load) == [(1, 0)] * 2


# ---- faults


def drifted(spoil: bool) -> str | None:
    model = Given([300, 7, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gw.Uniform(gw.QSGD(bits=3), schedule=gw.LocalSteps(every=2))
    handle = gw.parallelize(model, optimizer, plan=plan, drift_check_steps=1, process_group=here.group)
    try:
        for step in range(10):
            model(model.random_gradients(here.rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if spoil and step == 5 and here.rank == 1:
                model.state_dict()["p1"][3].neg_()
    except gw.DisagreementError as error:
        return str(error)
    finally:
        handle.detach()
    return None


def test_global_weights_that_differ_are_found(threads: Threads) -> None:
    assert threads.run(2, drifted, False) == [None, None]
    for told in threads.run(2, drifted, True):
        assert told is not None and "rank 0 and rank 1" in told and "'p1'" in told


def until_told(schedule: gw.LocalSteps) -> str:
    model, optimizer, _ = training(gw.QSGD(bits=4), schedule)
    for step in range(20):
        if step == 5 and here.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        try:
            step_on(model, optimizer, step)
        except gw.CommunicationError as error:
            assert step == 5 + schedule.delay
            weights = digest(model.state_dict().values())  # the last ones that all had
            assert weights == digest(model.state_dict().values())
            return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (gw.LocalSteps(every=3), "rank 1"),
        (gw.LocalSteps(every=3, delay=2), "rank 1"),
        (gw.LocalSteps(every=6, fragments=2), "of fragment 2 of 2"),
    ],
    ids=repr,
)
def test_a_rank_that_died_is_named(schedule: gw.LocalSteps, words: str) -> None:
    with World(3, 6.0) as world:
        world.start(until_told, schedule)
        for rank, outcome in enumerate(world.collect(40.0, needed=[0, 2])):
            assert rank == 1 or (outcome.kind == "returned" and "rank 1" in outcome.value and words in outcome.value), outcome
