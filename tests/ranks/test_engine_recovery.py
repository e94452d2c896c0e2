"""Steps that a rank left in the middle, ranks with fewer batches, and models that are saved whole."""

import copy
import io
import pickle
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from threads import Threads, built, here
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Given, Worlds, digest, gradwire_threads, seeded

import gradwire as gw

PLANS = {
    "exact": gw.Uniform(gw.Identity(), bucket_bytes=200),
    "4 bits": gw.Uniform(gw.QSGD(bits=4), bucket_bytes=200),
    "all-gather": gw.Uniform(gw.QSGD(bits=4), scheme="allgather"),
    "feedback": gw.ErrorFeedback(gw.QSGD(bits=2)),
}
BESIDE = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2)), rules=[("p[01]", gw.Identity())], exempt_vectors=False)
"""Uncompressed vectors in the payload of another."""


# ---- void steps


class Fragile(Given):
    """Raises in the middle of backward when told to."""

    def __init__(self) -> None:
        super().__init__([300, 5, 700])
        self.broken = False

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros(())
        for index, (parameter, gradient) in enumerate(zip(self.parameters(), gradients, strict=True)):
            loss = loss + (parameter * gradient).sum()
            if self.broken and index == 0:
                loss.register_hook(_raise)
        return loss


def _raise(gradient: torch.Tensor) -> None:
    raise MemoryError("as ordered")


def void_step(
    plan: gw.Policy | gw.Spec, at: int, by: list[int], reset_at_once: bool
) -> tuple[list[str], float, str, list[list[bool]]]:
    """The ranks of `by` raise in backward `at`. They call reset() where they catch it, or when the next forward raises."""
    rank, world_size = here.rank, here.world_size
    model = built(0, Fragile)
    handle = gw.parallelize(model, plan=plan, process_group=here.group)
    told, right, slowest = [], [], 0.0
    for step in range(6):
        model.zero_grad()
        model.broken = step == at and rank in by
        gradients = model.random_gradients(rank, step)
        started = time.monotonic()
        try:
            model(gradients).backward()
        except MemoryError:
            if not reset_at_once:
                with pytest.raises(gw.StepStateError) as caught:
                    model(gradients)
                told.append(str(caught.value))
            handle.reset()
        except gw.StepStateError as error:
            told.append(str(error))
            handle.reset()
            assert all(parameter.grad is None for parameter in model.parameters())
        else:
            means = model.mean_of(lambda r, s=step: model.random_gradients(r, s), world_size)
            pairs = [(p.grad.double(), mean) for p, mean in zip(model.parameters(), means, strict=True)]
            right.append([bool((grad - mean).norm() < 1e-6 * mean.norm()) for grad, mean in pairs])
        slowest = max(slowest, time.monotonic() - started)
    grads = [p.grad for p in model.parameters()]
    handle.detach()
    return told, slowest, digest(grads), right


