"""What islands save and load: any moment, any order, torch's distributed checkpoint, and all ranks or none."""

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_islands import EVERY, STEPS, batch, built, train, whole
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from worlds import Worlds, digest, mesh_of

import gradwire as gw

SPEC = gw.ErrorFeedback(gw.QSGD(bits=2))
MIXED = gw.Uniform(SPEC, schedule=gw.LocalSteps(every=EVERY, mixing=0.5, outer=gw.Nesterov()))


def resumed_mixed(shards: bool) -> list[bool]:
    """Whether runs go on as if they had not ended, which save at an exchange and between two, and load in either order."""
    is_same = []
    for begin in (EVERY, EVERY + 1):
        model, optimizer, made = built(shards, MIXED)
        train(model, optimizer, range(begin))
        state, inner, weights = copy.deepcopy((made.state_dict(), optimizer.state_dict(), model.state_dict()))
        train(model, optimizer, range(begin, STEPS))
        made.detach()
        for order in ("islands first", "islands last"):
            again, optimizer_again, made_again = built(shards, MIXED)
            if order == "islands first":
                made_again.load_state_dict(state)
            again.load_state_dict(weights)
            if order == "islands last":
                made_again.load_state_dict(state)
            optimizer_again.load_state_dict(copy.deepcopy(inner))
            train(again, optimizer_again, range(begin, STEPS))
            is_same.append(digest([whole(again)]) == digest([whole(model)]))
            made_again.detach()
    return is_same


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_a_run_with_mixing_goes_on_from_any_moment(worlds: Worlds, shards: bool) -> None:
    assert worlds.run(4, resumed_mixed, shards) == [[True] * 4] * 4


