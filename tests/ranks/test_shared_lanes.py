"""Handles of one process group share lanes: few descriptors, the same gradients as DDP's, and no step waits for another's."""

import gc
import os
import resource
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_ddp import batch, normalised, plain
from torch.nn.parallel import DistributedDataParallel
from worlds import World, Worlds

import gradwire as gw


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def lanes_of(handle: gw.Handle) -> Any:
    return handle.session.lanes.shared


def many_models(count: int, ddp: bool) -> tuple[list[torch.Tensor], int]:
    """Two steps of many small models under a limit of 1,024 descriptors. Their gradients, and the descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        torch.manual_seed(0)
        models = [plain() for _ in range(count)]
        runs = [DistributedDataParallel(each) for each in models] if ddp else models
        handles = [] if ddp else [gw.parallelize(each, plan=gw.Uniform(gw.Identity())) for each in models]
        for step in range(2):
            for number, run in enumerate(runs):
                run(batch(step * count + number)).square().mean().backward()
        used = descriptors()
        for handle in handles:
            handle.detach()
        return [each.grad.clone() for model in models for each in model.parameters()], used
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def sixty_models() -> tuple[bool, int]:
    gradients, used = many_models(60, ddp=False)
    expected, _ = many_models(60, ddp=True)
    return all(map(torch.equal, gradients, expected)), used


def test_sixty_models_in_one_process_as_under_ddp() -> None:
    with World(2) as world:
        for same, used in world.run(sixty_models):
            assert same and used < 200


def prepare(number: int) -> None:
    """Two handles, which are detached or dropped."""
    models = [plain(), normalised()]
    handles = [gw.parallelize(each, plan=gw.QSGD(bits=4)) for each in models]
    for model in models:
        model(batch(number)).square().mean().backward()
    for handle in handles if number % 2 else ():
        handle.detach()


def in_use() -> tuple[int, int]:
    """Descriptors and threads, when those of lanes have ended."""
    deadline = time.monotonic() + 20
    while any(thread.name.startswith("gradwire") for thread in threading.enumerate()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    time.sleep(1)
    return descriptors(), threads()


def prepared_again_and_again() -> tuple[int, int]:
    for number in range(2):
        prepare(number)
    before = in_use()
    for number in range(30):
        prepare(number)
        gc.collect()
    after = in_use()
    return after[0] - before[0], after[1] - before[1]


def test_many_preparations_leave_nothing() -> None:
    with World(2) as world:
        assert world.run(prepared_again_and_again) == [(0, 0)] * 2


def mean_of(model: torch.nn.Module, step: int) -> list[torch.Tensor]:
    """The gradients of a model, and what DDP makes of the same batch."""
    copy = type(model)(*(type(layer)(*_arguments(layer)) for layer in model))
    copy.load_state_dict(model.state_dict())
    run = DistributedDataParallel(copy)
    run(batch(step)).square().mean().backward()
    return [each.grad for each in copy.parameters()]


def _arguments(layer: Any) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, torch.nn.Linear) else ()


def right(model: torch.nn.Module, step: int) -> bool:
    """Whether one step of the model gives DDP's gradients."""
    expected = mean_of(model, step)
    model.zero_grad()
    model(batch(step)).square().mean().backward()
    return all(torch.equal(each.grad, other) for each, other in zip(model.parameters(), expected, strict=True))


def pair(**options: Any) -> tuple[list[torch.nn.Module], list[gw.Handle]]:
    models: list[torch.nn.Module] = [plain(), plain()]
    return models, [gw.parallelize(each, plan=gw.Uniform(gw.Identity()), **options) for each in models]


class Interrupted(Exception):
    pass


def left_in_the_middle() -> list[bool]:
    """A backward of the first model is left on all ranks; the second goes on, and the first after a reset."""
    models, handles = pair()
    found = [lanes_of(handles[0]) is lanes_of(handles[1]), right(models[0], 0), right(models[1], 1)]

    def interrupt(*_: object) -> None:
        raise Interrupted

    hook = models[0][0].weight.register_post_accumulate_grad_hook(interrupt)
    with pytest.raises(Interrupted):
        models[0](batch(2)).square().mean().backward()
    hook.remove()
    found += [right(models[1], 3), right(models[1], 4)]
    with pytest.raises(gw.StepStateError, match="a step of another handle begins"):
        models[0](batch(5))
    handles[0].reset()
    found += [right(models[0], 6), right(models[1], 7)]
    for handle in handles:
        handle.detach()
    return found


def test_a_step_left_in_the_middle_does_not_keep_others_waiting(worlds: Worlds) -> None:
    for found in worlds.run(2, left_in_the_middle):
        assert found == [True] * len(found)