@pytest.mark.parametrize("plan", [*PLANS, "beside feedback"])
@pytest.mark.parametrize("by", [[1], [0, 1]], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("reset_at_once", [True, False], ids=["at once", "later"])
def test_a_step_that_was_left_is_void_on_all_ranks(
    threads: Threads, plan: str, by: list[int], at: int, reset_at_once: bool
) -> None:
    outcomes = threads.run(2, void_step, PLANS.get(plan, BESIDE), at, by, reset_at_once)
    for rank, (told, slowest, _, right) in enumerate(outcomes):
        if rank not in by:
            (words,) = told
            assert f"step {at} is void on all ranks: rank 1 left it after 2 of 3 gradients" in words
        elif not reset_at_once:
            (words,) = told
            assert f"step {at} of the last backward is not finished: 2 of 3 gradients came" in words
        assert slowest < 30  # the group's timeout is 60 s
        assert len(right) == 5
        if plan == "exact":
            assert right == [[True] * 3] * 5
        if plan == "beside feedback":
            assert right == [[True, True, False]] * 5, "nothing of the void step is in uncompressed tensors"
    assert len({grads for _, _, grads, _ in outcomes}) == 1


def test_of_three_ranks_two_are_told(threads: Threads) -> None:
    outcomes = threads.run(3, void_step, PLANS["4 bits"], 2, [2], True)
    for told, *_ in outcomes[:2]:
        assert "rank 2 left it after 2 of 3 gradients" in told[0]
    assert len({grads for _, _, grads, _ in outcomes}) == 1


class FailsEarly(Given):
    """Raises before the first gradient when told to: in forward, or where backward begins."""

    def __init__(self, where: str) -> None:
        super().__init__([300, 5, 700])
        self.where, self.broken = where, False

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        if self.broken and self.where == "forward":
            raise MemoryError("as ordered")
        loss = super().forward(gradients)
        if self.broken:
            loss.register_hook(_raise)
        return loss


def left_early(where: str, schedule: str) -> tuple[list[int], list[str], str, int]:
    """Rank 1 fails before its first gradient in batch 3. The batches that each rank trained on, what it was told, its weights."""
    model = built(0, lambda: FailsEarly(where))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gw.Uniform(gw.QSGD(bits=4), bucket_bytes=200, schedule=schedule)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    trained, told = [], []
    for number in range(6):
        optimizer.zero_grad()
        model.broken = number == 3 and here.rank == 1
        try:
            model(model.random_gradients(here.rank, number)).backward()
        except (MemoryError, gw.StepStateError) as error:
            told.append(str(error))
            handle.reset()
            assert not handle.session._whereabouts.place.inside, "to other ranks it waits in the step that is void"
            continue
        optimizer.step()
        trained.append(number)
    handle.flush()
    end = trained, told, digest(model.parameters()), handle.stats().steps
    handle.detach()
    return end


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
def test_a_step_that_was_left_before_its_first_gradient_is_void_on_all_ranks(threads: Threads, where: str, schedule: str) -> None:
    """Else that rank would go on with its next batch beside others' last one, and the others would wait for it at the end."""
    (first, told, weights, steps), (second, _, others, _) = threads.run(2, left_early, where, schedule)
    assert first == second == [0, 1, 2, 4, 5] and steps == 6
    assert "step 3 is void on all ranks: rank 1 left it after 0 of 3 gradients" in told[0]
    assert weights == others


class FailsInPart(nn.Module):
    """Layers with or without buffers, which raise in forward or in backward before any gradient came, if they are broken."""

    def __init__(self, where: str, buffers: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if buffers else nn.Tanh(), nn.Linear(8, 2))
        self.where, self.broken = where, False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layers(inputs)
        if self.broken and self.where == "forward":
            raise MemoryError("as ordered")
        if self.broken:
            outputs.register_hook(_raise)
        return outputs  # type: ignore[no-any-return]


def left_while_accumulating(where: str, buffers: bool, schedule: Any) -> tuple[list[int], list[str], str, bool]:
    """Rank 1 fails in part 1 of batch 3. The batches that each rank trained on, what it was told, its weights, and whether the
    next mean is that of the gradients of batch 4 alone."""
    model = built(0, lambda: FailsInPart(where, buffers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity(), schedule=schedule), process_group=here.group)
    trained, told, right = [], [], True
    for number in range(6):
        try:
            for part in range(4):
                model.broken = (number, part, here.rank) == (3, 1, 1)
                handle.weight(3) if handle.session.schedule.traits.weighs_batches else None
                with handle.no_sync() if part < 3 else nullcontext():
                    inputs = torch.randn(5, 4, generator=seeded(here.rank, number, part))
                    model(inputs).square().mean().backward()
        except (MemoryError, gw.StepStateError) as error:
            told.append(str(error))
            handle.reset()
            right = right and all(parameter.grad is None for parameter in model.parameters())
            continue
        optimizer.step()
        optimizer.zero_grad()
        trained.append(number)
    handle.flush()
    end = trained, told, digest(model.parameters()), right and handle.session.step == 6
    handle.detach()
    return end


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize(
    "schedule", [gw.Backward(), gw.Pipelined(), gw.Pipelined(shard_optimizer=True)], ids=["backward", "pipelined", "sharded"]
)
def test_a_step_that_was_left_inside_no_sync_is_void_on_all_ranks(
    threads: Threads, where: str, buffers: bool, schedule: Any
) -> None:
    """Else the gradients of a part stay, and the rank is a batch ahead of the others for ever."""
    (first, told, weights, mended), (second, own, others, too) = threads.run(2, left_while_accumulating, where, buffers, schedule)
    assert first == second == [0, 1, 2, 4, 5] and mended and too
    assert "step 3 is void on all ranks: rank 1 left it after 0 of" in told[0] and own == ["as ordered"]
    assert weights == others


def nothing_to_reset() -> bool:
    model = Given([3])
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    handle.reset()
    model([torch.ones(3)]).backward()
    handle.reset()
    return model.p0.grad is not None


@pytest.mark.filterwarnings("ignore:reset.. found no step to leave")
def test_reset_changes_nothing_when_nothing_failed(threads: Threads) -> None:
    assert threads.run(2, nothing_to_reset) == [True, True]


def warned_of_reset(how: str, schedule: Any) -> list[str]:
    """What reset() warns of after a forward: in training, in eval mode, of a part of the model, or also after backward."""
    model = built(0, lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity(), schedule=schedule), process_group=here.group)
    model.train(how != "eval")
    with warnings.catch_warnings(record=True) if here.rank == 0 else nullcontext([]) as caught:  # there is one list of filters
        if here.rank == 0:
            warnings.simplefilter("always")
        out = (model[0] if how == "part" else model)(torch.ones(5, 4))
        if how == "after":
            out.sum().backward()
        handle.reset()
    handle.detach()
    return [str(each.message) for each in caught or () if each.filename == __file__]


