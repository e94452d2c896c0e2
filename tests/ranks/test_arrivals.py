"""Gradients are copied into their buckets run by run: in any order, all of them or some, whatever hooks of scripts do."""

from collections.abc import Callable, Sequence

import pytest
import torch
from beside_ddp import Ends, Library, Training, assert_as, batch, everything, name_of, sgd
from torch import nn
from worlds import Worlds

import gradwire as gw
from gradwire.engine import gradients


class Layers(nn.Module):
    """Small layers that a forward uses in any order, or leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, inputs: torch.Tensor, order: Sequence[int] = range(5)) -> torch.Tensor:
        for index in order:
            inputs = inputs + self.layers[index](inputs).tanh()
        return inputs


def train(
    library: Library,
    orders: Sequence[Sequence[int]],
    hook: Callable[[nn.Parameter], None] = lambda parameter: None,
    hooked: Sequence[int] = (),
) -> Ends:
    """One step for each order. Every layer's parameters get the hook, which the library's own hooks come before."""
    model = Layers()
    run, optimizer = library.parallelize(model, find_unused_parameters=True), sgd(model)
    for index in hooked:
        for parameter in model.layers[index].parameters():
            parameter.register_post_accumulate_grad_hook(hook)
    for step, order in enumerate(orders):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        run(batch(step), order).square().mean().backward()
        optimizer.step()
    return everything(model)


def order_changes(library: Library) -> Ends:
    orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [0, 1, 2, 3, 4], [1, 0, 3, 2, 4]]
    return train(library, orders)


def first_layer_unused(library: Library) -> Ends:
    """Its gradient comes last in other steps, and completes a run."""
    return train(library, [range(5), range(1, 5), range(5), range(1, 5), range(5)])


def last_layer_unused(library: Library) -> Ends:
    """Its gradient comes first in other steps."""
    return train(library, [range(5), range(4), range(4), range(5)])


def each_unused_once(library: Library) -> Ends:
    return train(library, [[each for each in range(5) if each != step] for step in range(5)])


def replace(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * 2


def multiply(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(3)


ORDERS = [range(5), range(5), [4, 1, 2, 3, 0], range(1, 5), range(5)]


def hook_replaces_last(library: Library) -> Ends:
    return train(library, ORDERS, replace, [0])


def hook_replaces_others(library: Library) -> Ends:
    return train(library, ORDERS, replace, [1, 2, 4])


def hook_changes_all(library: Library) -> Ends:
    return train(library, ORDERS, multiply, range(5))


def many_runs(library: Library) -> Ends:
    """Runs of two or three gradients."""
    before, gradients._RUN_BYTES = gradients._RUN_BYTES, 200
    try:
        yield from order_changes(library)
        yield from each_unused_once(library)
    finally:
        gradients._RUN_BYTES = before


@pytest.mark.parametrize(
    "training",
    [
        order_changes,
        many_runs,
        first_layer_unused,
        last_layer_unused,
        each_unused_once,
        hook_replaces_last,
        hook_replaces_others,
        hook_changes_all,
    ],
    ids=name_of,
)
def test_as_under_ddp(worlds: Worlds, training: Training) -> None:
    assert_as(worlds, "ddp", training)


def nodes_replaced() -> list[list[float]]:
    """Parameters get other memory between steps, so that their nodes are others; only parts of the model are called then."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    handle = gw.parallelize(model, plan=gw.Identity())
    found = []
    for step in range(4):
        if step:
            for parameter in model.parameters():
                parameter.data = parameter.data.double()
                parameter.data = parameter.data.float()
        model.zero_grad()
        model[2](model[0](batch(step)).relu()).square().mean().backward()
        found.append([float(parameter.grad.sum()) for parameter in model.parameters()])
    handle.detach()
    return found


def test_replaced_nodes_send_their_gradients(worlds: Worlds) -> None:
    first, second = worlds.run(2, nodes_replaced)
    assert first == second


def tensors_of_gradients() -> tuple[bool, bool, list[float], list[float]]:
    """A script that drops gradients gets the same tensors in the next step; one that keeps a gradient keeps its values."""
    model = nn.Linear(6, 3)
    handle = gw.parallelize(model, plan=gw.Identity())
    pointers = []
    for step in range(3):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        pointers.append(model.weight.grad.data_ptr())
    kept = model.weight.grad
    before = kept.flatten().tolist()
    model.zero_grad()
    model(batch(3)).square().mean().backward()
    other = model.weight.grad is not kept
    handle.detach()
    return len(set(pointers)) == 1, other, before, kept.flatten().tolist()


def test_gradients_are_handed_out_again_unless_kept(worlds: Worlds) -> None:
    for same, other, before, after in worlds.run(2, tensors_of_gradients):
        assert same and other and before == after
