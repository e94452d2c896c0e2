"""Gradients that are exchanged where autograd left them: bit for bit what copies in buckets give, whatever scripts do."""

import inspect
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType

import pytest
import test_scripts_gradients
import test_scripts_loops
import test_scripts_models
import torch
import torch.distributed as dist
from beside_ddp import Ends, Library, Training, assert_as, batch, in_buckets, name_of, plain, sgd, step_once
from options import Ranks, gradients, plan_for
from test_engine_residuals import bytes_of_tensors
from torch import nn
from worlds import Given, Worlds

import gradwire as gw
from gradwire.core import Spec
from gradwire.core.collectives import COLLECTIVES
from gradwire.core.memory_report import MemoryRecord
from gradwire.transport import Grid

FEEDBACK = gw.ErrorFeedback(gw.QSGD(bits=4))


# ---- the same bits


SPECS = [
    *(gw.QSGD(bits=4), FEEDBACK, gw.ErrorFeedback(gw.TopK(0.05)), gw.SignSGD(), gw.Signum(), gw.TernGrad(), gw.FP8()),
    *(gw.TwoBit(), gw.Natural(), gw.DGC(0.1), gw.RandomK(0.1, indices="own"), gw.BlockTopK(0.1)),
]
CARRIED = [
    (scheme, spec, residual_dtype)
    for scheme in ("alltoall", "allgather", "grid")
    for spec in SPECS
    for residual_dtype in (("float32", "int8") if spec.feedback else ("float32",))
    if COLLECTIVES[scheme].carries(spec)
]


@pytest.mark.parametrize("wired", [False, True], ids=["in Python", "in C++"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 11])
@pytest.mark.parametrize(("scheme", "spec", "residual_dtype"), CARRIED, ids=repr)
def test_the_bits_are_those_of_buckets(
    scheme: str, world_size: int, spec: Spec, dtype: str, residual_dtype: str, wired: bool
) -> None:
    grid = [Grid.even(1, world_size, rank) for rank in range(world_size)]
    option = COLLECTIVES[scheme].on("cpu")
    plan = plan_for(option, spec, dtype=dtype, chunk_bytes=1500, residual_dtype=residual_dtype)
    of: torch.dtype = getattr(torch, dtype)
    made = [Ranks(plan, grid, dtype=of, wired=wired and each, in_place=each) for each in (False, True)]
    apart = scheme != "allgather" or dtype == "float32"  # all-gather adds in the gradients' memory, so in their dtype
    assert all(slot.apart is apart for bucket in made[1].buckets for slot in bucket.slots)
    assert not any(slot.apart for bucket in made[0].buckets for slot in bucket.slots)
    for step in range(3):
        for ranks in made:
            ranks.step(step, [[g.to(of) for g in gradients(rank, step)] for rank in range(world_size)])
        copied, lent = (ranks.results() for ranks in made)
        assert all(torch.equal(each, other) for each, other in zip(copied, lent, strict=True))
        states = [[rank.residuals.state() for rank in ranks.ranks] for ranks in made]
        for mine, theirs in zip(*states, strict=True):
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def trainings(module: ModuleType) -> list[Training]:
    """The scripts of a module of tests."""
    functions = [each for each in vars(module).values() if inspect.isfunction(each)]
    own = [each for each in functions if each.__module__ == module.__name__]
    return [each for each in own if list(inspect.signature(each).parameters) == ["library"]]


SCRIPTS = [
    training for module in (test_scripts_gradients, test_scripts_loops, test_scripts_models) for training in trainings(module)
]


@pytest.mark.parametrize("training", SCRIPTS, ids=name_of)
def test_scripts_train_as_with_buckets(worlds: Worlds, training: Training) -> None:
    assert len(SCRIPTS) >= 40
    assert_as(worlds, "in buckets", training, gw.Uniform(FEEDBACK))


# ---- gradients that are not simply there


Change = Callable[[nn.Sequential, nn.Parameter], None]


def with_hooks(change: Change, library: Library) -> Ends:
    """`change` is called for each parameter when its gradient was accumulated."""
    model = plain()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(partial(change, model))
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=change is the_same_memory or step % 2 == 0)
        run(batch(step)).square().mean().backward()
        yield from (parameter.grad.clone() for parameter in model.parameters())
        optimizer.step()


def other_strides(model: nn.Sequential, parameter: nn.Parameter) -> None:
    if parameter.dim() == 2:
        parameter.grad = parameter.grad.t().contiguous().t()


def within_a_larger_one(model: nn.Sequential, parameter: nn.Parameter) -> None:
    larger = torch.zeros(parameter.numel() + 3)
    larger[3:] = parameter.grad.reshape(-1)
    parameter.grad = larger[3:].view(parameter.shape)


