"""Models that change after `parallelize`: what is new is taken in where all ranks agree, and refused by name where not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from threads import Threads, built, here
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Given, Worlds, digest, seeded

import gradwire as gw


def network() -> nn.Sequential:
    model = built(0, lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4), nn.Linear(4, 1)))
    model[2].requires_grad_(False)
    return model


def assigned(model: nn.Module) -> None:
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


def thawed(model: nn.Module) -> None:
    model[2].requires_grad_(True)


def adapted(model: nn.Module) -> None:
    # as DDP does, the change makes ranks equal again
    model[0].register_parameter("adapter", nn.Parameter(torch.randn(9, generator=seeded(7, here.rank))))
    model[0].register_forward_hook(lambda module, inputs, output: output * module.adapter)


def narrowed(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def widened(model: nn.Module) -> None:
    model.double()


def there_and_back(model: nn.Module) -> None:
    """Afterwards every parameter is as it was, but parameters and gradients lie in other memory."""
    model.double().float()


def other_layer(model: nn.Module) -> None:
    model[3] = built(3, lambda: nn.Linear(4, 2))


def frozen(model: nn.Module) -> None:
    model[0].requires_grad_(False)


CHANGES = [assigned, thawed, adapted, narrowed, widened, there_and_back, other_layer, frozen]


def train(model: nn.Module, forward: nn.Module, steps: range) -> None:
    """Plain SGD on this rank's batches; the optimizer is made anew after every change, as scripts do."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    dtype = next(model.parameters()).dtype
    for step in steps:
        batch = torch.randn(5, 6, generator=seeded(step, here.rank)).to(dtype)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        forward(batch).square().mean().backward()
        optimizer.step()


def change(how: Callable[[nn.Module], None]) -> tuple[str, str]:
    """Three steps, the change, three more: with DDP made anew after the change, and with one handle all through."""
    digests = []
    for ours in (False, True):
        model = network()
        if ours:
            handle = gw.parallelize(model, plan=gw.Identity())
        train(model, model if ours else DistributedDataParallel(model), range(3))
        how(model)
        train(model, model if ours else DistributedDataParallel(model), range(3, 6))
        digests.append(digest(model.state_dict().values()))
    assert handle.stats().steps == 6
    return digests[0], digests[1]


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_on_all_ranks_is_taken_in(worlds: Worlds, how: Callable[[nn.Module], None]) -> None:
    ends = worlds.run(2, change, how)
    assert all(ours == ddp for ddp, ours in ends)


def left_as_it_changes(how: Callable[[nn.Module], None], schedule: Any) -> tuple[str, int]:
    """Rank 1 leaves the backward of the step that takes in a change, and calls reset(). The weights and steps at the end."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity(), schedule=schedule), process_group=here.group)
    for step in range(6):
        if step == 3:
            how(model)
        loss = model(torch.randn(5, 6, generator=seeded(step, here.rank)).to(model[0].weight.dtype)).square().mean()
        try:
            if step == 3 and here.rank == 1:
                raise MemoryError("as ordered")
            loss.backward()
            optimizer.step()
        except (MemoryError, gw.StepStateError):
            handle.reset()
        optimizer.zero_grad()
    end = digest(model.parameters()), handle.session.step
    handle.detach()
    return end


@pytest.mark.parametrize("how", [thawed, narrowed])
@pytest.mark.parametrize(
    "schedule", [gw.Pipelined(), gw.Delayed(), gw.LocalSteps(every=1)], ids=["pipelined", "delayed", "local"]
)
def test_a_step_that_was_left_as_it_took_in_a_change_is_void_on_all_ranks(
    threads: Threads, how: Callable[[nn.Module], None], schedule: Any
) -> None:
    """Else that rank goes on with its next batch beside others' last one, and the others wait for it at the end."""
    first, second = threads.run(2, left_as_it_changes, how, schedule, deadline_s=15.0)
    assert first == second and first[1] == 6


def change_on_one(how: Callable[[nn.Module], None]) -> list[str]:
    """Rank 0 alone changes its model. What both are told, then whether training goes on after all changed."""
    model = network()
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    train(model, model, range(2))
    if here.rank == 0:
        how(model)
    told = []
    for _ in range(2):
        with pytest.raises(gw.GradwireError) as caught:
            train(model, model, range(2, 3))
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    handle.reset()
    if here.rank != 0:
        how(model)
    train(model, model, range(3, 5))
    everybody = here.gather(digest(model.parameters()))
    assert everybody[0] == everybody[1]
    handle.detach()
    return told


