"""What scripts do between steps gives in the pipelined schedule what it gives in the backward schedule, bit for bit, though
parameters are stepped later: whatever is looked at is current."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_ddp import name_of
from test_pipelined import PLAIN, loss_of, policy, state_of, tied, words
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import Worlds, digest, seeded

import gradwire as gw

Tensors = Iterable[torch.Tensor]
Parallelize = Callable[..., gw.Handle]
Script = Callable[[Parallelize], Tensors]
STEPS = 4


class Training:
    """A model, its optimizer and handle, and the tensors to compare."""

    def __init__(self, parallelize: Parallelize, make: Any = None) -> None:
        self.model = tied()
        self.optimizer = make(self.model) if make else torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.handle = parallelize(self.model, self.optimizer)
        self.seen: list[torch.Tensor] = []

    def backward(self, step: int) -> None:
        loss_of(self.model, step).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def see(self, *tensors: torch.Tensor | None) -> None:
        self.seen += [tensor.detach().clone() for tensor in tensors if tensor is not None]


Act = Callable[[Training], None]


def after_steps(*acts: Act) -> Script:
    """Each of them after a step of its own, before the next forward."""

    def script(parallelize: Parallelize) -> Tensors:
        training = Training(parallelize)
        for step, act in enumerate(acts):
            training.step(step)
            act(training)
            training.see(training.model.head.weight)
        training.step(len(acts))
        return training.seen

    return script


def before_steps(*acts: Act) -> Script:
    """Each of them between a backward and its step."""

    def script(parallelize: Parallelize) -> Tensors:
        training = Training(parallelize)
        training.step(0)  # the first step waits for everything, since buckets are made anew
        for step, act in enumerate(acts, 1):
            training.backward(step)
            act(training)
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.see(training.model.head.weight)
        return training.seen

    return script


def with_optimizer(make: Any) -> Script:
    def script(parallelize: Parallelize) -> Tensors:
        training = Training(parallelize, make)
        for step in range(STEPS):
            training.step(step)
        return training.seen

    return script


# ---- after a step


def clamp_data(training: Training) -> None:
    for parameter in training.model.parameters():
        parameter.data.clamp_(-0.5, 0.5)


def read_by_attribute(training: Training) -> None:
    training.see(training.model.first.weight.norm(), training.model.embed.weight)


def save_state(training: Training) -> None:
    training.see(*training.model.state_dict().values(), *state_of(training.optimizer))


def pickle_and_copy(training: Training) -> None:
    buffer = io.BytesIO()
    torch.save(training.model, buffer)
    buffer.seek(0)
    training.see(*torch.load(buffer, weights_only=False).parameters())
    training.see(pickle.loads(pickle.dumps(training.model.first.bias)), copy.deepcopy(training.model.second).bias)


def evaluate(training: Training) -> None:
    training.model.eval()
    with torch.no_grad():
        training.see(training.model(words(99), 1))
    with torch.inference_mode():
        training.see(training.model(words(99), 1).clone())
    training.model.train()


def evaluate_with_gradients_on_one_rank(training: Training) -> None:
    if dist.get_rank() == 0:
        training.model.eval()
        training.see(training.model(words(99), 1))
        training.model.train()


def a_part_in_inference_mode(training: Training) -> None:
    """After the first step that used this part: its optimizer state is made here."""
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        training.see(training.model.sometimes(torch.ones(2, 16)).clone())


def functional(training: Training) -> None:
    own = dict(training.model.named_parameters())
    training.see(torch.func.functional_call(training.model, own, (words(99), 1)))


def functional_in_transforms(training: Training) -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return training.model.second(nn.functional.linear(x, weight)).square().sum()

    training.see(torch.func.vmap(torch.func.grad(loss), (None, 0))(torch.ones(16, 16), torch.ones(3, 16)))


def step_again(training: Training) -> None:
    training.backward(7)
    training.optimizer.step()
    training.optimizer.step()
    training.see(training.model.scale.grad)
    training.optimizer.zero_grad(set_to_none=False)


def look_into_the_optimizer(training: Training) -> None:
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def change_groups(training: Training) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] += 0.01


def assign(training: Training) -> None:
    training.model.load_state_dict({name: 0.5 * value for name, value in training.model.state_dict().items()}, assign=False)


# ---- between backward and step


def clip_by_torch(training: Training) -> None:
    training.see(nn.utils.clip_grad_norm_(training.model.parameters(), 0.1))


def clip_a_list_of_its_own(training: Training) -> None:
    held = training.model.__dict__.setdefault("held", list(training.model.parameters()))
    training.see(nn.utils.clip_grad_norm_(held, 0.1), nn.utils.get_total_norm([p.grad for p in held if p.grad is not None]))


def clip_by_handle(training: Training) -> None:
    training.see(training.handle.clip_grad_norm_(0.1))


def clip_values(training: Training) -> None:
    nn.utils.clip_grad_value_(training.model.parameters(), 1e-3)


def change_one_gradient(training: Training) -> None:
    training.model.first.weight.grad.mul_(0.5)
    training.model.second.weight.grad = None
    training.model.scale.grad = torch.ones(16)


def log_gradients(training: Training) -> None:
    training.see(*(parameter.grad for parameter in training.model.parameters()))


def second_backward(training: Training) -> None:
    training.backward(50)


def a_part_once_more(training: Training) -> None:
    with training.handle.no_sync():
        training.model.second(torch.ones(2, 16)).sum().backward()


def accumulated_first(training: Training) -> None:
    training.optimizer.step()
    training.optimizer.zero_grad()
    with training.handle.no_sync():
        training.backward(60)
    training.backward(61)


# ---- optimizers


class Counting(torch.optim.SGD):
    """Keeps a counter in its group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        super().step()


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return Counting(model.parameters(), lr=0.1)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def clamp(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)

    optimizer.register_step_post_hook(clamp)
    return optimizer


