"""A handle's life: made, kept or not, made twice, detached, on one rank, on a part of the ranks, from every kind of plan."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from threads import Threads, here
from torch import nn
from worlds import Given, Worlds, digest, gradwire_threads, seeded

import gradwire as gw
from gradwire.core.tensors import TensorInfo


def mean_is_exact(model: Given, step: int, ranks: tuple[int, ...]) -> bool:
    """One step with integers, whose mean over 1, 2 or 4 ranks is exact."""

    def integers(rank: int) -> list[torch.Tensor]:
        return [torch.randint(-9, 9, p.shape, generator=seeded(rank, step)).float() for p in model.parameters()]

    model.zero_grad()
    model(integers(here.rank)).backward()
    means = model.mean_of(lambda index: integers(ranks[index]), len(ranks))
    return all(torch.equal(p.grad.double(), mean) for p, mean in zip(model.parameters(), means, strict=True))


# ---- plans


def train(plan: Any, steps: int = 4) -> tuple[str, gw.Plan]:
    model = Given([300, 1, 2000, 40], seed=here.rank)
    handle = gw.parallelize(model, plan=plan, process_group=here.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(model.random_gradients(here.rank, step)).backward()
        optimizer.step()
    handle.detach()
    return digest(model.parameters()), handle.plan


def every_kind_of_plan(folder: str) -> list[bool]:
    policy = gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=3)), bucket_bytes=1000, chunk_bytes=500)
    want, plan = train(policy)
    path = Path(folder) / f"plan{here.rank}.json"
    plan.save(path)
    return [train(kind) == (want, plan) for kind in (plan, path, str(path))]


def test_a_plan_and_its_file_do_what_the_policy_does(threads: Threads, tmp_path: Path) -> None:
    assert threads.run(2, every_kind_of_plan, str(tmp_path)) == [[True] * 3] * 2


def a_spec_alone() -> bool:
    return train(gw.QSGD(bits=4))[0] == train(gw.Uniform(gw.QSGD(bits=4)))[0]


def test_a_spec_is_the_uniform_policy(threads: Threads) -> None:
    assert threads.run(2, a_spec_alone) == [True, True]


# ---- lives


def thrown_away() -> list[bool]:
    model = Given([5, 300])
    gw.parallelize(model, plan=gw.Identity())
    return [mean_is_exact(model, step, (0, 1)) for step in range(3)]


def test_a_handle_that_is_not_kept_still_synchronises(worlds: Worlds) -> None:
    assert worlds.run(2, thrown_away) == [[True] * 3] * 2


def made_twice() -> str:
    model = Given([5])
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    with pytest.raises(gw.StepStateError) as caught:
        gw.parallelize(model, plan=gw.QSGD(), process_group=here.group)
    with pytest.raises(gw.StepStateError):
        gw.parallelize(nn.Sequential(model, nn.Linear(1, 1)), plan=gw.QSGD(), process_group=here.group)
    assert mean_is_exact(model, 0, (0, 1)), "the first handle does not work any more"
    handle.detach()
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    assert mean_is_exact(model, 1, (0, 1))
    handle.detach()
    return str(caught.value)


def test_a_second_parallelize_raises_until_detach(threads: Threads) -> None:
    for told in threads.run(2, made_twice):
        assert "'p0' belongs to a model that is parallelized already" in told
        assert "detach()" in told


def detached() -> dict[str, Any]:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    keys = list(model.state_dict())
    handle = gw.parallelize(model, plan=gw.QSGD())
    same_keys = list(model.state_dict()) == keys
    model(torch.randn(4, 3)).sum().backward()
    handle.detach()
    threads = gradwire_threads()
    handle.detach()
    model.zero_grad()
    if rank == 0:  # the other rank does nothing: it would hang if anything were sent
        model(torch.randn(4, 3)).square().sum().backward()
    left = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    left += sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return {"threads": threads, "hooks": left, "same keys": same_keys, "grad": model[0].weight.grad is not None}


def test_a_detached_model_is_an_ordinary_one(worlds: Worlds) -> None:
    for rank, found in enumerate(worlds.run(2, detached)):
        assert found == {"threads": [], "hooks": 0, "same keys": True, "grad": rank == 0}


def detached_again() -> list[bool]:
    """Whether means are exact after the first of two handles in turn is detached again. The script keeps only that one."""
    model = Given([5, 300])
    first = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    first.detach()
    gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    first.detach()
    gc.collect()
    exact = [mean_is_exact(model, step, (0, 1)) for step in range(2)]
    with pytest.raises(gw.StepStateError, match="parallelized already"):
        gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    return exact


def test_a_second_detach_leaves_the_next_handle_alone(threads: Threads) -> None:
    assert threads.run(2, detached_again) == [[True] * 2] * 2


def several_models() -> bool:
    """Two handles in one process, in turns and in one backward."""
    first, second = Given([5, 300]), Given([7])
    handles = [
        gw.parallelize(first, plan=gw.Identity(), process_group=here.group),
        gw.parallelize(second, plan=gw.Uniform(gw.Identity(), scheme="alltoall"), process_group=here.group),
    ]
    right = [mean_is_exact(model, step, (0, 1)) for step in range(3) for model in (first, second)]
    rank = here.rank
    for model in (first, second):
        model.zero_grad()
    (first([torch.ones(5) * rank, torch.ones(300)]) + second([torch.ones(7) * rank])).backward()
    for handle in handles:
        handle.detach()
    return all(right) and first.p0.grad.eq(0.5).all().item() and second.p0.grad.eq(0.5).all().item()


def test_several_models(threads: Threads) -> None:
    assert threads.run(2, several_models) == [True, True]


def copied() -> tuple[bool, bool]:
    """A copy is nobody's: its backward sends nothing, with the original there or gone."""
    model = nn.Linear(3, 1)
    gw.parallelize(model, plan=gw.Identity())
    twin = copy.deepcopy(model)
    alone = []
    for _ in range(2):
        twin.zero_grad()
        twin(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
        alone.append(bool(twin.weight.grad.eq(dist.get_rank()).all()))
        model = None
    return alone[0], alone[1]


def test_a_deep_copy_is_an_ordinary_model(worlds: Worlds) -> None:
    assert worlds.run(2, copied) == [(True, True)] * 2


# ---- ranks


def alone() -> list[bool]:
    right = []
    for plan in (gw.Uniform(gw.Identity()), gw.Uniform(gw.Identity(), scheme="alltoall"), gw.Uniform(gw.Cast())):
        model = Given([1, 300])
        handle = gw.parallelize(model, plan=plan, process_group=here.group)
        right += [mean_is_exact(model, step, (0,)) for step in range(3)]
        handle.detach()
    return right


def test_a_world_of_one(threads: Threads) -> None:
    assert threads.run(1, alone) == [[True] * 9]


def some_of_the_ranks() -> str | list[bool]:
    group = dist.new_group([0, 2])
    model = Given([5, 300])
    try:
        handle = gw.parallelize(model, plan=gw.Uniform(gw.Identity(), scheme="alltoall"), process_group=group)
    except gw.PlanError as error:
        return str(error)
    own = {key.split("/")[0] for key in handle.state_dict()}
    return [mean_is_exact(model, step, (0, 2)) for step in range(3)] + [own == {f"rank{dist.get_rank()}"}]


def test_a_sub_group(worlds: Worlds) -> None:
    first, outsider, second = worlds.run(3, some_of_the_ranks)
    assert first == second == [True] * 4
    assert "not in the process_group" in outsider


# ---- what is refused


def sparse() -> list[str]:
    """In backward, on all ranks; and the next backward too, since ranks may have sent different things."""
    model = nn.Embedding(10, 3, sparse=True)
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    told = []
    for _ in range(2):
        with pytest.raises(gw.StepStateError) as caught:
            model(torch.tensor([1, 2])).sum().backward()
        told.append(str(caught.value))
    handle.detach()
    return told


def test_sparse_gradients_are_refused(threads: Threads) -> None:
    for first, second in threads.run(2, sparse):
        assert "'weight' is sparse" in first
        assert "sparse=False" in first
        assert second == first


def another_shape(plan: Any, rows: int) -> tuple[str, list[tuple[int, ...]]]:
    """A parameter gets it, and parts of the model run instead of the model: nothing looks at the shapes before the backward."""
    model = nn.ModuleList([nn.Linear(8, 32), nn.Linear(8, 32)])
    handle = gw.parallelize(model, plan=plan, process_group=here.group)

    def train() -> None:
        model.zero_grad()
        sum(part(torch.ones(2, 8)).sum() for part in model).backward()

    train()
    handle.attach()
    train()
    model[1].weight.data, model[1].bias.data = torch.ones(rows, 8), torch.ones(rows)
    with pytest.raises(gw.StepStateError) as caught:
        train()
    handle.reset()
    handle.attach()
    train()
    handle.detach()
    return str(caught.value), [tuple(parameter.grad.shape) for parameter in model[1].parameters()]


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("plan", [gw.QSGD(bits=4), gw.Identity()], ids=repr)
def test_gradients_of_another_shape_are_refused(threads: Threads, plan: Any, rows: int) -> None:
    for told, shapes in threads.run(2, another_shape, plan, rows):
        assert f"has shape ({rows}," in told and "the plan was made for (32," in told
        assert shapes == [(rows, 8), (rows,)]


BFLOAT16 = TensorInfo("weight", (300,), "bfloat16", "cpu")


def plans_of_another_version() -> list[str]:
    """Of one bucket of bfloat16, and what is not executed in each."""
    told = []
    (bucket,) = gw.Uniform(gw.QSGD()).plan([BFLOAT16]).buckets
    exact = gw.Uniform(gw.Identity()).plan([BFLOAT16])
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(300, dtype=torch.bfloat16))
    for plan in (
        replace(gw.Uniform(gw.QSGD()).plan([BFLOAT16]), schedule=gw.Pipelined()),
        replace(gw.Uniform(gw.QSGD()).plan([BFLOAT16]), buckets=(replace(bucket, reduce_dtype="bfloat16"),)),
        replace(exact, buckets=(replace(exact.buckets[0], reduce_dtype="float32"),)),
        replace(exact, buckets=(replace(exact.buckets[0], residual_dtype="bfloat16"),)),
    ):
        with pytest.raises(gw.PlanError) as caught:
            gw.parallelize(model, plan=plan, process_group=here.group)
        told.append(str(caught.value))
    return told


def test_what_a_plan_asks_for_is_done_or_refused(threads: Threads) -> None:
    for schedule, coded, summed, residual in threads.run(1, plans_of_another_version):
        assert "schedule is Pipelined" in schedule and "no optimizer was passed" in schedule
        assert "reduce_dtype 'bfloat16'" in coded
        assert "reduce_dtype 'float32'" in summed
        assert "residual_dtype 'bfloat16'" in residual