@pytest.mark.parametrize("how", [assigned, thawed, narrowed])
def test_a_change_on_one_rank_alone_is_refused_on_both(threads: Threads, how: Callable[[nn.Module], None]) -> None:
    for first, second in threads.run(2, change_on_one, how):
        assert first.startswith("StepStateError")
        assert "rank 0's model were added, thawed, converted or replaced, and those of rank 1's were not" in first
        assert second == first


def change_differently() -> str:
    model = network()
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    train(model, model, range(1))
    model.double() if here.rank else model.bfloat16()
    with pytest.raises(gw.DisagreementError) as caught:
        train(model, model, range(1, 2))
    handle.detach()
    return str(caught.value)


def test_different_changes_are_refused_on_both(threads: Threads) -> None:
    first, second = threads.run(2, change_differently)
    assert first == second
    assert "rank 0 has ['0.weight', [9, 6], 'bfloat16', 'cpu'], rank 1 has ['0.weight', [9, 6], 'float64', 'cpu']" in first


def change_under_a_fixed_plan() -> str:
    model = network()
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    train(model, model, range(1))
    plan = handle.plan
    handle.detach()
    handle = gw.parallelize(model, plan=plan, process_group=here.group)
    adapted(model)
    with pytest.raises(gw.DisagreementError) as caught:
        train(model, model, range(1, 2))
    handle.detach()
    return str(caught.value)


def test_a_fixed_plan_that_does_not_fit_any_more_is_refused(threads: Threads) -> None:
    for told in threads.run(2, change_under_a_fixed_plan):
        assert "0.adapter" in told
        assert "PlanError" in told


def change_in_eval() -> tuple[str, str]:
    """In eval mode a forward may be one rank's alone: it is refused there, and `attach` is what to call."""
    model = network()
    handle = gw.parallelize(model, plan=gw.Identity(), process_group=here.group)
    train(model, model, range(1))
    model.eval()
    thawed(model)
    told = ""
    if here.rank == 0:
        with torch.no_grad():
            model(torch.ones(2, 6))
        with pytest.raises(gw.StepStateError) as caught:
            model(torch.ones(2, 6))
        told = str(caught.value)
    handle.attach()
    train(model, model, range(1, 3))
    handle.detach()
    return told, digest(model.parameters())


def test_in_eval_mode_attach_is_called_by_hand(threads: Threads) -> None:
    (told, first), (_, second) = threads.run(2, change_in_eval)
    assert "'2.weight' was added, thawed" in told
    assert "attach()" in told
    assert first == second


def keep_residuals() -> tuple[float, float]:
    """What was sent and what is left add up to what the gradients were, over a change in between."""
    model = Given([700, 300], seed=0)
    handle = gw.parallelize(model, plan=gw.ErrorFeedback(gw.QSGD(bits=2)), process_group=here.group)
    given, received = torch.zeros(700, dtype=torch.float64), torch.zeros(700, dtype=torch.float64)
    for step in range(6):
        if step == 3:
            model.p2 = nn.Parameter(torch.zeros(50))
        gradients = model.random_gradients(step, here.rank)
        model.zero_grad()
        model(gradients).backward()
        given += gradients[0].double() / here.world_size
        received += model.p0.grad.double()
    left = sum(v.double() for key, v in handle.state_dict().items() if key.endswith("/p0"))
    here.add_up(given)
    here.add_up(left)
    handle.detach()
    return float((given - received - left).norm()), float(left.norm())


@pytest.mark.parametrize("world_size", [2, 3])
def test_residuals_of_what_stays_are_kept(threads: Threads, world_size: int) -> None:
    for off, left in threads.run(world_size, keep_residuals):
        assert left > 1
        assert off < 1e-4


