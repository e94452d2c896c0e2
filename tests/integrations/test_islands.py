"""Islands: local steps between groups that average gradients in every step, compared with DiLoCo in plain torch."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_steps import lower_plainly
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, digest, mesh_of, seeded

import gradwire as gw
from gradwire.engine import REGISTRY, prepare
from gradwire.integrations.island_checks import listed

EVERY, STEPS = 4, 12


def network() -> nn.Sequential:
    """Sizes that two ranks do not divide."""
    torch.manual_seed(5 + dist.get_rank() // 2)  # islands begin with different weights
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 5))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(8, 7, generator=seeded(step, dist.get_rank()))
    return inputs, (inputs @ torch.randn(7, 5, generator=seeded(2))).argmax(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs, labels = batch(step)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def diloco(outer: gw.Nesterov, second_moment: str) -> torch.Tensor:
    """The weights of DiLoCo in plain torch, with whole models and DDP inside each island."""
    mesh = mesh_of(2, 2)
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.broadcast(parameter, 0)
    inside = DistributedDataParallel(model, process_group=mesh["inside"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if second_moment == "mean":
        optimizer.register_step_post_hook(lambda optimizer, *_: lower_plainly(optimizer, ranks=2))  # of islands
    weights = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    of_weights = torch.optim.SGD(weights, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
    for begin in range(0, STEPS, EVERY):
        train(inside, optimizer, range(begin, begin + EVERY))
        with torch.no_grad():
            for weight, parameter in zip(weights, model.parameters(), strict=True):
                weight.grad = weight - parameter
                dist.all_reduce(weight.grad, group=mesh["between"].get_group())
                weight.grad /= 2
            of_weights.step()
            for weight, parameter in zip(weights, model.parameters(), strict=True):
                parameter.copy_(weight)
    return torch.cat([weight.detach().reshape(-1) for weight in weights])


def built(shards: bool, policy: gw.Policy) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model on two islands, its optimizer, and what `gw.islands` returns."""
    mesh = mesh_of(2, 2)
    model: nn.Module = network()
    if shards:
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh["inside"])
        fully_shard(model, mesh=mesh["inside"])
    else:
        model = DistributedDataParallel(model, process_group=mesh["inside"].get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, gw.islands(model, optimizer, mesh, policy)


def whole(model: nn.Module) -> torch.Tensor:
    parts = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().reshape(-1) for each in parts])


def beside_diloco(shards: bool, outer: gw.Nesterov, second_moment: str) -> float:
    """The largest difference from the weights of plain torch."""
    schedule = gw.LocalSteps(every=EVERY, outer=outer, second_moment=second_moment)
    model, optimizer, made = built(shards, gw.Uniform(gw.Identity(), schedule=schedule))
    train(model, optimizer, range(STEPS))
    own = whole(model)
    made.detach()
    return (own - diloco(outer, second_moment)).abs().max().item()


@pytest.mark.parametrize("second_moment", ["own", "mean"])
@pytest.mark.parametrize("outer", [gw.Nesterov(lr=1.0, momentum=0.0), gw.Nesterov()], ids=["mean", "momentum"])
@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_weights_are_those_of_diloco_in_plain_torch(worlds: Worlds, shards: bool, outer: gw.Nesterov, second_moment: str) -> None:
    assert max(worlds.run(4, beside_diloco, shards, outer, second_moment)) <= 1e-6


def compressed(shards: bool) -> tuple[str, str, bool, int, int]:
    """Digests of the weights at an exchange and of the global weights after two more steps, whether the local weights are others
    then, the bytes that this rank sends in an exchange, and those of its outer gradients."""
    spec = gw.ErrorFeedback(gw.QSGD(bits=4))
    model, optimizer, made = built(shards, gw.Uniform(spec, schedule=gw.LocalSteps(every=EVERY)))
    train(model, optimizer, range(STEPS))
    at_exchange = digest([whole(model)])
    train(model, optimizer, range(STEPS, STEPS + 2))
    local = digest([whole(model)])
    with made.global_weights():
        shown = digest([whole(model)])
    assert digest([whole(model)]) == local
    stats = made.stats()
    made.detach()
    return at_exchange, shown, local != shown, stats.wire_bytes, stats.gradient_bytes


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_islands_have_equal_weights_at_exchanges(worlds: Worlds, shards: bool) -> None:
    ends = worlds.run(4, compressed, shards)
    assert len({digest for at_exchange, shown, *_ in ends for digest in (at_exchange, shown)}) == 1
    assert all(differs for _, _, differs, *_ in ends)
    model_bytes = 4 * sum(parameter.numel() for parameter in nn.Linear(7, 33).parameters()) + 4 * (34 * 33 + 34 * 5)
    of_island = [sum(gradient for *_, gradient in ends[first : first + 2]) for first in (0, 2)]
    assert of_island == [model_bytes] * 2, "an island sends the model once"
    assert all(wire < gradient / 2 for *_, wire, gradient in ends)