def gone_in_the_middle() -> list[bool]:
    """A model goes in the middle of a step on all ranks, as after a lack of memory; the other one moves to lanes of its own."""
    models, handles = pair()
    found = [right(models[0], 0), right(models[1], 1)]

    def interrupt(*_: object) -> None:
        raise Interrupted

    models[0][0].weight.register_post_accumulate_grad_hook(interrupt)
    with pytest.raises(Interrupted):
        models[0](batch(2)).square().mean().backward()
    before = lanes_of(handles[1])
    handles.pop(0).detach()
    models.pop(0)
    found += [right(models[0], 3), right(models[0], 4), lanes_of(handles[0]) is not before]
    other = plain()
    handle = gw.parallelize(other, plan=gw.Uniform(gw.Identity()))
    found += [right(other, 5), right(models[0], 6)]
    for each in (handle, *handles):
        each.detach()
    return found


def test_a_model_that_goes_in_the_middle_of_a_step(worlds: Worlds) -> None:
    for found in worlds.run(2, gone_in_the_middle):
        assert found == [True] * len(found)


def threads_of_their_own() -> list[bool]:
    """Handles made in this thread and used in two others, which begin in another order on each rank."""
    models, handles = pair()
    expected = [mean_of(model, number) for number, model in enumerate(models)]
    shared = lanes_of(handles[0]) is lanes_of(handles[1])

    def train(number: int) -> None:
        for _ in range(5):
            models[number].zero_grad()
            models[number](batch(number)).square().mean().backward()

    workers = [threading.Thread(target=train, args=[number]) for number in range(2)]
    for worker in workers if dist.get_rank() else workers[::-1]:
        worker.start()
    for worker in workers:
        worker.join()
    found = [shared, lanes_of(handles[0]) is not lanes_of(handles[1])]
    for model, means in zip(models, expected, strict=True):
        found += [torch.equal(each.grad, mean) for each, mean in zip(model.parameters(), means, strict=True)]
    for handle in handles:
        handle.detach()
    return found


def test_handles_of_several_threads_use_lanes_of_their_own(worlds: Worlds) -> None:
    for found in worlds.run(2, threads_of_their_own):
        assert found == [True] * len(found)


def dropped_on_one_rank() -> list[bool]:
    """One rank has let go of its handle when another one is made."""
    first = plain()
    handle = gw.parallelize(first, plan=gw.Uniform(gw.Identity()))
    found = [right(first, 0)]
    if dist.get_rank() == 1:
        handle.detach()
    second = plain()
    other = gw.parallelize(second, plan=gw.Uniform(gw.Identity()))
    found += [lanes_of(other) is not lanes_of(handle), right(second, 1), right(second, 2)]
    handle.detach()
    other.detach()
    return found


def test_ranks_share_lanes_that_all_of_them_have(worlds: Worlds) -> None:
    for found in worlds.run(2, dropped_on_one_rank):
        assert found == [True] * len(found)


def buffers_in_other_orders() -> str:
    """Ranks run the forwards of two models in different orders: their buffers must not be mixed."""
    models = [normalised(), normalised()]
    handles = [gw.parallelize(each, plan=gw.Uniform(gw.Identity())) for each in models]
    for step in range(2):
        order = models[::-1] if step and dist.get_rank() else models
        try:
            losses = {id(model): model(batch(step)).square().mean() for model in order}
            sum(losses[id(model)] for model in models).backward()
        except gw.GradwireError as error:
            for handle in handles:
                handle.detach()
            return str(error)
    return ""


def test_buffers_of_two_models_are_not_mixed() -> None:
    with World(2) as world:
        for words in world.run(buffers_in_other_orders):
            assert "handles crossed: rank 1" in words


def sharded_apart() -> list[bool]:
    """Lanes that wait for an optimizer's step are of one handle alone: the other's backward comes before that step."""
    models = [plain(), plain()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.0) for each in models]
    sharded = gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True), scheme="alltoall")
    handles = [gw.parallelize(each, by, plan=sharded) for each, by in zip(models, optimizers, strict=True)]
    for step in range(3):
        for model in models:
            model(batch(step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    third = plain()
    handles.append(gw.parallelize(third, plan=gw.Uniform(gw.Identity())))
    found = [len({id(lanes_of(handle)) for handle in handles}) == 3, right(third, 9)]
    for handle in handles:
        handle.detach()
    return found


@pytest.mark.filterwarnings("ignore:.*only its shard")
def test_sharded_handles_use_lanes_of_their_own(worlds: Worlds) -> None:
    for found in worlds.run(2, sharded_apart):
        assert found == [True] * len(found)
