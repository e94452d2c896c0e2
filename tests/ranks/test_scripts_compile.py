"""torch.compile before and after parallelize: as compiled plain DDP, bit for bit on two ranks."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from beside_ddp import Ends, Library, assert_as, batch, everything, normalised, plain, sgd, step_once
from torch import nn
from worlds import Worlds, digest

import gradwire as gw

EAGER = "aot_eager"


def compiled(order: str, library: Library) -> Ends:
    torch._dynamo.reset()
    model = normalised()
    if order == "compiled first":
        run = library.parallelize(torch.compile(model, backend=EAGER))
    elif order == "compiled and called first":
        run = torch.compile(model, backend=EAGER)
        run(batch(99))
        wrapped = library.parallelize(model)
        run = wrapped if library.kind == "ddp" else run
    elif order == "compiled afterwards":
        run = torch.compile(library.parallelize(model), backend=EAGER)
    elif order == "in place first":
        model.compile(backend=EAGER)
        run = library.parallelize(model)
    elif order == "in place and called first":
        model.compile(backend=EAGER)
        model(batch(99))
        run = library.parallelize(model)
    elif order == "in place afterwards":
        run = library.parallelize(model)
        run.compile(backend=EAGER)
    else:
        for block in model:
            block.compile(backend=EAGER)
        run = library.parallelize(model)
    optimizer = sgd(model)
    for step in range(3):
        step_once(run, optimizer, step)
    return everything(model)


@pytest.mark.parametrize(
    "order",
    [
        "compiled first",
        "compiled afterwards",
        "in place first",
        "in place afterwards",
        "block by block",
        "in place and called first",
        "compiled and called first",
    ],
)
def test_compiled_models(worlds: Worlds, order: str) -> None:
    assert_as(worlds, "ddp", partial(compiled, order))


def accumulate(library: Library) -> Ends:
    torch._dynamo.reset()
    model = plain()
    wrapped = library.parallelize(model)
    run, optimizer = torch.compile(wrapped, backend=EAGER), sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with library.no_sync(wrapped):
            run(batch(10 * step)).square().mean().backward()
        run(batch(10 * step + 1)).square().mean().backward()
        optimizer.step()
    return everything(model)


def test_a_compiled_model_accumulates(worlds: Worlds) -> None:
    assert_as(worlds, "ddp", accumulate)


def full_graph() -> list[str]:
    """One graph of the whole model is possible when it is compiled first."""
    torch._dynamo.reset()
    model = plain()
    run = torch.compile(model, backend=EAGER, fullgraph=True)
    handle = gw.parallelize(run, plan=gw.Identity())
    run(batch(0)).sum().backward()
    handle.detach()
    torch._dynamo.reset()
    gw.parallelize(model, plan=gw.Identity())
    run = torch.compile(model, backend=EAGER, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        run(batch(0)).sum().backward()
    return [str(model[0].weight.grad.sum().item()), str(caught.value)]


def test_a_full_graph_is_compiled_before_parallelize(worlds: Worlds) -> None:
    first, second = worlds.run(2, full_graph)
    assert first[0] == second[0]
    for _, told in (first, second):
        assert "cannot be traced" in told


def nodes_that_bring_gradients(model: nn.Module, outputs: torch.Tensor) -> int:
    """How many nodes of the graph hand gradients to parameters."""
    found, todo = set(), [outputs.grad_fn]
    while todo:
        node = todo.pop()
        for parent, _ in node.next_functions:
            if parent is not None and hasattr(parent, "variable"):
                found.add(node)
            elif parent is not None:
                todo.append(parent)
    return len(found)


def chances_to_send() -> list[int]:
    """For an eager model, one compiled as a whole, and one compiled block by block."""
    torch._dynamo.reset()
    whole, blocks = torch.compile(plain(), backend=EAGER), plain()
    for block in blocks:
        block.compile(backend=EAGER)
    return [nodes_that_bring_gradients(model, model(batch(0))) for model in (plain(), whole, blocks)]


def test_a_model_compiled_as_a_whole_brings_all_gradients_at_once(worlds: Worlds) -> None:
    """So nothing is sent while it computes; compiled block by block it is as without."""
    assert worlds.run(1, chances_to_send) == [[4, 1, 4]]


def with_inductor() -> list[float]:
    """Compiled code adds in another order than eager code: the same to rounding."""
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1
    ends = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = plain()
        gw.parallelize(model, plan=gw.Identity())
        run, optimizer = torch.compile(model) if compile_it else model, sgd(model)
        for step in range(3):
            step_once(run, optimizer, step)
        ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    eager, ours = ends
    return [(eager - ours).norm().item() / eager.norm().item(), ours.double().sum().item()]


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not link where torch lies in a folder with a space")
def test_inductor(worlds: Worlds) -> None:
    (first, first_sum), (second, second_sum) = worlds.run(2, with_inductor, deadline_s=180)
    assert max(first, second) < 1e-5
    assert first_sum == second_sum


def with_a_compiled_step(schedule: Any) -> list[str]:
    """The weights of runs whose optimizer's step is eager, and compiled."""
    ends = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = plain()
        optimizer = sgd(model)
        handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity(), schedule=schedule))
        step = torch.compile(optimizer.step, backend="eager") if compile_it else optimizer.step
        for number in range(5):
            model(batch(number)).square().mean().backward()
            step()
            optimizer.zero_grad()
        handle.flush()
        ends.append(digest(model.parameters()))
        handle.detach()
    return ends


