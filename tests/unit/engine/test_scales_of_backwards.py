"""The scale of a backward: which backward a GradScaler scaled, as hooks and callbacks inside it see it. And steps left out."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.engine import CountingHook, LossScale
from gradwire.engine.torch_hooks import loss_scale
from gradwire.engine.torch_hooks.loss_scale import watch_scalers


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    scaler = torch.amp.GradScaler
    plain = scaler.scale, scaler.step, scaler.update
    watch_scalers()
    yield
    scaler.scale, scaler.step, scaler.update = plain  # type: ignore[method-assign]


def scale_of_this_backward() -> float | None:
    found = loss_scale.scale_of_this_backward()
    return None if found is None else found[0]


def parameter_with(hook: Callable[[], object]) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.register_post_accumulate_grad_hook(lambda _: hook())
    return weight


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def test_it_is_known_inside_a_reentrant_checkpoint_and_only_while_its_backward_runs() -> None:
    seen: list[float | None] = []
    weight = parameter_with(lambda: seen.append(scale_of_this_backward()))
    scaler, inputs = scaler_of(8.0), torch.ones(2, requires_grad=True)
    for scale in (scaler.scale, torch.clone, scaler.scale):
        scale(checkpoint(lambda x: x * weight, inputs, use_reentrant=True).sum()).backward()
        seen.append(scale_of_this_backward())
    assert seen == [8.0, None, None, None, 8.0, None]


def test_callbacks_at_the_end_of_backward_see_it() -> None:
    """FSDP2 reduces what is left in one of them."""
    seen: list[float | None] = []

    def see() -> None:
        seen.append(scale_of_this_backward())

    weight = parameter_with(lambda: Variable._execution_engine.queue_callback(see))
    scaler = scaler_of(8.0)
    scaler.scale((weight * 1.0).sum()).backward()
    assert seen == [8.0] and scale_of_this_backward() is None


def test_backwards_of_several_threads_have_their_own() -> None:
    seen, both = dict[float, float | None](), threading.Barrier(2)

    def train(scale: float) -> None:
        def see() -> None:
            both.wait(30)
            seen[scale] = scale_of_this_backward()
            both.wait(30)

        scaler = scaler_of(scale)
        scaler.scale((parameter_with(see) * 1.0).sum()).backward()

    threads = [threading.Thread(target=train, args=(scale,)) for scale in (2.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {2.0: 2.0, 4.0: 4.0}


def test_changes_are_those_from_one_scaled_backward_to_the_next() -> None:
    follower, changes = LossScale(), list[loss_scale.ScaleChange]()
    weight = parameter_with(lambda: changes.append(follower.change([gw.QSGD(bits=4)])))
    scaler = scaler_of(8.0)
    for scale in (8.0, 2.0, 2.0):
        scaler.update(scale) if changes else None
        scaler.scale(weight.sum()).backward()
        weight.sum().backward()  # without a scaler
    follower.forget()
    scaler.update(16.0)
    scaler.scale(weight.sum()).backward()
    assert [each.factor for each in changes] == [1.0, 1.0, 0.25, 1.0, 1.0, 1.0, 1.0]
    assert not any(each.left_out for each in changes), "the script chose the scale"


def test_a_step_that_the_scaler_left_out_is_seen_once() -> None:
    follower, changes = LossScale(), list[loss_scale.ScaleChange]()
    weight = parameter_with(lambda: changes.append(follower.change([gw.QSGD(bits=4)])))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), scaler_of(8.0)
    for factor in (1.0, torch.inf, 1.0):
        for _ in range(2):  # two backwards for one step
            scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [tuple(each) for each in changes] == [(1.0, False)] * 4 + [(0.5, True), (1.0, False)]


class Counter:
    steps = 0

    def count(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.steps += 1


@pytest.mark.parametrize("kind", ["plain", "fused", "disabled"])
def test_a_step_that_a_scaler_leaves_out_is_counted_once_as_any_other(kind: str) -> None:
    weight, counter = torch.nn.Parameter(torch.ones(2)), Counter()
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=kind == "fused")
    counted = optimizer.register_step_post_hook(CountingHook(counter, Counter.count))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=kind != "disabled")
    for step in range(3):
        before = weight.detach().clone()
        for _ in range(2):  # accumulated
            scaler.scale(weight.sum() * (torch.inf if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        assert counter.steps == step
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert counter.steps == step + 1
        assert kind == "disabled" or torch.equal(weight, before) == (step == 1)
    counted.remove()
    scaler.scale(weight.sum() * torch.inf).backward()
    scaler.step(optimizer)
    assert counter.steps == 3