def the_same_memory(model: nn.Sequential, parameter: nn.Parameter) -> None:
    """Each of the two is sent as it was, though one mean is written over the other's gradient."""
    if parameter is model[0].bias:
        parameter.grad = model[2].weight.grad.view(-1)[3:13]


def expanded(model: nn.Sequential, parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad.mean().expand(parameter.shape)


def with_a_graph(model: nn.Sequential, parameter: nn.Parameter) -> None:
    with torch.enable_grad():
        parameter.grad = parameter * parameter.grad.detach()


def negated(model: nn.Sequential, parameter: nn.Parameter) -> None:
    """Torch notes that the numbers in memory are to be negated."""
    parameter.grad = torch.complex(parameter.grad, -parameter.grad).conj().imag


CHANGES = [other_strides, within_a_larger_one, the_same_memory, expanded, with_a_graph, negated]


def test_odd_gradients_are_sent_as_they_are(worlds: Worlds) -> None:
    for change in CHANGES:
        assert_as(worlds, "in buckets", partial(with_hooks, change), gw.Uniform(FEEDBACK))


class Added(nn.Module):
    """The gradient of `latent` lies in memory that the backward of `second` reads afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.latent = nn.Linear(6, 50), nn.Linear(50, 40), nn.Parameter(torch.randn(1, 4, 40))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(inputs))
        return (hidden + self.latent.view(4, 40)).tanh()


def gradients_that_backward_reads(library: Library) -> Ends:
    model = Added()
    own: list[torch.Tensor] = []
    model.latent.register_post_accumulate_grad_hook(lambda each: own.append(each.grad))
    # backward goes on when the bucket of `latent` was exchanged
    model.second.register_full_backward_pre_hook(lambda *_: time.sleep(0.05))
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward()
        assert model.latent.grad is not own[-1]
        yield from (parameter.grad for parameter in model.parameters())
        optimizer.step()


def test_what_backward_still_reads_is_left_alone(worlds: Worlds) -> None:
    each_its_own = gw.Uniform(gw.QSGD(bits=4), bucket_bytes=4)
    assert_as(worlds, "in buckets", gradients_that_backward_reads, each_its_own)


class Heads(nn.Module):
    """Of which a forward uses one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(6, 5), nn.ModuleList(nn.Linear(5, 2) for _ in range(3))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        hidden = self.body(inputs)
        return self.heads[head](hidden) if head < 3 else hidden


def unused_parameters(library: Library) -> Ends:
    """On one rank, on all of them, with what earlier backwards left, and with a grad that is not this backward's."""
    model, rank = Heads(), dist.get_rank()
    run, optimizer = library.parallelize(model), sgd(model)
    for step, heads in enumerate([(0, 1), (0, 0), (2, 3), (3, 3), (1, 2)]):
        if step % 2:
            optimizer.zero_grad(set_to_none=step == 3)
        if step == 2:
            with library.no_sync(run):
                run(batch(20), 2 - rank).square().mean().backward()
        if step == 4:
            model.heads[0].weight.grad = torch.full((2, 5), 1.5)
        run(batch(step), heads[rank]).square().mean().backward()
        yield from (None if each.grad is None else each.grad.clone() for each in model.parameters())
        optimizer.step()


def test_parameters_without_a_gradient_are_as_with_buckets(worlds: Worlds) -> None:
    assert_as(worlds, "in buckets", unused_parameters, gw.Uniform(FEEDBACK))


def ranks_without_batches(library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    with library.join(run):
        for step in range(2 + 2 * dist.get_rank()):
            step_once(run, optimizer, step)
    return iter(())


def test_ranks_without_batches_lend_zeros(worlds: Worlds) -> None:
    assert_as(worlds, "in buckets", ranks_without_batches, gw.Uniform(FEEDBACK))


# ---- what becomes of the memory


def memory_of_a_run(schedule: str, copied: bool) -> tuple[int, MemoryRecord, str]:
    """Bytes of all tensors beyond the model's when a script has dropped its gradients, and what a handle tells of them. What is
    not as it should be of gradients."""
    model = Given([(512, 512)] * 8)
    before = bytes_of_tensors()
    with in_buckets() if copied else nullcontext():
        handle = gw.parallelize(model, sgd(model), plan=gw.Uniform(gw.QSGD(bits=4), schedule=schedule))
        own: dict[int, torch.Tensor] = {}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: own.update({id(each): each.grad}))
        wrong = ""
        for step in range(3):
            model.zero_grad()
            model(model.random_gradients(dist.get_rank(), step)).backward()
            for parameter in model.parameters():
                wrong += "moved " * (parameter.grad is not own[id(parameter)])
                wrong += "autograd was not told " * (own[id(parameter)]._version == 0)
    grads = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    own.clear()
    model.zero_grad()
    handle.flush()
    wrong += "held " * any(grad() is not None for grad in grads)
    left, told = bytes_of_tensors() - before, handle.stats().memory
    handle.detach()
    return left, told, wrong


@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
def test_compressed_buckets_have_no_memory_for_gradients(worlds: Worlds, schedule: str) -> None:
    gradient = 8 * 512 * 512 * 4
    payloads = gradient // 8 * 2  # of 4 bits, the own shard's from the other rank, and all of the sums
    for left, told, wrong in worlds.run(2, memory_of_a_run, schedule, False):
        assert told.gradient_bytes == told.residual_bytes == 0
        assert payloads < told.payload_bytes < 1.1 * payloads
        assert abs(left - told.payload_bytes) < 0.02 * gradient
        assert not wrong
    for left, told, wrong in worlds.run(2, memory_of_a_run, schedule, True):
        assert told.gradient_bytes == gradient
        assert left > gradient + payloads
        assert "moved" in wrong


def graphs_of_gradients() -> list[bool]:
    """A graph is made of a gradient while the step is under way, and its backward runs when the step is over."""
    model, scale = plain(), torch.ones((), requires_grad=True)
    optimizer = sgd(model)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.QSGD(bits=4), schedule="pipelined"))
    model(batch(0)).square().mean().backward()
    total = sum((scale * parameter.grad).sum() for parameter in model.parameters())
    optimizer.step()
    handle.flush()
    total.backward()
    expected = sum(parameter.grad.sum() for parameter in model.parameters())
    handle.detach()
    return [scale.grad.allclose(expected), all(parameter.grad._version > 0 for parameter in model.parameters())]


