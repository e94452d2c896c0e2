"""Ranks that make different numbers of local steps between exchanges: against plain torch, and after a resume."""

from typing import Any

import pytest
import torch
from delayed_steps import gradient, momentum
from local_steps import lower_plainly
from test_delayed import adam, make_model
from threads import Threads, here
from torch import nn
from worlds import digest

import gradwire as gw

ROUNDS, SAMPLES = 3, (8, 5, 2)
"""Rounds of a training, and the samples of each rank's batches where scripts give weights."""
SCHEDULES = {
    "half speed": gw.LocalSteps(every=4, steps_of_ranks=(4, 2)),
    "three speeds": gw.LocalSteps(every=6, steps_of_ranks=(2, 6, 3)),
    "momentum outside": gw.LocalSteps(every=3, steps_of_ranks=(1, 3), outer=gw.Nesterov()),
}


def expected(schedule: gw.LocalSteps, make_optimizer: Any, weighed: bool) -> list[torch.Tensor]:
    """The global weights of one process that plays all ranks."""
    whole = make_model()
    data, steps = schedule.outer, schedule.steps_of_ranks
    outer = torch.optim.SGD(whole.parameters(), lr=data.lr, momentum=data.momentum, nesterov=data.momentum > 0)
    local = [make_model() for _ in steps]
    inner = [make_optimizer(model.parameters()) for model in local]
    weights = [count * (samples if weighed else 1) for count, samples in zip(steps, SAMPLES, strict=False)]
    for number in range(ROUNDS):
        for rank, (model, optimizer) in enumerate(zip(local, inner, strict=True)):
            for step in range(number * steps[rank], (number + 1) * steps[rank]):
                gradient(model, step, rank)
                optimizer.step()
                if isinstance(optimizer, torch.optim.Adam):
                    lower_plainly(optimizer, len(local))
                optimizer.zero_grad()
        with torch.no_grad():
            for weight, *own in zip(whole.parameters(), *(model.parameters() for model in local), strict=True):
                weight.grad = sum(part * (weight - each) for part, each in zip(weights, own, strict=True)) / sum(weights)
            outer.step()
            for model in local:
                for own, weight in zip(model.parameters(), whole.parameters(), strict=True):
                    own.copy_(weight)
    return [parameter.detach() for parameter in whole.parameters()]


def training(spec: gw.Spec, schedule: gw.LocalSteps, make_optimizer: Any) -> tuple[nn.Module, Any, gw.Handle]:
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    plan = gw.Uniform(spec, schedule=schedule, bucket_bytes=1)
    return model, optimizer, gw.parallelize(model, optimizer, plan=plan, process_group=here.group)


def step_on(model: nn.Module, optimizer: Any, step: int) -> None:
    gradient(model, step, here.rank)
    optimizer.step()
    optimizer.zero_grad()


def engine(schedule: gw.LocalSteps, make_optimizer: Any, weighed: bool) -> list[torch.Tensor]:
    model, optimizer, handle = training(gw.Identity(), schedule, make_optimizer)
    for step in range(ROUNDS * schedule.steps_of(here.rank)):
        if weighed:
            handle.weight(SAMPLES[here.rank])
        step_on(model, optimizer, step)
    weights = [value.clone() for value in model.state_dict().values()]
    assert handle.stats().steps == ROUNDS
    handle.detach()
    return weights


@pytest.mark.parametrize("weighed", [False, True], ids=["by steps", "by samples"])
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_rank_counts_by_its_steps_or_samples(threads: Threads, name: str, make_optimizer: Any, weighed: bool) -> None:
    schedule = SCHEDULES[name]
    of_ranks = threads.run(len(schedule.steps_of_ranks), engine, schedule, make_optimizer, weighed)
    assert len({digest(weights) for weights in of_ranks}) == 1
    for found, weight in zip(of_ranks[0], expected(schedule, make_optimizer, weighed), strict=True):
        torch.testing.assert_close(found, weight, atol=1e-6, rtol=1e-6)


