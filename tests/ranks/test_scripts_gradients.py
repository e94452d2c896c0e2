"""What scripts do with gradients: as under plain DDP, bit for bit on two ranks, or refused in words."""

import os
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from beside_ddp import (
    Ends,
    Library,
    Training,
    assert_as,
    batch,
    everything,
    name_of,
    ordinary,
    plain,
    sgd,
    step_once,
)
from torch import nn
from worlds import World, Worlds, digest

import gradwire as gw

# ---- hooks, and changes between backward and step


def hook_on_parameters(library: Library) -> Ends:
    """register_hook, before and after: it changes what is accumulated."""
    model = plain()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    run = library.parallelize(model)
    model[2].weight.register_hook(lambda gradient: gradient * 3)
    return ordinary(library, model, run)


def triple(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(3)


def accumulate_hook_before(library: Library) -> Ends:
    model = plain()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(triple)
    return ordinary(library, model, library.parallelize(model))


def accumulate_hook_after(library: Library) -> Ends:
    """It sees this rank's own gradient, before anything is sent."""
    model = plain()
    run = library.parallelize(model)
    seen: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    yield from ordinary(library, model, run)
    yield from seen


def hooks_on_modules(library: Library) -> Ends:
    model = plain()
    model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    run = library.parallelize(model)
    model[2].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 2,))
    return ordinary(library, model, run)


def change_gradients(library: Library, change: Callable[[nn.Parameter], None]) -> Ends:
    """Between backward and step."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        run(batch(step)).square().mean().backward()
        for parameter in model.parameters():
            change(parameter)
        optimizer.step()
    return everything(model)


def clip_in_place(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def put_another(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def gradients_changed_in_place(library: Library) -> Ends:
    return change_gradients(library, clip_in_place)


def gradients_replaced(library: Library) -> Ends:
    return change_gradients(library, put_another)


def put_other_data(parameter: nn.Parameter) -> None:
    parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)


def gradients_with_other_data(library: Library) -> Ends:
    return change_gradients(library, put_other_data)


def zero_by_hand(library: Library) -> Ends:
    """As scripts did before zero_grad had set_to_none."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        run(batch(step)).square().mean().backward()
        optimizer.step()
    return everything(model)


def gradients_of_two_tasks(library: Library) -> Ends:
    """Kept aside while the next task's are computed, as in PCGrad."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        of_tasks = []
        for task in range(2):
            optimizer.zero_grad()
            run(batch(2 * step + task)).square().mean().backward()
            of_tasks.append([parameter.grad for parameter in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *of_tasks, strict=True):
            parameter.grad = first + 0.5 * second
        optimizer.step()
    return everything(model)


def views_of_gradients_kept(library: Library) -> Ends:
    """Flattened for a projection, and used after the next task's backward; some of some parameters only."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        of_tasks = []
        for task in range(2):
            optimizer.zero_grad()
            run(batch(2 * step + task)).square().mean().backward()
            kept = [parameter.grad.view(-1)[step:] for parameter in model.parameters()]
            of_tasks.append(kept if task else kept[step % 2 :: 2])
        for first, second in zip(of_tasks[0], of_tasks[1][step % 2 :: 2], strict=True):
            second.add_(first - first.mean())
        optimizer.step()
    return everything(model)


def sharpness_aware(library: Library) -> Ends:
    """SAM: two backwards a step, the weights moved in between."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        step_once(run, optimizer, 2 * step)
        moves = [0.05 * parameter.grad for parameter in model.parameters()]
        torch._foreach_add_([parameter.data for parameter in model.parameters()], moves)
        optimizer.zero_grad()
        run(batch(2 * step)).square().mean().backward()
        torch._foreach_sub_([parameter.data for parameter in model.parameters()], moves)
        optimizer.step()
    return everything(model)


@pytest.mark.parametrize(
    "training",
    [
        hook_on_parameters,
        accumulate_hook_before,
        accumulate_hook_after,
        hooks_on_modules,
        gradients_changed_in_place,
        gradients_replaced,
        gradients_with_other_data,
        zero_by_hand,
        gradients_of_two_tasks,
        views_of_gradients_kept,
        sharpness_aware,
    ],
    ids=name_of,
)
def test_gradients_as_under_ddp(worlds: Worlds, training: Training) -> None:
    assert_as(worlds, "ddp", training)


# ---- what DDP does not do, or leaves unsynchronised


def penalty_alone(library: Library) -> Ends:
    """The last bias has no part in it; DDP takes it for used and never ends the step."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        inputs = batch(step).requires_grad_()
        (slope,) = torch.autograd.grad(run(inputs).sum(), inputs, create_graph=True)
        (slope.norm(2, dim=1) - 1).square().mean().backward()
        library.averaged(model)
        optimizer.step()
    return everything(model)


