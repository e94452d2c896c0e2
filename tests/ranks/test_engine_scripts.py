"""Ordinary training scripts under an identity plan end with plain DDP's numbers, bit for bit on two ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worlds import Worlds, digest, seeded

import gradwire as gw

Loop = Callable[["Script"], None]


class Script:
    """What a training loop needs, under either library."""

    def __init__(self, make: Callable[[], nn.Module], use_ddp: bool, plan: Any = None, **ddp: Any) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(self.rank)
        self.model = make()
        if use_ddp:
            self.run: nn.Module = DistributedDataParallel(self.model, **ddp)
            self.no_sync = self.run.no_sync
        else:
            self.run = self.model
            self.no_sync = gw.parallelize(self.model, plan=plan or gw.Identity()).no_sync
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def inputs(self, *shape: int, step: int) -> torch.Tensor:
        return torch.randn(shape, generator=seeded(self.rank, step))

    def state(self) -> dict[str, Any]:
        tensors = {f"parameter {name}": p.detach() for name, p in self.model.named_parameters()}
        tensors |= {f"buffer {name}": b for name, b in self.model.named_buffers()}
        grads = {name: None if p.grad is None else p.grad for name, p in self.model.named_parameters()}
        return {name: digest([t]) for name, t in tensors.items()} | {
            f"grad {name}": None if grad is None else digest([grad]) for name, grad in grads.items()
        }


def both(make: Callable[[], nn.Module], loop: Loop, plan: Any, ddp: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The end under DDP, under gradwire, and what there was at first."""
    ends = []
    for use_ddp in (True, False):
        script = Script(make, use_ddp, plan, **ddp)
        first = script.state()
        loop(script)
        ends.append(script.state())
    return *ends, first


def assert_as_ddp(
    worlds: Worlds, make: Callable[[], nn.Module], loop: Loop, plan: Any = None, **ddp: Any
) -> list[dict[str, Any]]:
    """Run both on two ranks and compare all bits; returns gradwire's end on each rank."""
    ends = []
    for of_ddp, ours, first in worlds.run(2, both, make, loop, plan, ddp):
        assert ours == of_ddp
        assert ours != first, "nothing was trained"
        ends.append(ours)
    return ends


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


# ---- accumulation


def accumulate_with_no_sync(script: Script) -> None:
    for step in range(4):
        script.optimizer.zero_grad(set_to_none=step % 2 == 0)
        with script.no_sync():
            for micro in range(3):
                script.run(script.inputs(2, 6, step=10 * step + micro)).square().mean().backward()
        script.run(script.inputs(2, 6, step=10 * step + 9)).square().mean().backward()
        script.optimizer.step()


def accumulate_without_no_sync(script: Script) -> None:
    for step in range(6):
        script.run(script.inputs(2, 6, step=step)).square().mean().backward()
        if step % 3 == 2:
            script.optimizer.step()
            script.optimizer.zero_grad(set_to_none=step == 2)


def zero_in_place(script: Script) -> None:
    for step in range(4):
        script.optimizer.zero_grad(set_to_none=False)
        script.run(script.inputs(2, 6, step=step)).square().mean().backward()
        script.optimizer.step()


def clip(script: Script) -> None:
    for step in range(4):
        script.optimizer.zero_grad()
        script.run(script.inputs(2, 6, step=step)).square().mean().backward()
        nn.utils.clip_grad_norm_(script.model.parameters(), 0.01)
        script.optimizer.step()


def evaluate_between(script: Script) -> None:
    for step in range(3):
        zero_in_place_step(script, step)
        script.run.eval()
        with torch.no_grad():
            script.run(script.inputs(2, 6, step=50))
        script.run.train()


def zero_in_place_step(script: Script, step: int) -> None:
    script.optimizer.zero_grad()
    script.run(script.inputs(2, 6, step=step)).square().mean().backward()
    script.optimizer.step()


@pytest.mark.parametrize("loop", [accumulate_with_no_sync, accumulate_without_no_sync, zero_in_place, clip, evaluate_between])
@pytest.mark.parametrize("plan", [None, gw.Uniform(gw.Identity(), scheme="alltoall", bucket_bytes=100, chunk_bytes=40)])
def test_loops(worlds: Worlds, loop: Loop, plan: Any) -> None:
    assert_as_ddp(worlds, mlp, loop, plan)


# ---- models


