"""Training loops of every kind end with plain DDP's numbers, bit for bit on two ranks."""

import io
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

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
    normalised,
    plain,
    sgd,
    step_once,
)
from torch import nn
from worlds import Worlds

# ---- several models, several losses


def networks(between: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator."""
    return (
        nn.Sequential(nn.Linear(4, 8), between(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), between(), nn.Linear(8, 1)),
    )


def adversaries(library: Library, between: Callable[[], nn.Module], freeze: bool, two_backwards: bool) -> Ends:
    """The generator's backward runs through the discriminator and leaves gradients there, which are zeroed."""
    generator, discriminator = networks(between)
    generate, judge = library.parallelize(generator), library.parallelize(discriminator)
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    for step in range(4):
        discriminator.requires_grad_(True)
        of_discriminator.zero_grad()
        fake = judge(generate(batch(3 * step, 4, 4)).detach()).square().mean()
        if two_backwards:
            fake.backward()
            judge(batch(3 * step + 1)).square().mean().backward()
        else:
            (fake - judge(batch(3 * step + 1)).mean()).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        discriminator.requires_grad_(not freeze)
        (-judge(generate(batch(3 * step + 2, 4, 4))).mean()).backward()
        of_generator.step()
    return everything(generator, discriminator)


def gan(library: Library) -> Ends:
    return adversaries(library, nn.Tanh, freeze=False, two_backwards=False)


def gan_with_a_frozen_discriminator(library: Library) -> Ends:
    return adversaries(library, nn.Tanh, freeze=True, two_backwards=False)


def gan_with_batch_norm(library: Library) -> Ends:
    return adversaries(library, lambda: nn.BatchNorm1d(8), freeze=False, two_backwards=True)


def gan_with_batch_norm_and_one_backward(library: Library) -> Ends:
    return adversaries(library, lambda: nn.BatchNorm1d(8), freeze=False, two_backwards=False)


def twins_with_batch_norm(library: Library) -> Ends:
    model = normalised()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        (run(batch(2 * step)) - run(batch(2 * step + 1))).square().mean().backward()
        optimizer.step()
    return everything(model)


def gradient_penalty(library: Library) -> Ends:
    """WGAN-GP: the norm of the gradient with respect to inputs is a part of the loss."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        inputs = batch(2 * step).requires_grad_()
        judged = run(inputs)
        (slope,) = torch.autograd.grad(judged.sum(), inputs, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        (run(batch(2 * step + 1)).mean() - judged.mean() + 10 * penalty).backward()
        optimizer.step()
    return everything(model)


def penalty_on_parameters(library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = run(batch(step)).square().mean()
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + torch.stack([slope.square().sum() for slope in slopes]).sum()).backward()
        optimizer.step()
    return everything(model)


def autograd_grad(library: Library) -> Ends:
    """Sends nothing: the returned gradients are this rank's own."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    own: list[torch.Tensor] = []
    for step in range(3):
        own += torch.autograd.grad(run(batch(50 + step)).square().mean(), list(model.parameters()))
        step_once(run, optimizer, step)
    yield from own
    yield from everything(model)


def backward_to_all_parameters(library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward(inputs=list(model.parameters()))
        optimizer.step()
    return everything(model)


def adversarial_inputs(library: Library) -> Ends:
    """A backward whose gradients are thrown away gives the inputs of the one that counts."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        inputs = batch(step).requires_grad_()
        run(inputs).square().mean().backward()
        optimizer.zero_grad()
        run((inputs + 0.1 * inputs.grad.sign()).detach()).square().mean().backward()
        optimizer.step()
    return everything(model)


SECOND_FORWARD = "rank 0's buffers are written before a second forward, and autograd then refuses the first one's backward"


@pytest.mark.parametrize(
    "training",
    [
        gan,
        gan_with_a_frozen_discriminator,
        gan_with_batch_norm,
        gan_with_batch_norm_and_one_backward,
        twins_with_batch_norm,
        gradient_penalty,
        penalty_on_parameters,
        autograd_grad,
        backward_to_all_parameters,
        adversarial_inputs,
    ],
    ids=name_of,
)
def test_losses_as_under_ddp(worlds: Worlds, training: Training) -> None:
    assert_as(worlds, "ddp", training)


# ---- optimizers and mixed precision


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01),
}


def with_optimizer(name: str, library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), OPTIMIZERS[name](list(model.parameters()))
    for step in range(4):
        step_once(run, optimizer, step)
    return everything(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(worlds: Worlds, name: str) -> None:
    assert_as(worlds, "ddp", partial(with_optimizer, name))


def lbfgs(library: Library, line_search: str | None, **options: Any) -> Ends:
    """Several backwards a step. The closure returns the mean loss, so that ranks take the same decisions."""
    model = plain()
    run = library.parallelize(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=line_search, **options)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = run(batch(step)).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean / dist.get_world_size()

        optimizer.step(closure)
    return everything(model)


def lbfgs_without_search(library: Library) -> Ends:
    return lbfgs(library, None, tolerance_change=0, tolerance_grad=0)


def lbfgs_with_wolfe_search(library: Library) -> Ends:
    return lbfgs(library, "strong_wolfe")


def several_optimizers(library: Library) -> Ends:
    """One steps always, the other every second time."""
    model = plain()
    run = library.parallelize(model)
    first, second = sgd(model[0]), torch.optim.AdamW(model[2].parameters(), lr=0.01)
    for step in range(4):
        step_once(run, first, step)
        if step % 2:
            second.step()
            second.zero_grad()
    return everything(model)


def schedules(library: Library, before_step: bool) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
    for step in range(4):
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward()
        if before_step:
            schedule.step()
        optimizer.step()
        if not before_step:
            schedule.step()
    return everything(model)


def schedule_after_step(library: Library) -> Ends:
    return schedules(library, before_step=False)


def schedule_before_step(library: Library) -> Ends:
    return schedules(library, before_step=True)


def clip_grad_value(library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return everything(model)


def autocast_bfloat16(library: Library) -> Ends:
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
    return everything(model)


def autocast_float16(library: Library) -> Ends:
    """With a scaler whose first scales overflow, and one batch that overflows on rank 1 alone."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    for step in range(8):
        optimizer.zero_grad()
        large = 1000 if step == 5 and dist.get_rank() == 1 else 1
        with torch.autocast("cpu", torch.float16):
            loss = run(batch(step) * large).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    yield torch.tensor(scaler.get_scale())
    yield from everything(model)


def no_sync_around(library: Library, forwards: str, backwards: str) -> Ends:
    """Four batches a step. The letters say which of their forwards and backwards are inside `no_sync` (n)."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        for number, (forward, backward) in enumerate(zip(forwards, backwards, strict=True)):
            with library.no_sync(run) if forward == "n" else nullcontext():
                loss = run(batch(4 * step + number)).square().mean()
            with library.no_sync(run) if backward == "n" else nullcontext():
                loss.backward()
            yield from (each.grad for each in model.parameters())
        optimizer.step()
    yield from everything(model)


def no_sync_around_every_backward(library: Library) -> Ends:
    return no_sync_around(library, "....", "nnnn")


def no_sync_around_some_backwards(library: Library) -> Ends:
    return no_sync_around(library, "....", ".nn.")


def no_sync_around_some_forwards(library: Library) -> Ends:
    return no_sync_around(library, "nnn.", "....")


def no_sync_around_both(library: Library) -> Ends:
    return no_sync_around(library, "nnn.", "nnnn")


def two_forwards_of_which_one_sends(library: Library) -> Ends:
    """One backward of a forward outside and one inside `no_sync`, in both orders."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for number in range(2):
            with library.no_sync(run) if number == step % 2 else nullcontext():
                loss = loss + run(batch(2 * step + number)).square().mean()
        loss.backward()
        optimizer.step()
    return everything(model)


class Policy(nn.Module):
    """Returns an activation and one of its parameters, as policies with a scale of their own do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_scale = plain(), nn.Parameter(torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mean(inputs), self.log_scale


def a_parameter_returned(library: Library) -> Ends:
    """Gradients of three batches are added up before each step."""
    model = Policy()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            with library.no_sync(run) if part < 2 else nullcontext():
                mean, log_scale = run(batch(3 * step + part))
                (mean.square() * (-log_scale).exp() + log_scale).mean().backward()
            yield from (each.grad for each in model.parameters())
        optimizer.step()
    if library.kind == "gradwire":
        assert all(handle.session.step == 4 for handle in library._handles.values())
    assert len(model.log_scale._backward_hooks or ()) == 0, "a hook stays on the parameter for each forward"
    yield from everything(model)


def in_a_thread(library: Library) -> Ends:
    """Not the main one, under anomaly detection."""
    model = plain()
    run, optimizer = library.parallelize(model), sgd(model)
    with torch.autograd.set_detect_anomaly(True):
        for step in range(3):
            thread = threading.Thread(target=step_once, args=(run, optimizer, step))
            thread.start()
            thread.join()
    return everything(model)


@pytest.mark.parametrize(
    "training",
    [
        lbfgs_without_search,
        lbfgs_with_wolfe_search,
        several_optimizers,
        schedule_after_step,
        schedule_before_step,
        clip_grad_value,
        autocast_bfloat16,
        autocast_float16,
        no_sync_around_every_backward,
        no_sync_around_some_backwards,
        no_sync_around_some_forwards,
        no_sync_around_both,
        two_forwards_of_which_one_sends,
        a_parameter_returned,
        in_a_thread,
    ],
    ids=name_of,
)
def test_steps_as_under_ddp(worlds: Worlds, training: Training) -> None:
    assert_as(worlds, "ddp", training)


# ---- evaluating between steps


def evaluate(library: Library, without_gradients: Callable[[], Any]) -> Ends:
    """On rank 0 alone, which then saves while the others wait."""
    model = normalised()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        step_once(run, optimizer, step)
        if dist.get_rank() == 0:
            model.eval()
            with without_gradients():
                model(batch(90 + step))
            model.train()
            torch.save(model.state_dict(), io.BytesIO())
        dist.barrier()
    return everything(model)


def no_grad(library: Library) -> Ends:
    return evaluate(library, torch.no_grad)


def inference_mode(library: Library) -> Ends:
    return evaluate(library, torch.inference_mode)


def set_grad_enabled(library: Library) -> Ends:
    return evaluate(library, lambda: torch.set_grad_enabled(False))


def gradients_enabled(library: Library) -> Ends:
    return evaluate(library, lambda: torch.set_grad_enabled(True))


def forward_without_backward(library: Library) -> Ends:
    model = normalised()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        run(batch(50 + step)).square().mean().item()
        step_once(run, optimizer, step)
    return everything(model)


def forward_that_raises(library: Library) -> Ends:
    """On all ranks, caught by the script."""
    model = normalised()
    run, optimizer = library.parallelize(model), sgd(model)
    for step in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run(batch(step, 4, 5))
        step_once(run, optimizer, step)
    return everything(model)


@pytest.mark.parametrize(
    "training",
    [no_grad, inference_mode, set_grad_enabled, gradients_enabled, forward_without_backward, forward_that_raises],
    ids=name_of,
)
def test_evaluation_between_steps(worlds: Worlds, training: Training) -> None:
    assert_as(worlds, "ddp", training)