@pytest.mark.filterwarnings("ignore:.*only its shard")
@pytest.mark.parametrize(
    "schedule",
    [gw.LocalSteps(every=2), gw.Delayed(k=2), gw.Pipelined(), gw.Pipelined(shard_optimizer=True)],
    ids=["local", "delayed", "pipelined", "sharded"],
)
def test_a_compiled_step_is_as_an_eager_one(worlds: Worlds, schedule: Any) -> None:
    (eager, ours), other = worlds.run(2, with_a_compiled_step, schedule)
    assert eager == ours and other == [eager, ours]


class Penalised(nn.Module):
    """Computes with its parameters outside of its layers too, as scripts do for penalties."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layers(inputs)
        return outputs + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


def whole_beside_eager(order: str, schedule: Any, changed_to: Any) -> list[list[str]]:
    """Outputs of an evaluation and the weights at the end, of an eager model and of one that is compiled as a whole."""
    ends = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        run = model = Penalised()
        step: Any = step_once
        if compile_it and order == "compiled first":
            run = torch.compile(model, backend=EAGER)
        optimizer = sgd(model)
        handle = gw.parallelize(run, optimizer, plan=gw.Uniform(gw.Identity(), schedule=schedule))
        if compile_it and order == "compiled afterwards":
            run = torch.compile(model, backend=EAGER)
        elif compile_it and order == "in place":
            model.compile(backend=EAGER)
        elif compile_it and order == "with its step":
            step = torch.compile(step_once, backend=EAGER)
        for number in range(7):
            step(run, optimizer, number)
            if number == 3:
                run.eval()
                with torch.no_grad():
                    ends.append([digest([run(batch(0))])])
                run.train()
            elif number == 4:
                handle.session.change_to(handle.session.plan_of(gw.Uniform(gw.Identity(), schedule=changed_to)))
        ends[-1].append(digest(model.state_dict().values()))
        handle.detach()
    return ends


LOCAL, DELAYED = gw.LocalSteps(every=3), gw.Delayed(k=2)


@pytest.mark.parametrize(
    ("order", "schedule", "changed_to"),
    [
        ("compiled first", LOCAL, DELAYED),
        ("compiled first", DELAYED, LOCAL),
        ("compiled first", gw.Backward(), LOCAL),
        ("compiled afterwards", LOCAL, DELAYED),
        ("in place", DELAYED, LOCAL),
        ("with its step", LOCAL, LOCAL),
        ("with its step", DELAYED, DELAYED),
    ],
    ids=repr,
)
def test_a_model_compiled_as_a_whole_trains_as_an_eager_one(worlds: Worlds, order: str, schedule: Any, changed_to: Any) -> None:
    """Where the weights that it computes on are not those that the script sees, and where the schedule changes."""
    for eager, ours in worlds.run(2, whole_beside_eager, order, schedule, changed_to, deadline_s=180):
        assert eager == ours


def compiled_backward() -> str:
    torch._dynamo.reset()
    model = plain()
    gw.parallelize(model, plan=gw.Identity())
    loss = model(batch(0)).square().mean()
    with pytest.raises(Exception) as caught:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=EAGER)):
            loss.backward()
    return str(caught.value)


def test_compiled_autograd_is_refused(worlds: Worlds) -> None:
    for told in worlds.run(2, compiled_backward):
        assert "queue_callback() is only supported when Compiled Autograd is enabled with fullgraph=True" in told


def whole_and_blocks() -> list[tuple[float, list[str]]]:
    """What the handle measures, and warns of, for a model compiled as a whole and block by block."""
    found = []
    for whole in (True, False):
        torch._dynamo.reset()
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        handle = gw.parallelize(model, plan=gw.Identity())
        if whole:
            model.compile(backend=EAGER)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(22):
                model(torch.randn(64, 256)).square().mean().backward()
        told = [str(each.message) for each in caught if "before the first gradient" in str(each.message)]
        found.append((handle.stats().before_first_gradient, told))
        handle.detach()
    return found


@pytest.mark.timing
def test_a_model_compiled_as_a_whole_is_told_what_it_costs(worlds: Worlds) -> None:
    for (whole, told), (blocks, nothing) in worlds.run(2, whole_and_blocks):
        assert whole > blocks > 0
        assert (len(told) == 1 and "block.compile()" in told[0]) == (whole > 0.8)
        assert nothing == []