def old_form(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """The state as gradwire 0.3 saved it."""
    old: dict[str, Any] = {"weights": {}, "momenta": {}, "residuals": {}, "steps": state[f"rank{rank}/steps"]}
    for key, value in state.items():
        part, _, name = key.removeprefix(f"rank{rank}/").partition("/")
        if part in ("weights", "momenta", "residuals") and name:
            old[part][f"rank{rank}/{name}" if part == "residuals" else name] = value
    return old


def checkpointed(folder: str) -> tuple[list[bool], str]:
    """Whether torch's distributed checkpoint of a rank's shards and states in the old form are loaded by a model that was just
    made, and what another rank's state raises."""
    model, optimizer, made = built(True, MIXED)
    train(model, optimizer, range(EVERY + 1))
    state, inner = made.state_dict(), copy.deepcopy(optimizer.state_dict())
    with made.global_weights():
        shown = digest([whole(model)])
    dcp.save({"islands": made}, checkpoint_id=folder)
    train(model, optimizer, range(EVERY + 1, STEPS))
    made.detach()

    again, optimizer_again, made_again = built(True, MIXED)
    dcp.load({"islands": made_again}, checkpoint_id=folder)
    with made_again.global_weights():
        is_same = [digest([whole(again)]) == shown]
    optimizer_again.load_state_dict(inner)
    train(again, optimizer_again, range(EVERY + 1, STEPS))
    is_same.append(digest([whole(again)]) == digest([whole(model)]))

    rank = dist.get_rank()
    made_again.load_state_dict(old_form(state, rank))
    is_same.append(digest([whole(again)]) == shown)
    with pytest.raises(ValueError) as error:
        made_again.load_state_dict({key: value for key, value in state.items() if rank != 2})
    made_again.detach()
    return is_same, str(error.value)


def test_a_distributed_checkpoint_has_the_state_of_each_rank(worlds: Worlds) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ends = worlds.run(4, checkpointed, folder)
    for rank, (is_same, said) in enumerate(ends):
        assert is_same == [True] * 3
        assert ("the state has no rank2/steps" if rank == 2 else "another rank could not load its state") in said


def misfits() -> list[str]:
    """What is raised where rank 2 has a state that does not fit. Nothing changes on any rank."""
    policy = gw.Uniform(SPEC, schedule=gw.LocalSteps(every=EVERY, outer=gw.Nesterov()))
    model, optimizer, made = built(False, policy)
    train(model, optimizer, range(EVERY))
    earlier = made.state_dict()
    train(model, optimizer, range(EVERY, STEPS))
    before, weights = made.state_dict(), digest([whole(model)])
    said = []
    for part, change in (
        ("weights", lambda each: each[:1]),
        ("weights", lambda each: each.double()),
        ("local", lambda each: None),
        ("momenta", lambda each: each[None]),
        ("steps", lambda each: each + 1),
    ):
        state = dict(earlier)
        if dist.get_rank() == 2:
            key = next(key for key in state if key.startswith(f"rank2/{part}"))
            state[key] = change(state[key])
        with pytest.raises(ValueError) as error:
            made.load_state_dict(state)
        said.append(str(error.value))
        after = made.state_dict()
        assert digest([whole(model)]) == weights
        assert after.keys() == before.keys() and all(torch.equal(before[key], after[key]) for key in before)
    made.load_state_dict(before)
    made.detach()
    return said


def test_all_ranks_load_or_none(worlds: Worlds) -> None:
    ends = worlds.run(4, misfits)
    for rank, (*others, steps) in enumerate(ends):
        assert "states of different steps" in steps
        assert rank == 2 or all("another rank could not load its state" in said for said in others)
    shape, dtype, missing, momentum, _ = ends[2]
    assert "of shape [1, 7] for 'module.0.weight', and this rank has torch.float32 of shape [33, 7]" in shape
    assert "torch.float64" in dtype and "local of the state have nothing" in missing
    assert "the momenta of the state have torch.float32 of shape [1, " in momentum


def with_a_step_left_out(which: int) -> tuple[int, bool, list[str]]:
    """The steps of an island before it loads its own state, where a GradScaler leaves out one step on the last island alone;
    whether the weights at the end are finite; and their digests at the exchanges."""
    mesh, is_last = mesh_of(2, 1), dist.get_rank() == 1
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = gw.islands(model, optimizer, mesh, gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=EVERY)))
    scaler, ends = torch.amp.GradScaler("cpu", init_scale=8.0), []

    def train_scaled(steps: range) -> None:
        for step in steps:
            loss = model(batch(step)[0]).square().mean() * (torch.inf if is_last and step == which else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step % EVERY == EVERY - 1:
                ends.append(digest(model.parameters()))

    train_scaled(range(STEPS - 1))
    state, steps = made.state_dict(), made.steps
    made.load_state_dict(state)
    train_scaled(range(STEPS - 1, STEPS))
    made.detach()
    return steps, torch.isfinite(model.weight).all().item(), ends


@pytest.mark.parametrize("which", [2, EVERY - 1], ids=["between", "at an exchange"])
def test_a_step_that_a_scaler_leaves_out_on_one_island_counts(worlds: Worlds, which: int) -> None:
    first, second = worlds.run(2, with_a_step_left_out, which)
    assert first == second == (STEPS - 1, True, first[2]) and len(set(first[2])) == STEPS // EVERY


def steps_of_states() -> tuple[list[int], bool]:
    """The steps of an island after torch made states of an optimizer that keeps none, after a training step, and after torch
    loaded the state of a new optimizer; and whether weights stayed."""
    model = torch.nn.Linear(7, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = gw.islands(model, optimizer, mesh_of(2, 1), gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=2)))
    before = digest(model.parameters())
    states = [get_optimizer_state_dict(model, optimizer) for _ in range(2 + dist.get_rank())]
    steps, stays = [made.steps], digest(model.parameters()) == before
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps.append(made.steps)
    set_optimizer_state_dict(model, optimizer, states[0])
    steps.append(made.steps)
    made.detach()
    return steps, stays


def test_the_steps_by_which_torch_makes_states_do_not_count(worlds: Worlds) -> None:
    assert worlds.run(2, steps_of_states) == [([0, 1, 1], True)] * 2