def of_all_kinds(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def rate_in_a_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), amsgrad=True)


# ---- other loops


def grad_scaler(parallelize: Parallelize, fused: bool = False) -> Tensors:
    training = Training(parallelize, lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(STEPS):
        loss = loss_of(training.model, step) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
    training.see(torch.tensor(scaler.get_scale()))
    return training.seen


def grad_scaler_in_a_fused_step(parallelize: Parallelize) -> Tensors:
    return grad_scaler(parallelize, fused=True)


def averaged_model(parallelize: Parallelize) -> Tensors:
    training = Training(parallelize)
    average = torch.optim.swa_utils.AveragedModel(training.model, avg_fn=lambda a, b, n: 0.5 * a + 0.5 * b)
    for step in range(STEPS):
        training.step(step)
        average.update_parameters(training.model)
    return average.parameters()


def several_optimizers(parallelize: Parallelize) -> Tensors:
    """One of two steps every other time; one holds a parameter that is not the model's, and two share one."""
    model, outside = tied(), nn.Parameter(torch.ones(3))
    named = dict(model.named_parameters())
    first = torch.optim.Adam([named.pop("scale"), named["first.weight"], outside], lr=0.1)
    second = torch.optim.SGD(list(named.values()), lr=0.05, momentum=0.9)
    parallelize(model, [first, second])
    for step in range(STEPS + 2):
        (loss_of(model, step) + outside.square().sum()).backward()
        first.step()
        if step % 2:
            second.step()
        for optimizer in (first, second):
            optimizer.zero_grad()
    return [*model.parameters(), outside]


def a_model_of_two_handles(parallelize: Parallelize) -> Tensors:
    torch.manual_seed(3)
    encoder, decoder = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 8)), nn.Linear(8, 6)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1, momentum=0.9)
    for part in (encoder, decoder):
        parallelize(part, optimizer)
    for step in range(STEPS):
        decoder(encoder(torch.randn(4, 6, generator=seeded(dist.get_rank(), step)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*encoder.parameters(), *decoder.parameters()]


def checkpointed(parallelize: Parallelize, reentrant: bool = False) -> Tensors:
    training = Training(parallelize)
    layer, model = nn.Linear(16, 16), training.model
    for step in range(STEPS):
        x = model.embed(words(step)) * model.scale
        x = checkpoint(lambda x: model.second(torch.tanh(model.first(x))), x, use_reentrant=reentrant)
        layer(x).square().mean().backward()
        training.optimizer.step()
        model.zero_grad()
    return training.seen


def normalised(parallelize: Parallelize) -> Tensors:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parallelize(model, optimizer)
    for step in range(STEPS):
        model(torch.randn(4, 6, generator=seeded(dist.get_rank(), step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *model.buffers()]


def joined(parallelize: Parallelize) -> Tensors:
    training = Training(parallelize)
    with training.handle.join():
        for step in range(2 + 2 * dist.get_rank()):
            training.step(step)
    return training.model.parameters()


def converted_in_between(parallelize: Parallelize) -> Tensors:
    training = Training(parallelize)
    for step in range(STEPS):
        training.step(step)
        if step == 1:
            training.model.double()
    return training.model.parameters()


def compiled(parallelize: Parallelize) -> Tensors:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parallelize(model, optimizer)
    run = torch.compile(model, backend="eager")
    for step in range(STEPS):
        run(torch.randn(4, 6, generator=seeded(dist.get_rank(), step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.parameters()


def schedulers(parallelize: Parallelize) -> Tensors:
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    parallelize(model, optimizer)
    after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        before.step()
        after.step()
        optimizer.zero_grad()
    return model.parameters()


LOOKS = after_steps(
    *(
        clamp_data,
        a_part_in_inference_mode,
        read_by_attribute,
        save_state,
        pickle_and_copy,
        evaluate,
        evaluate_with_gradients_on_one_rank,
    ),
    *(functional, functional_in_transforms, step_again, look_into_the_optimizer, change_groups, assign),
)
GRADIENTS = before_steps(
    *(clip_by_torch, clip_a_list_of_its_own, clip_by_handle, clip_values, change_one_gradient, log_gradients),
    *(second_backward, a_part_once_more, accumulated_first),
)
SCRIPTS: dict[str, Script] = {
    "looks after a step": LOOKS,
    "gradients between backward and step": GRADIENTS,
    **{name_of(make): with_optimizer(make) for make in (counting, hooked, of_all_kinds, rate_in_a_tensor)},
    **{
        name_of(loop): loop
        for loop in (
            *(grad_scaler, grad_scaler_in_a_fused_step, averaged_model, several_optimizers, a_model_of_two_handles),
            *(checkpointed, normalised, joined, converted_in_between, schedulers, compiled),
        )
    },
}
WHOLE = {
    "compiled": "code was compiled",
    "counting": "two half steps of Counting",
    "hooked": "step hooks",
    "grad_scaler_in_a_fused_step": "a GradScaler unscales",
}
"""Scripts whose optimizer cannot step bucket by bucket, and what the warning says."""


def run_both(name: str) -> tuple[list[str], list[str], list[str]]:
    """What each schedule ends with, and what was warned of."""
    ends = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for schedule in ("pipelined", "backward"):
            ends.append([digest([tensor]) for tensor in _run(SCRIPTS[name], schedule)])
    return ends[0], ends[1], [str(warning.message) for warning in caught]


def _run(script: Script, schedule: str) -> Iterator[torch.Tensor]:
    handles: list[tuple[nn.Module, gw.Handle]] = []

    def parallelize(model: nn.Module, optimizer: Any) -> gw.Handle:
        handles.append((model, gw.parallelize(model, optimizer, plan=policy(PLAIN, schedule))))
        return handles[-1][1]

    yield from (tensor.detach().clone() for tensor in script(parallelize))
    for model, handle in handles:
        handle.detach()
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        yield from (parameter.detach() for parameter in model.parameters())


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_see_what_they_see_in_the_backward_schedule(worlds: Worlds, name: str) -> None:
    for pipelined, backward, told in worlds.run(2, run_both, name):
        assert pipelined == backward
        schedule = [text for text in told if "pipelined schedule" in text]
        assert [WHOLE[name] in text for text in schedule] == [True] if name in WHOLE else not schedule


def close_and_detach() -> tuple[str, bool, list[str]]:
    training = Training(lambda model, optimizer: gw.parallelize(model, optimizer, plan=policy(PLAIN, "pipelined")))
    torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    training.step(0)
    training.step(1)
    try:
        training.optimizer.step(lambda: 0.0)
    except gw.StepStateError as error:
        told = str(error)
    training.backward(2)
    training.handle.detach()
    local = [parameter.grad is not None for parameter in training.model.parameters()]
    training.optimizer.step()
    loss_of(training.model, dist.get_rank()).backward()
    training.optimizer.step()
    return told, any(local), [digest(training.model.parameters())]


def test_a_closure_is_refused_and_detach_ends_it(worlds: Worlds) -> None:
    (told, gradients, first), (_, _, second) = worlds.run(2, close_and_detach)
    assert "SGD.step was called with a closure" in told
    assert gradients
    assert first != second, "after detach ranks train alone"