def resumed(shards: bool) -> tuple[str, str]:
    """Digests of weights at the end of a run, and of one that begins from its state in the middle."""
    policy = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule=gw.LocalSteps.diloco(every=EVERY))
    model, optimizer, made = built(shards, policy)
    train(model, optimizer, range(EVERY))
    state, inner = made.state_dict(), copy.deepcopy(optimizer.state_dict())
    again, optimizer_again, made_again = built(shards, policy)
    made_again.load_state_dict(state)
    optimizer_again.load_state_dict(inner)
    train(again, optimizer_again, range(EVERY, STEPS))
    made_again.detach()
    train(model, optimizer, range(EVERY, STEPS))
    made.detach()
    return digest([whole(model)]), digest([whole(again)])


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_a_run_goes_on_from_its_state(worlds: Worlds, shards: bool) -> None:
    for usual, again in worlds.run(4, resumed, shards):
        assert usual == again


def not_kept() -> tuple[str, str, str]:
    """The weights one step before an exchange and at the exchange, in a script that does not keep what `gw.islands` returns, and
    what a second call raises."""
    policy = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=EVERY))
    model, optimizer, _ = built(False, policy)
    gc.collect()
    train(model, optimizer, range(EVERY - 1))
    before = digest([whole(model)])
    train(model, optimizer, range(EVERY - 1, EVERY))
    mesh = mesh_of(2, 2)
    with pytest.raises(gw.StepStateError) as error:
        gw.islands(model, optimizer, mesh, policy)
    return before, digest([whole(model)]), str(error.value)


def test_a_script_need_not_keep_it_and_a_second_call_is_refused(worlds: Worlds) -> None:
    ends = worlds.run(4, not_kept)
    assert len({before for before, *_ in ends}) == 2, "islands train apart"
    assert len({after for _, after, _ in ends}) == 1
    assert all("trains on islands already" in said for *_, said in ends)


def detached_again() -> bool:
    """Whether islands that follow others live on where the first ones are detached again."""
    policy = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=EVERY))
    model, optimizer, made = built(False, policy)
    made.detach()
    second = weakref.ref(gw.islands(model, optimizer, mesh_of(2, 2), policy))
    made.detach()
    gc.collect()
    return second() is not None and any(map(REGISTRY.owns, model.parameters()))


def test_a_second_detach_leaves_the_next_islands_alone(worlds: Worlds) -> None:
    assert all(worlds.run(4, detached_again))


def with_a_handle() -> list[str]:
    """What is raised for a handle of a model that trains on islands, and for islands of a model that has a handle."""
    policy = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=EVERY))
    model, optimizer, made = built(False, policy)
    with pytest.raises(gw.StepStateError) as first:
        prepare(model.module, gw.Identity(), 4)
    made.detach()
    prepare(model.module, gw.Identity(), 4)
    REGISTRY.add(model.module, model.parameters(), None)
    mesh = mesh_of(2, 2)
    with pytest.raises(gw.StepStateError) as second:
        gw.islands(model, optimizer, mesh, policy)
    return [str(first.value), str(second.value)]


def test_a_model_on_islands_has_no_handle(worlds: Worlds) -> None:
    assert all("averaged twice" in said for told in worlds.run(4, with_a_handle) for said in told)


def added(shards: bool) -> str:
    """What `optimizer.step()` raises once the model has a layer more."""
    model, optimizer, made = built(shards, gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=EVERY)))
    train(model, optimizer, range(1))
    (model if shards else model.module).append(nn.Linear(5, 5))
    with pytest.raises(gw.StepStateError) as error:
        train(model, optimizer, range(1, 2))
    made.detach()
    return str(error.value)