def backward_to_some_parameters(library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward(inputs=[model[0].weight, model[2].bias])
        library.averaged(model)
        optimizer.step()
    return everything(model)


def parts_of_the_model(library: Library) -> Ends:
    """DDP leaves the gradients of a forward that does not go through its wrapper as they are on each rank."""
    model = plain()
    library.parallelize(model)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        model[2](model[0](batch(step)).relu()).square().mean().backward()
        library.averaged(model)
        optimizer.step()
    return everything(model)


def parts_and_other_data(library: Library) -> Ends:
    """No forward of the whole model, which would notice that the gradients' memory is another one."""
    model = plain()
    library.parallelize(model)
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        model[2](model[0](batch(step)).relu()).square().mean().backward()
        library.averaged(model)
        for parameter in model.parameters():
            put_other_data(parameter)
        optimizer.step()
    return everything(model)


@pytest.mark.parametrize(
    "training",
    [penalty_alone, backward_to_some_parameters, parts_of_the_model, parts_and_other_data],
    ids=name_of,
)
def test_gradients_are_the_mean_where_ddp_gives_none(worlds: Worlds, training: Training) -> None:
    assert_as(worlds, "by hand", training)


def the_graph_once_more(library: Library) -> Ends:
    """DDP leaves the second backward's gradients on their rank unless it has a forward of its own."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        outputs = run(batch(step))
        outputs.square().mean().backward(retain_graph=True)
        (run(batch(step)) if library.kind == "ddp" else outputs).abs().mean().backward()
        optimizer.step()
    return everything(model)


def test_retain_graph_is_as_a_second_forward_under_ddp(worlds: Worlds) -> None:
    assert_as(worlds, "ddp", the_graph_once_more)


def graph_of_gradients() -> str:
    """Torch's own words: the mean has no graph. DDP raises in backward."""
    model = plain()
    gw.parallelize(model, plan=gw.Identity())
    model(batch(0)).square().mean().backward(create_graph=True)
    with pytest.raises(RuntimeError) as caught:
        model[0].weight.grad.square().sum().backward()
    return str(caught.value)


def test_gradients_have_no_graph(worlds: Worlds) -> None:
    for told in worlds.run(2, graph_of_gradients):
        assert "does not require grad" in told


def step_in_backward(before: bool, to_none: bool) -> str:
    """The optimizer steps as soon as a gradient is there, so it cannot see the other ranks' gradients."""
    model = plain()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(set_to_none=to_none)

    if not before:
        gw.parallelize(model, plan=gw.Identity())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    if before:
        gw.parallelize(model, plan=gw.Identity())
    weights = digest(model.parameters())
    with pytest.raises(gw.StepStateError) as caught:
        model(batch(0)).square().mean().backward()
    assert digest(model.parameters()) == weights
    return str(caught.value)


@pytest.mark.parametrize("to_none", [True, False], ids=["set to None", "zeroed"])
@pytest.mark.parametrize("before", [True, False], ids=["before parallelize", "after parallelize"])
def test_an_optimizer_in_backward_is_refused(worlds: Worlds, before: bool, to_none: bool) -> None:
    for told in worlds.run(2, step_in_backward, before, to_none):
        assert "SGD.step() was called inside backward and takes the gradient of '2." in told
        assert "Step the optimizer after backward" in told


def step_of_a_schedule_in_backward(schedule: str) -> str:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity(), schedule))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with pytest.raises(gw.StepStateError) as caught:
        model(batch(0)).square().mean().backward()
    handle.detach()
    return str(caught.value)


REASONS = {
    "pipelined": "before its exchange has ended",
    "delayed": "the delayed schedule may exchange and replace weights",
    "local": "the local schedule may exchange and replace weights",
}


@pytest.mark.parametrize("schedule", REASONS)
def test_an_optimizer_in_backward_is_refused_in_every_schedule(worlds: Worlds, schedule: str) -> None:
    for told in worlds.run(2, step_of_a_schedule_in_backward, schedule):
        assert "SGD.step() was called inside backward" in told and REASONS[schedule] in told


def own_gradients(average: bool, steps: int) -> list[str]:
    """Gradients by torch.autograd.grad, averaged by the script or not. What the script is warned of."""
    torch.manual_seed(0)
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Identity())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(steps):
            loss = model(batch(step)).square().mean()
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
                if average:
                    dist.all_reduce(gradient)
                parameter.grad = gradient
            dist.barrier()  # ranks are as far as each other
            optimizer.step()
            dist.barrier()
    handle.detach()
    return [str(each.message) for each in told if "synchronised backward" in str(each.message)]


def store_gone() -> int:
    """Rank 0, which hosts the store, ends. The optimizer steps that rank 1 makes after it, with gradients of its own."""
    torch.manual_seed(0)
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Identity(), drift_check_steps=1)
    for step in range(4):
        if step == 2:
            dist.barrier()
            if dist.get_rank() == 0:
                os._exit(0)
            time.sleep(0.5)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    handle.detach()
    return step


def test_looking_at_own_gradients_survives_the_host_of_the_store() -> None:
    with World(2, 10.0) as world:
        world.start(store_gone)
        died, went_on = world.collect(30)
    assert died.kind == "died" and (went_on.kind, went_on.value) == ("returned", 3), went_on.value


def test_gradients_of_the_scripts_own_are_compared_by_weights(worlds: Worlds) -> None:
    for rank, told in enumerate(worlds.run(2, own_gradients, False, 14)):
        (words,) = told
        assert f"rank {1 - rank} are not the same" in words and "'0.weight'" in words and "torch.autograd.grad" in words
    assert worlds.run(2, own_gradients, True, 14) == [[], []]