def test_a_gradient_may_be_saved_in_a_graph_before_its_step_is_over(worlds: Worlds) -> None:
    assert worlds.run(2, graphs_of_gradients) == [[True, True]] * 2


def copied_gradients() -> int:
    """Of a model whose gradients are views: autograd transposes what a Linear makes of its weights."""
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    handle = gw.parallelize(model, plan=gw.Uniform(gw.QSGD(bits=4), bucket_bytes=4))  # each in a bucket of its own
    own: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: own.update({id(each): each.grad}))
    for step in range(3):
        model.zero_grad()
        model(batch(step, 4, 40)).square().mean().backward()
    handle.detach()
    return sum(parameter.grad is not own[id(parameter)] for parameter in model.parameters())


def test_no_gradient_of_an_ordinary_model_is_copied(worlds: Worlds) -> None:
    assert worlds.run(2, copied_gradients) == [0, 0]


def test_an_exchange_works_on_the_tensors_it_is_given(worlds: Worlds) -> None:
    assert worlds.run(2, average_in_place) == [""] * 2


def average_in_place() -> str:
    """Of views next to each other, of views that overlap, of a parameter, and in inference mode."""
    whole = torch.randn(1000) + dist.get_rank()
    tensors = {"low": whole[:501], "high": whole[501:], "weight": nn.Parameter(torch.randn(20, 30))}
    exchange = gw.Exchange(tensors, plan=gw.Uniform(gw.QSGD(bits=8)))
    versions = [tensor._version for tensor in tensors.values()]
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with in_buckets():
        copying = gw.Exchange(expected, plan=gw.Uniform(gw.QSGD(bits=8)))
    wrong = "buckets " * bool(exchange.stats().memory.gradient_bytes) + "none " * (not copying.stats().memory.gradient_bytes)
    exchange.average_()
    copying.average_()
    wrong += "other bits " * any(not torch.equal(tensors[name], each) for name, each in expected.items())
    wrong += "no version " * any(t._version == v for t, v in zip(tensors.values(), versions, strict=True))
    wrong += "held " * bool(exchange._lent.begins)
    overlapping = {"low": whole[:501], "high": whole[400:899], "weight": tensors["weight"]}
    apart = {name: tensor.detach().clone() for name, tensor in overlapping.items()}
    exchange.average_(overlapping)
    copying.average_(apart)
    wrong += "overlap " * (not torch.equal(whole[:400], apart["low"][:400]))
    with torch.inference_mode():
        inside = {name: tensor.clone() for name, tensor in apart.items()}
        exchange.average_(inside)
    copying.average_(apart)
    wrong += "inference " * any(not torch.equal(inside[name], each) for name, each in apart.items())
    exchange.close()
    copying.close()
    return wrong