def saved_and_resumed(schedule: gw.LocalSteps) -> tuple[str, str]:
    """W at the end of a run, and at the end of a run that goes on from its state in the middle of a round."""
    steps, at = 4 * schedule.steps_of(here.rank), 2 * schedule.steps_of(here.rank) + 1
    model, optimizer, handle = training(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule, torch.optim.SGD)
    for step in range(at):
        step_on(model, optimizer, step)
    state, weights = handle.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(at, steps):
        step_on(model, optimizer, step)
    end = digest(model.state_dict().values())
    handle.detach()
    model, optimizer, handle = training(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule, torch.optim.SGD)
    model.load_state_dict(weights)
    handle.load_state_dict(state)
    for step in range(at, steps):
        step_on(model, optimizer, step)
    again = digest(model.state_dict().values())
    handle.detach()
    return end, again


@pytest.mark.parametrize(
    "schedule",
    [gw.LocalSteps(every=6, steps_of_ranks=(6, 3)), gw.LocalSteps(every=8, fragments=2, delay=1, steps_of_ranks=(4, 8))],
    ids=["whole", "in fragments"],
)
def test_a_run_resumes_in_the_middle_of_a_round(threads: Threads, schedule: gw.LocalSteps) -> None:
    (first, again), (other, too) = threads.run(2, saved_and_resumed, schedule)
    assert first == again == other == too


def saved_after(schedule: gw.LocalSteps, exchanges: int, more: int) -> Any:
    model, optimizer, handle = training(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule, torch.optim.SGD)
    for step in range(exchanges * schedule.steps_of(here.rank) + more):
        step_on(model, optimizer, step)
    saved = handle.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    handle.detach()
    return saved


def going_on(schedule: gw.LocalSteps, own: Any, weights: Any) -> list[int]:
    """The exchanges so far at the end of each of three periods, and whether all ranks have the same W."""
    model, optimizer, handle = training(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule, torch.optim.SGD)
    model.load_state_dict(weights)
    handle.load_state_dict(own[here.rank])
    found = []
    for _ in range(3):
        for step in range(schedule.steps_of(here.rank)):
            step_on(model, optimizer, step)
        handle.flush()
        found.append(handle.session.step)
    found.append(len({*here.gather(digest(model.state_dict().values()))}))
    handle.detach()
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (gw.LocalSteps(every=4, steps_of_ranks=(2, 4)), gw.LocalSteps(every=4, steps_of_ranks=(2, 4, 4))),
        (gw.LocalSteps(every=4, steps_of_ranks=(4, 2)), gw.LocalSteps(every=4, steps_of_ranks=(4, 2, 2))),
        (gw.LocalSteps(every=3), gw.LocalSteps(every=5)),
        (gw.LocalSteps(every=5), gw.LocalSteps(every=2)),
    ],
    ids=["slow first", "fast first", "longer periods", "shorter periods"],
)
@pytest.mark.parametrize("more", [0, 1])
def test_another_number_of_ranks_begins_a_period(threads: Threads, before: Any, after: Any, more: int) -> None:
    """No rank goes on with the count of another one: it would wait for the others, or they for it, for most of an epoch."""
    saved = threads.run(2, saved_after, before, 4, more)
    states = {key: value for own, _ in saved for key, value in own.items()}
    assert threads.run(3, going_on, after, [states] * 3, saved[0][1]) == [[5, 6, 7, 1]] * 3


@pytest.mark.parametrize("delay", [0, 2])
def test_with_the_file_of_one_rank_lost_all_begin_a_period(threads: Threads, delay: int) -> None:
    schedule = gw.LocalSteps(every=6, steps_of_ranks=(6, 3), delay=delay)
    saved = threads.run(2, saved_after, schedule, 4, 1)
    with pytest.warns(UserWarning, match="holds nothing of rank 1"):
        found = threads.run(2, going_on, schedule, [saved[0][0]] * 2, saved[0][1])
    assert found == [[5, 6, 7, 1]] * 2


def refused() -> str:
    with pytest.raises(gw.PlanError) as caught:
        training(gw.Identity(), gw.LocalSteps(every=3, steps_of_ranks=(3, 2)), momentum)
    return str(caught.value)


def test_steps_of_another_number_of_ranks_are_refused(threads: Threads) -> None:
    for told in threads.run(3, refused):
        assert "2 ranks" in told and "there are 3" in told