class Branches(nn.Module):
    """Rank and step choose which of two branches is used; a third never is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = 0 if dist.get_rank() == 0 or x[0, 0] > 1e6 else 1
        return self.branches[branch](self.stem(x).tanh())


def ordinary(script: Script) -> None:
    for step in range(4):
        zero_in_place_step(script, step)


def ordinary_in_place(script: Script) -> None:
    """The gradients of the step before are there, as zeros, also of what this step does not use."""
    zero_in_place(script)


@pytest.mark.parametrize("loop", [ordinary, ordinary_in_place])
def test_unused_parameters(worlds: Worlds, loop: Loop) -> None:
    for end in assert_as_ddp(worlds, Branches, loop, find_unused_parameters=True):
        assert end["grad branches.2.weight"] is None
        assert end["grad branches.0.weight"] is not None
        assert end["grad branches.1.weight"] is not None


def leave_unused_alone() -> bool:
    """Weight decay moves a parameter that has a gradient, be it zero; one that nobody used must have none."""
    model = Branches()
    gw.parallelize(model, plan=gw.QSGD(bits=4))
    never = model.branches[2].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 6, generator=seeded(step))).sum().backward()
        optimizer.step()
    return torch.equal(model.branches[2].weight, never) and model.branches[2].weight.grad is None


def test_weight_decay_leaves_unused_parameters_alone(worlds: Worlds) -> None:
    assert worlds.run(2, leave_unused_alone) == [True, True]


class Tied(nn.Module):
    """An embedding that is the output layer too, and a frozen layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 100).long() % 12
        return self.head(self.middle(self.frozen(self.embedding(tokens)).tanh()))


class Twice(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.layer(x).tanh()))


class OneNumber(nn.Module):
    """One parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


class NothingInside(nn.Module):
    """A parameter without elements beside another."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.layer = nn.Parameter(torch.zeros(0, 3)), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.nothing.sum()


class Double(nn.Module):
    """float64 beside float32."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 5, dtype=torch.float64), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x.double()).tanh().float())


class Half(nn.Module):
    """bfloat16 and float16 beside float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.b = nn.Linear(5, 4, dtype=torch.float16)
        self.c = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x.bfloat16()).half()).float())


class Normalised(nn.Module):
    """BatchNorm's running statistics are float buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2), nn.BatchNorm1d(2))
        self.register_buffer("mask", torch.randint(0, 2, (2,)).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.mask


def convolution() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (3, 5, 5)), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 1)
    )
    return model.to(memory_format=torch.channels_last)


def on_images(script: Script) -> None:
    for step in range(4):
        script.optimizer.zero_grad()
        script.run(script.inputs(4, 75, step=step)).square().mean().backward()
        script.optimizer.step()


@pytest.mark.parametrize("make", [Tied, Twice, OneNumber, NothingInside, Double, Half, Normalised])
@pytest.mark.parametrize("scheme", [None, "alltoall"])
def test_models(worlds: Worlds, make: Callable[[], nn.Module], scheme: str | None) -> None:
    assert_as_ddp(worlds, make, ordinary, gw.Uniform(gw.Identity(), scheme=scheme, bucket_bytes=200))


@pytest.mark.parametrize("scheme", [None, "alltoall", "allgather"])
def test_channels_last(worlds: Worlds, scheme: str | None) -> None:
    assert_as_ddp(worlds, convolution, on_images, gw.Uniform(gw.Identity(), scheme=scheme))


def several_groups(script: Script) -> None:
    first, last = script.model[0], script.model[2]
    script.optimizer = torch.optim.SGD([{"params": first.parameters(), "lr": 0.5}, {"params": [last.weight]}], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 1, 0.5)
    for step in range(4):
        zero_in_place_step(script, step)
        schedule.step()


def test_parameter_groups_and_a_schedule(worlds: Worlds) -> None:
    assert_as_ddp(worlds, mlp, several_groups)


def root_called_twice(script: Script) -> None:
    for step in range(3):
        script.optimizer.zero_grad()
        a, b = (script.run(script.inputs(2, 6, step=10 * step + half)) for half in range(2))
        (a - b).square().mean().backward()
        script.optimizer.step()


def test_the_model_itself_called_twice_before_backward(worlds: Worlds) -> None:
    assert_as_ddp(worlds, mlp, root_called_twice)


def two_backwards(script: Script) -> None:
    """Each its own synchronisation, added up."""
    for step in range(3):
        script.optimizer.zero_grad()
        for half in range(2):
            script.run(script.inputs(2, 6, step=10 * step + half)).square().mean().backward()
        script.optimizer.step()


def test_two_backwards_before_a_step(worlds: Worlds) -> None:
    assert_as_ddp(worlds, mlp, two_backwards)


# ---- activation checkpointing


class Checkpointed(nn.Module):
    """The middle is recomputed in backward; with `tied`, its layer is used outside of the checkpoint too."""

    def __init__(self, reentrant: bool, tied: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.second_middle = nn.Linear(6, 6)
        self.reentrant, self.tied = reentrant, tied

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.second_middle(self.middle(x).tanh()).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        x = checkpoint(self.second_middle, x, use_reentrant=self.reentrant)
        return self.last(self.middle(x) if self.tied else x)


class Plain(Checkpointed):
    """The same without checkpoints, for DDP, which does not take all of these."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second_middle(self.block(self.first(x)))
        return self.last(self.middle(x) if self.tied else x)


