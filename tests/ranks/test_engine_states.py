"""States of handles: resuming in a group of another size, with ranks missing, and what is refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from threads import Threads, here
from worlds import Given, Worlds

import gradwire as gw

SIZES = [700, 300, 5]
State = dict[str, torch.Tensor]


def policy(scheme: str) -> gw.Policy:
    return gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), scheme=scheme, bucket_bytes=2000)


def run(steps: int, scheme: str) -> State:
    """Some steps with error feedback; this rank's state."""
    model = Given(SIZES)
    handle = gw.parallelize(model, plan=policy(scheme), process_group=here.group)
    for step in range(steps):
        model.zero_grad()
        model(model.random_gradients(step, here.rank)).backward()
    return handle.state_dict()


def residuals(state: State) -> dict[str, torch.Tensor]:
    """The sum over ranks and encodes, by tensor, in float64."""
    total: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if "/residual/" in key:
            name = key.rpartition("/")[2]
            total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + value.double()
    return total


def load(state: State, scheme: str) -> tuple[State, list[str], int]:
    """Begin anew with a state; the new one, the warnings, and the step after one more."""
    model = Given(SIZES)
    handle = gw.parallelize(model, plan=policy(scheme), process_group=here.group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle.load_state_dict(state)
    state = handle.state_dict()
    model(model.random_gradients(9, here.rank)).backward()
    return state, [str(warning.message) for warning in caught], handle.stats().steps


def merged(states: list[State]) -> State:
    return {key: value for state in states for key, value in state.items()}


@pytest.mark.parametrize("scheme", ["alltoall", "allgather"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1), (1, 2)])
def test_another_number_of_ranks_keeps_the_sum_of_residuals(worlds: Worlds, scheme: str, before: int, after: int) -> None:
    saved = merged(worlds.run(before, run, 3, scheme))
    ends = worlds.run(after, load, saved, scheme)
    expected, found = residuals(saved), residuals(merged([state for state, _, _ in ends]))
    assert before == 1 or all(value.norm() > 0.1 for value in expected.values())
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6)
    assert all(not told and steps == 4 for _, told, steps in ends)


def owing(steps: int) -> State:
    """From error feedback to a plan without; one parameter gets no gradient since, so what is left of it is owed still."""
    model = Given(SIZES)
    handle = gw.parallelize(model, plan=policy("alltoall"), process_group=here.group)
    for step in range(steps):
        model.zero_grad()
        model(model.random_gradients(step, here.rank)).backward()
    handle.session.change_to(handle.session.plan_of(gw.Uniform(gw.Identity())))
    model([None, *model.random_gradients(steps, here.rank)[1:]]).backward()
    return handle.state_dict()


def load_plain(state: State) -> State:
    model = Given(SIZES)
    handle = gw.parallelize(model, plan=gw.Uniform(gw.Identity()), process_group=here.group)
    handle.load_state_dict(state)
    return handle.state_dict()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_what_is_owed_goes_to_another_number_of_ranks(threads: Threads, before: int, after: int) -> None:
    saved = merged(threads.run(before, owing, 3))
    expected, found = residuals(saved), residuals(merged(threads.run(after, load_plain, saved)))
    assert expected["p0"].norm() > 0.1
    assert torch.allclose(found["p0"], expected["p0"], atol=1e-6)


def factors(state: State, spec: gw.Spec) -> State:
    """Begin anew with a state, if there is one, under this spec; else make a step. The state then."""
    model = Given([(40, 30)])
    handle = gw.parallelize(model, plan=gw.Uniform(spec), process_group=here.group)
    if state:
        handle.load_state_dict(state)
    else:
        model(model.random_gradients(here.rank)).backward()
    return handle.state_dict()


@pytest.mark.parametrize("spec", [gw.PowerSGD(rank=2, start_step=0), gw.EFSignSGD()], ids=repr)
def test_another_number_of_ranks_may_have_other_factors(threads: Threads, spec: gw.Spec) -> None:
    saved = merged(threads.run(2, factors, {}, gw.PowerSGD(rank=1, start_step=0)))
    expected, found = residuals(saved), residuals(merged(threads.run(3, factors, saved, spec)))
    assert torch.allclose(found["p0"], expected["p0"], atol=1e-6)