@pytest.mark.parametrize("schedule", ["backward", "pipelined", "delayed", gw.LocalSteps(every=2)])
@pytest.mark.parametrize("how", ["train", "eval", "part", "after"])
def test_reset_warns_where_no_training_forward_began(threads: Threads, how: str, schedule: Any) -> None:
    """Other ranks are in a step that this one left, and nobody knows it. After backward they step by its mean."""
    told, _ = threads.run(2, warned_of_reset, how, schedule)
    left = how == "train" or (how == "after" and not isinstance(schedule, str)) or (how == "after" and schedule == "delayed")
    assert any("found no step to leave" in words for words in told) == (not left)


def test_one_rank_is_not_told_of_others(threads: Threads) -> None:
    assert threads.run(1, warned_of_reset, "eval", "backward") == [[]]


# ---- ranks with fewer batches


def network(buffers: bool) -> nn.Sequential:
    first, last = built(here.rank, lambda: (nn.Linear(4, 8), nn.Linear(8, 2)))
    return nn.Sequential(first, nn.BatchNorm1d(8) if buffers else nn.Tanh(), last)


def batches(count: int) -> list[torch.Tensor]:
    return [torch.randn(5, 4, generator=seeded(here.rank, index)) for index in range(count)]


def uneven(counts: list[int], plan: gw.Policy | gw.Spec, buffers: bool, beside_ddp: bool) -> tuple[str, str, int]:
    """Every rank its own number of batches, under gradwire and under DDP."""
    count, ends = counts[here.rank], []
    for use_ddp in (True, False) if beside_ddp else (False,):
        model = network(buffers)
        wrapped = DistributedDataParallel(model) if use_ddp else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = None if use_ddp else gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        with wrapped.join() if use_ddp else handle.join():
            for batch in batches(count):
                wrapped(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(digest([*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]))
    steps = handle.stats().steps
    handle.detach()
    return ends[0], ends[-1], steps


@pytest.mark.parametrize("counts", [[3, 3], [1, 4], [4, 1], [0, 2], [2, 0]])
def test_join_ends_where_ddps_does(worlds: Worlds, counts: list[int]) -> None:
    outcomes = worlds.run(2, uneven, counts, gw.Identity(), False, True)
    assert len({ours for _, ours, _ in outcomes}) == 1
    for ddp, ours, _ in outcomes:
        assert ours == ddp


@pytest.mark.parametrize("buffers", [False, True], ids=["", "buffers"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("counts", [[2, 5, 3], [0, 0, 1]])
def test_after_join_all_ranks_have_the_same(threads: Threads, counts: list[int], plan: str, buffers: bool) -> None:
    outcomes = threads.run(3, uneven, counts, PLANS[plan], buffers, False)
    assert len({ours for _, ours, _ in outcomes}) == 1
    assert {steps for _, _, steps in outcomes} == {max(counts) + 1}


def half_in_join() -> str:
    model = network(False)
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    with pytest.raises(gw.StepStateError) as caught:
        if here.rank == 0:
            with handle.join():
                pass
        else:
            model(batches(1)[0]).sum().backward()
    handle.detach()
    return str(caught.value)


def test_join_on_one_rank_alone_is_refused_on_all(threads: Threads) -> None:
    for told in threads.run(2, half_in_join):
        assert "rank 0 has no batch for step 0" in told
        assert "rank 1 is not inside" in told


def left_while_another_joins(schedule: Any) -> tuple[str, int, bool]:
    """Rank 0 has two batches. Rank 1 has six, leaves the fourth in backward, and goes on. The weights at the end, the steps, and
    whether the weights are those of all other gradients."""
    model = built(0, Fragile)
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity(), schedule=schedule), process_group=here.group)
    with handle.join():
        for number in range(6 if here.rank else 2):
            model.broken = number == 3
            try:
                model(model.random_gradients(here.rank, number)).backward()
            except MemoryError:
                handle.reset()
                continue
            optimizer.step()
            optimizer.zero_grad()
    for rank, number in [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 4), (1, 5)]:
        for weight, gradient in zip(wanted, model.random_gradients(rank, number), strict=True):
            weight -= 0.05 * gradient
    right = all(torch.allclose(p, weight, atol=1e-5) for p, weight in zip(model.parameters(), wanted, strict=True))
    end = digest(model.parameters()), handle.stats().steps, right
    handle.detach()
    return end