@pytest.mark.parametrize("shards", [False, True], ids=["ddp", "fsdp2"])
def test_a_parameter_that_trains_later_is_refused_on_islands(worlds: Worlds, shards: bool) -> None:
    """Nobody would average it between islands."""
    assert all("5.weight' was thawed, added or replaced" in said for said in worlds.run(4, added, shards))


def of_unlike_steps(who: int, how: str) -> str:
    """What a rank raises that loads its state, where rank `who` loads one of another step, or one that does not fit."""
    policy = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule=gw.LocalSteps(every=EVERY))
    model, optimizer, made = built(False, policy)
    train(model, optimizer, range(EVERY))
    state = made.state_dict()
    if dist.get_rank() == who:
        state[f"rank{who}/steps"] += EVERY
        if how == "damaged":
            del state[f"rank{who}/weights/module.0.weight"]
    with pytest.raises(ValueError) as error:
        made.load_state_dict(state)
    made.detach()
    return str(error.value)


@pytest.mark.parametrize("who", [1, 2])
def test_states_of_different_steps_are_told_on_all_ranks(worlds: Worlds, who: int) -> None:
    for said in worlds.run(4, of_unlike_steps, who, "other step"):
        assert "states of different steps: [" in said


def test_a_state_that_one_rank_cannot_load_is_told_on_all_ranks(worlds: Worlds) -> None:
    for said in worlds.run(4, of_unlike_steps, 3, "damaged"):
        assert "no rank goes on" in said


def of_another_optimizer() -> str:
    model, _, made = built(False, gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=EVERY)))
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gw.StepStateError) as error:
        train(model, other, range(20))
    steps = made.steps
    made.detach()
    train(model, other, range(1))
    return f"{steps} {error.value}"


def test_steps_of_an_optimizer_that_was_not_passed_are_refused(worlds: Worlds) -> None:
    """Islands would train apart and never average."""
    for said in worlds.run(4, of_another_optimizer):
        assert said.startswith("0 SGD steps 'module.0.weight', and no optimizer steps that was passed") and "gw.islands" in said


def with_two_optimizers() -> tuple[float, int]:
    """The largest difference from the weights of one optimizer with two groups, and the steps that were counted."""
    ends, steps = [], []
    for count in (1, 2):
        mesh, model = mesh_of(2, 1), network()
        halves = [[*model[:2].parameters()], [*model[2:].parameters()]]
        groups = [[{"params": each} for each in halves]] if count == 1 else halves
        optimizers = [torch.optim.AdamW(each, lr=0.01) for each in groups]
        policy = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=EVERY))
        made = gw.islands(model, optimizers, mesh, policy)
        for step in range(STEPS):
            inputs, labels = batch(step)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(whole(model))
        steps.append(made.steps)
        made.detach()
    assert steps[0] == STEPS
    return (ends[1] - ends[0]).abs().max().item(), steps[1]


def test_a_list_of_optimizers_makes_the_steps_of_one(worlds: Worlds) -> None:
    assert worlds.run(2, with_two_optimizers) == [(0.0, STEPS)] * 2


@pytest.mark.parametrize(("optimizer", "named"), [([], "an empty list"), (None, "NoneType"), ([object()], "object")])
def test_what_is_no_optimizer_is_refused(optimizer: Any, named: str) -> None:
    with pytest.raises(gw.PlanError, match=f"optimizer is {named}: .*step hooks"):
        listed(optimizer)


def refused() -> list[str]:
    mesh = mesh_of(2, 2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    schedules = gw.LocalSteps(every=4, delay=1), gw.LocalSteps(every=4, steps_of_ranks=(4, 2))
    late, uneven = (gw.Uniform(gw.Identity(), schedule=schedule) for schedule in schedules)
    for wrong_mesh, plan in ((mesh["inside"], late), (mesh, gw.QSGD(bits=4)), (mesh, late), (mesh, uneven)):
        with pytest.raises(gw.PlanError) as error:
            gw.islands(model, optimizer, wrong_mesh, plan)
        said.append(str(error.value))
    return said


def test_what_islands_do_not_run_is_refused(worlds: Worlds) -> None:
    mesh, schedule, *fields = worlds.run(4, refused)[0]
    assert "1 dimensions" in mesh and "LocalSteps" in schedule
    assert "delay=1" in fields[0] and "steps_of_ranks=(4, 2)" in fields[1]