def checkpointed(reentrant: bool, tied: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    ends = []
    for make, use_ddp in ((Plain, True), (Checkpointed, False)):
        script = Script(lambda make=make: make(reentrant, tied), use_ddp)
        ordinary(script)
        ends.append(script.state())
    return ends[0], ends[1]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing(worlds: Worlds, reentrant: bool, tied: bool) -> None:
    for plain, ours in worlds.run(2, checkpointed, reentrant, tied):
        assert ours == plain


def resumed_with_checkpoints() -> int:
    """The first backward of a handle that goes on from step 1, in a model whose first gradient is an inner one's."""
    model = Checkpointed(reentrant=True, tied=True)
    handle = gw.parallelize(model, plan=gw.Identity())
    model(torch.ones(2, 6)).sum().backward()
    state = handle.state_dict()
    handle.detach()
    handle = gw.parallelize(model, plan=gw.Identity())
    handle.load_state_dict(state)
    model(torch.ones(2, 6)).sum().backward()
    return handle.stats().steps


def test_reentrant_checkpointing_in_a_resumed_run(worlds: Worlds) -> None:
    assert worlds.run(2, resumed_with_checkpoints) == [2, 2]


class EndsInCheckpoint(nn.Module):
    """Recomputes its last layers in backward once `recomputes` is set. Then the first gradient is that of an inner backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.recomputes = False

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(x).tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        return checkpoint(self.end, x, use_reentrant=True) if self.recomputes else self.end(x)


def recomputes_later(script: Script) -> None:
    for step in range(6):
        script.model.recomputes = step in (2, 3, 5)
        script.run(script.inputs(4, 6, step=step)).square().mean().backward()
        script.optimizer.step()
        script.optimizer.zero_grad()


def recomputes_later_in_an_accumulation(script: Script) -> None:
    for step in range(6):
        script.model.recomputes = step >= 2
        with nullcontext() if step % 3 == 2 else script.no_sync():
            script.run(script.inputs(4, 6, step=step)).square().mean().backward()
        if step % 3 == 2:
            script.optimizer.step()
            script.optimizer.zero_grad()


@pytest.mark.parametrize("loop", [recomputes_later, recomputes_later_in_an_accumulation])
def test_reentrant_checkpointing_that_begins_in_a_later_step(worlds: Worlds, loop: Loop) -> None:
    assert_as_ddp(worlds, EndsInCheckpoint, loop)


def left_while_it_recomputes() -> list[torch.Tensor]:
    """The gradients of the last step. In the step before, a backward inside the backward raises after its first gradient."""
    torch.manual_seed(0)
    model = EndsInCheckpoint()
    handle = gw.parallelize(model, plan=gw.Identity())
    model(torch.ones(2, 6)).sum().backward()
    model.zero_grad()
    model.recomputes = True
    failing = model.middle.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 6)).sum().backward()
    failing.remove()
    handle.reset()
    model((1.0 + dist.get_rank()) * torch.ones(2, 6)).sum().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def test_a_reentrant_checkpoint_that_raises_is_left_out(worlds: Worlds) -> None:
    means = None
    for rank in range(2):
        torch.manual_seed(0)
        model = EndsInCheckpoint()
        model((1.0 + rank) * torch.ones(2, 6)).sum().backward()
        own = [each.grad / 2 for each in model.parameters() if each.grad is not None]
        means = own if means is None else [a + b for a, b in zip(means, own, strict=True)]
    for gradients in worlds.run(2, left_while_it_recomputes):
        torch.testing.assert_close(gradients, means)


def parts_without_the_whole() -> tuple[str, int, bool]:
    """The root is never called, so gradwire sees no forward; the first gradient comes from an inner backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    handle = gw.parallelize(model, plan=gw.Identity())
    with pytest.raises(gw.StepStateError) as caught:
        checkpoint(model[1], model[0](torch.ones(2, 4)), use_reentrant=True).sum().backward()
    # nothing was sent: the same model is trained on
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    return str(caught.value), handle.stats().steps, model[0].weight.grad is not None


def test_reentrant_parts_without_the_root_module_are_refused(worlds: Worlds) -> None:
    for told, steps, trained in worlds.run(2, parts_without_the_whole):
        assert "Nothing was sent" in told
        assert "use_reentrant=False" in told
        assert steps == 1
        assert trained