@pytest.mark.parametrize("after", [3, 2])
def test_a_missing_rank_begins_at_zero_with_a_warning(worlds: Worlds, after: int) -> None:
    states = worlds.run(3, run, 2, "alltoall")
    saved = merged([states[0], states[2]])
    ends = worlds.run(after, load, saved, "alltoall")
    alone = [told for state, told, _ in ends]
    assert [len(told) for told in alone] == ([0, 1, 0] if after == 3 else [0, 1])
    assert "nothing of rank 1: what it had not sent yet of 'p" in alone[1][0]
    assert "and 2 more tensors is lost" in alone[1][0]
    new = merged([state for state, _, _ in ends])
    for name, value in residuals(saved).items():
        assert torch.allclose(residuals(new)[name], value, atol=1e-6)


def under(schedule: Any, state: State) -> tuple[State, list[str]]:
    """Begin anew with a state under this schedule, or make some steps; the state then, and the warnings. A step more works."""
    torch.manual_seed(0)
    model = Given(SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    plan = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule=schedule, bucket_bytes=2000)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)

    def step(number: int) -> None:
        model(model.random_gradients(number, here.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if state:
            handle.load_state_dict(state)
        else:
            for number in range(4):
                step(number)
    saved = handle.state_dict()
    step(4)
    handle.detach()
    return saved, [str(each.message) for each in caught]


OF_WEIGHTS = gw.LocalSteps(every=2)


@pytest.mark.parametrize("after", [2, 1])
@pytest.mark.parametrize(
    ("first", "then", "dropped"),
    [
        (OF_WEIGHTS, "backward", True),
        ("backward", OF_WEIGHTS, True),
        (OF_WEIGHTS, gw.Delayed(), True),
        (gw.Delayed(), OF_WEIGHTS, True),
        (OF_WEIGHTS, gw.LocalSteps(every=4), False),
        ("backward", gw.Pipelined(), False),
    ],
    ids=repr,
)
def test_residuals_of_gradients_are_not_taken_for_changes_of_weights_nor_the_other_way_round(
    worlds: Worlds, first: Any, then: Any, dropped: bool, after: int
) -> None:
    saved = merged([state for state, _ in worlds.run(3, under, first, {})])
    expected = residuals(saved)
    assert max(value.abs().max() for value in expected.values()) > 0
    ends = worlds.run(after, under, then, saved)
    found = residuals(merged([state for state, _ in ends]))
    for name, value in expected.items():
        kept = found.get(name, torch.zeros(()))
        assert not kept.any() if dropped else torch.allclose(kept, value, atol=1e-6)
    for _, told in ends:
        assert len(told) == dropped, told
        assert all(f"and {len(SIZES) - 1} more tensors is dropped" in words for words in told)


def refuse(wrong: State) -> tuple[str, bool]:
    """What is said of a state that does not fit, and whether the handle stayed as it was and goes on."""
    model = Given(SIZES)
    handle = gw.parallelize(model, plan=policy("alltoall"), process_group=here.group)
    model(model.random_gradients(here.rank)).backward()
    before = handle.state_dict()
    with pytest.raises(ValueError) as caught:
        handle.load_state_dict(wrong)
    after = handle.state_dict()
    same = before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    model(model.random_gradients(here.rank)).backward()
    return str(caught.value), same


def without(field: str) -> Callable[[State], State]:
    return lambda state: {key: value for key, value in state.items() if not key.endswith(field)}


def having(**fields: Any) -> Callable[[State], State]:
    return lambda state: {key: fields.get(key.partition("/")[2], value) for key, value in state.items()}


WRONG: dict[str, tuple[Callable[[State], Any], str]] = {
    "a list": (lambda state: [], "the state is of type list"),
    "a number": (lambda state: 5, "the state is of type int"),
    "nothing of ours": (lambda state: {"weight": torch.ones(1)}, "it holds 'weight'"),
    "saved by an older gradwire": (without("/version"), "no rank0/version"),
    "a version to come": (having(version=torch.tensor(7)), "Update gradwire"),
    "no order": (without("/order"), "no rank0/order"),
    "a float step": (having(step=torch.tensor(1.5)), "rank0/step is a tensor of float32"),
    "a step below zero": (having(step=torch.tensor(-1)), "rank0/step is -1"),
    "an order that repeats": (having(order=torch.tensor([0, 0, 1])), "order numbers 3 tensors"),
    "another model": (having(order=torch.tensor([1, 0])), "order numbers 2 tensors, not each of the 3"),
    "half a digest": (having(plan=torch.zeros(16, dtype=torch.uint8)), "rank0/plan has 16 bytes"),
    "another plan": (having(plan=torch.zeros(32, dtype=torch.uint8)), "Defaults of policies changed between releases"),
    "steps of two checkpoints": (
        lambda state: {k: torch.tensor(5) if k == "rank1/step" else v for k, v in state.items()} | OF_THREE,
        "these were not saved together",
    ),
    "an unknown field": (
        lambda state: state | {f"rank{rank}/color": torch.ones(1) for rank in range(2)},
        "rank0/color is not a field",
    ),
    "another group's": (having(ranks=torch.tensor([5, 6])), "rank0/ranks is (5, 6)"),
    "not a tensor": (having(**{"residual/0/p0": "text"}), "residual/0/p0 is a str"),
    "a residual too long": (having(**{"residual/0/p0": torch.zeros(701)}), "701 elements"),
    "a model of other sizes": (
        having(plan=torch.zeros(32, dtype=torch.uint8), **{"residual/0/p0": torch.zeros(701)}),
        "residual/0/p0 has 701 elements where the model's tensor has 700: the state was saved with another model",
    ),
}
OF_THREE = {f"rank{rank}/ranks": torch.arange(3) for rank in range(2)}


@pytest.mark.parametrize("what", WRONG)
def test_states_that_do_not_fit_change_nothing(threads: Threads, what: str) -> None:
    change, words = WRONG[what]
    saved = merged(threads.run(2, run, 1, "alltoall"))
    told, same = threads.run(2, refuse, change(saved))[0]
    assert words in told
    assert same


# ---- states of steps that are not over


def ask(handle: gw.Handle) -> list[str]:
    """What saving and loading raise."""
    told = []
    for act in (handle.state_dict, lambda: handle.load_state_dict({})):
        with pytest.raises(gw.StepStateError, match=r"state_dict\(\) was refused") as caught:
            act()
        told.append(str(caught.value))
    return told


def ask_in_between() -> tuple[list[str], list[str], list[str], int]:
    """In a hook in mid-step, after a backward that was left, after a failure; and the step of the state in between."""
    model = Given(SIZES)
    handle = gw.parallelize(model, plan=gw.ErrorFeedback(gw.QSGD(bits=2)), process_group=here.group)
    model(model.random_gradients(0)).backward()
    told: list[list[str]] = []
    loss = model(model.random_gradients(1))
    hook = model.p0.register_hook(lambda gradient: told.append(ask(handle)))
    loss.backward()
    hook.remove()
    saved = int(handle.state_dict()[f"rank{here.rank}/step"])
    hook = model.p0.register_hook(lambda gradient: {}["left"])
    with pytest.raises(KeyError):
        model(model.random_gradients(1)).backward()
    hook.remove()
    told.append(ask(handle))
    handle.reset()
    handle.state_dict()
    handle.session.lanes.fail(gw.CommunicationError("as ordered"))
    told.append(ask(handle))
    handle.detach()
    return told[0], told[1], told[2], saved


def test_states_of_steps_that_are_not_over_are_refused(threads: Threads) -> None:
    for middle, left, failed, saved in threads.run(2, ask_in_between):
        assert all("step 1 is in hand" in words and "when backward() has returned" in words for words in middle)
        assert all("step 2 is in hand" in words and "handle.reset() on all ranks" in words for words in left)
        assert all("as ordered" in words and "Restart from the last checkpoint" in words for words in failed)
        assert saved == 2