@pytest.mark.filterwarnings("ignore:step 3 is void on all ranks")
@pytest.mark.parametrize("schedule", [gw.Backward(), gw.Pipelined(), gw.Delayed()], ids=["backward", "pipelined", "delayed"])
def test_a_step_may_be_left_while_another_rank_has_no_batch(threads: Threads, schedule: Any) -> None:
    """Else the ranks would take different steps for the last one, or wait for each other in different places."""
    first, second = threads.run(2, left_while_another_joins, schedule)
    assert first == second and first[1:] == (7, True)


# ---- saved whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.calls = 0
        self.register_forward_hook(count_call)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def count_call(module: Net, inputs: object, output: object) -> None:
    """The user's own hook, which travels."""
    module.calls += 1


def saved_whole() -> list[bool]:
    model = Net()
    handle = gw.parallelize(model, plan=gw.Identity())
    model(torch.ones(1, 3)).sum().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    copies.append(pickle.loads(pickle.dumps(nn.Sequential(model)))[0])
    right = []
    for each in copies:
        each.calls = 0
        each.zero_grad()
        each(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        right += [
            each.calls == 1,
            not each._forward_pre_hooks and len(each._forward_hooks) == 1,
            bool(each.layer.weight.grad.eq(dist.get_rank()).all()),
        ]
    # the original goes on
    model.zero_grad()
    model(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    right.append(bool(model.layer.weight.grad.eq(0.5).all()))
    handle.detach()
    right.append(gradwire_threads() == [])
    return right


def test_a_parallelized_model_can_be_saved_whole(worlds: Worlds) -> None:
    for right in worlds.run(2, saved_whole):
        assert right == [True] * len(right)


def save_linear(path: str) -> None:
    model = nn.Linear(3, 1)
    gw.parallelize(model, plan=gw.Identity())
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 0:
        torch.save(model, path)
    dist.barrier()


def test_a_saved_model_loads_where_gradwire_is_not_installed(worlds: Worlds, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    worlds.run(2, save_linear, str(path))
    script = (
        "import sys, torch; sys.modules['gradwire'] = None; "
        f"m = torch.load({str(path)!r}, weights_only=False); print(tuple(m(torch.ones(1, 3)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 1)", done.stderr