def with_a_buffer_that_grows(schedule: Any) -> str:
    """The weights after steps before each of which a buffer grows, while the last exchange is under way."""
    model = built(1, lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity(), schedule=schedule), process_group=here.group)
    for step in range(6):
        model.register_buffer("seen", torch.full((step + 1,), float(here.rank)))
        model(torch.randn(5, 6, generator=seeded(step, here.rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    end = digest(model.state_dict().values())
    handle.detach()
    return end


@pytest.mark.parametrize("schedule", [gw.Delayed(), gw.LocalSteps(every=2, delay=1)], ids=["delayed", "local"])
def test_a_buffer_may_grow_while_an_exchange_is_under_way(threads: Threads, schedule: Any) -> None:
    """The exchange brings rank 0's buffer of the old size."""
    first, second = threads.run(2, with_a_buffer_that_grows, schedule)
    assert first == second


def a_copy_is_not_ours() -> None:
    """A deep copy and an average of the model are ordinary models, before and after a change."""
    model = network()
    gw.parallelize(model, plan=gw.Identity())
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, model, range(2))
    thawed(model)
    train(model, model, range(2, 4))
    average.update_parameters(model)
    clone = copy.deepcopy(model)
    if dist.get_rank() == 0:
        clone(torch.ones(2, 6)).sum().backward()
        average(torch.ones(2, 6)).sum().backward()


def test_copies_stay_ordinary_models(worlds: Worlds) -> None:
    worlds.run(2, a_copy_is_not_ours)


def with_another_head() -> dict[str, bool]:
    """Whether anything is left of each tensor's residual after the head was replaced by one of its size."""
    model = built(1, lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    handle = gw.parallelize(model, plan=gw.ErrorFeedback(gw.QSGD(bits=2)), process_group=here.group)
    for step in range(3):
        model(torch.randn(5, 6, generator=seeded(step, here.rank))).square().sum().backward()
        model.zero_grad()
    model[1] = nn.Linear(8, 4)
    handle.attach()
    prefix = f"rank{here.rank}/residual/0/"
    left = {key.removeprefix(prefix): bool(value.any()) for key, value in handle.state_dict().items() if key.startswith(prefix)}
    handle.detach()
    return left


def test_a_new_head_does_not_get_the_residual_of_the_old_one(threads: Threads) -> None:
    left = {"1.weight": False, "1.bias": False}
    for found in threads.run(2, with_another_head):
        assert found | left == found


class Branches(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(built(here.rank, lambda: [nn.Linear(6, 2) for _ in range(2)]))

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        outputs: torch.Tensor = self.layers[which](inputs)
        return outputs


def accumulated_over_a_change(schedule: str) -> list[str]:
    """The gradient of the layer that only the first of two accumulated backwards used, with a change of the model in between,
    and the weights after the step."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gw.Uniform(gw.Identity(), schedule=schedule)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    inputs = torch.randn(5, 6, generator=seeded(here.rank))
    with handle.no_sync():
        model(inputs, 0).square().mean().backward()
    model.register_buffer("seen", torch.zeros(3), persistent=False)
    model(inputs, 1).square().mean().backward()
    gradient = digest([model.layers[0].weight.grad])
    optimizer.step()
    end = [gradient, digest(model.parameters())]
    handle.detach()
    return end


@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
def test_a_change_between_accumulated_backwards_forgets_no_gradient(threads: Threads, schedule: str) -> None:
    """Else each rank steps by its own gradient, and weights differ from then on."""
    first, second = threads.run(2, accumulated_over_a_change, schedule)
    assert first == second


FEEDBACK = gw.ErrorFeedback(gw.QSGD(bits=2))
KEPT_BESIDE: dict[str, tuple[Any, str]] = {
    "outer momentum": (gw.LocalSteps.diloco(every=1), "/outer/"),
    "corrections": (gw.Delayed(k=1, correction=FEEDBACK), "/correction_residual/"),
}


def kept_beside(what: str, drops: bool) -> list[dict[str, bool]]:
    """Whether a schedule keeps anything of each tensor, before and after its head was replaced by one of its size, or after
    `drop_residuals`."""
    schedule, field = KEPT_BESIDE[what]
    model = built(1, lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gw.Uniform(FEEDBACK, schedule=schedule)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    found = []
    for changes in (False, True):
        if changes and drops:
            handle.drop_residuals()
        elif changes:
            model[1] = built(2, lambda: nn.Linear(8, 4))
            handle.attach()
        else:
            for step in range(3):
                model(torch.randn(5, 6, generator=seeded(step, here.rank))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        kept = {key: bool(value.any()) for key, value in handle.state_dict().items() if field in key}
        found.append({name: any(kept[key] for key in kept if key.endswith(name)) for name in ("0.weight", "1.weight")})
    handle.detach()
    return found


@pytest.mark.parametrize("what", KEPT_BESIDE)
def test_a_new_head_does_not_get_what_its_schedule_kept_of_the_old_one(threads: Threads, what: str) -> None:
    for before, after in threads.run(2, kept_beside, what, False):
        assert before == {"0.weight": True, "1.weight": True}
        assert after == {"0.weight": True, "1.weight": False}


def test_residuals_of_corrections_are_dropped_too(threads: Threads) -> None:
    for before, after in threads.run(2, kept_beside, "corrections", True):
        assert before == {"0.weight": True, "1.weight": True}
        assert after == {"0.weight": False, "1.weight": False}
