"""Optimizers that are not built as torch's are, and what scripts do to weights at odd moments."""

import copy
import gc
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from threads import Threads, built, here
from torch import nn
from worlds import Given, Worlds, digest, seeded

import gradwire as gw
from gradwire.engine.torch_hooks.optimizer_step import Stepping, is_replaced
from gradwire.engine.torch_hooks.splitting import elementwise, splits, why_whole

pytestmark = pytest.mark.filterwarnings("ignore:.*only its shard")

EXACT = gw.Identity()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


class CountsInGroups(torch.optim.Optimizer):
    """Momentum with a bias correction by a count that its groups keep, as fused optimizers of other libraries do."""

    def __init__(self, parameters: Any, lr: float = 0.1, tensor: bool = False) -> None:
        count: Any = torch.tensor(0.0) if tensor else 0
        super().__init__(parameters, {"lr": lr, "count": count})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.1)
                    parameter -= group["lr"] / (1 - 0.9 ** float(group["count"])) * mean


class GlobalNorm(torch.optim.SGD):
    """Scales by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient /= norm
        super().step()


class Around(torch.optim.Optimizer):
    """Holds the optimizer that does the work, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


SCHEDULES = {
    "backward": gw.Uniform(EXACT),
    "pipelined": gw.Uniform(EXACT, schedule="pipelined"),
    "sharded": gw.Uniform(EXACT, schedule=gw.Pipelined(shard_optimizer=True)),
    "BIT-SGD": gw.Uniform(EXACT, schedule=gw.Delayed(k=None, local_update=False)),
}


def train(
    plan: gw.Policy,
    make: Callable[[Any], torch.optim.Optimizer],
    steps: int = 6,
    after: Callable[..., None] | None = None,
) -> tuple[Given, torch.optim.Optimizer, gw.Handle]:
    model = Given([300, 40, 9], seed=0)
    optimizer = make(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    for number in range(steps):
        optimizer.zero_grad()
        model(model.random_gradients(number, here.rank)).backward()
        optimizer.step()
        if after is not None:
            after(number, model, optimizer, handle)
    handle.flush()
    return model, optimizer, handle


def count_in_groups(name: str, tensor: bool) -> tuple[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pipelined schedule says that it steps all at once
        model, optimizer, handle = train(SCHEDULES[name], lambda parameters: CountsInGroups(parameters, tensor=tensor))
    handle.detach()
    return digest(model.parameters()), float(optimizer.param_groups[0]["count"])


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "backward"])
def test_counts_in_groups_go_on(threads: Threads, name: str, tensor: bool) -> None:
    expected = threads.run(2, count_in_groups, "backward", tensor)
    assert threads.run(2, count_in_groups, name, tensor) == expected
    assert expected[0][1] == 6.0


def fused(name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where a part of a step may round otherwise, all is stepped at once
        model, _, handle = train(SCHEDULES[name], lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True))
    handle.detach()
    return digest(model.parameters())


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "backward"])
def test_fused_optimizers_step_as_in_backward(threads: Threads, name: str) -> None:
    assert threads.run(2, fused, name) == threads.run(2, fused, "backward")


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(20, 20)), torch.nn.Parameter(torch.ones(20))]


def test_a_rate_of_zero_at_first_hides_nothing_from_the_trials() -> None:
    for rate in (0.0, 1e-2):
        assert not elementwise(torch.optim.Adafactor(parameters(), lr=rate))
        assert not splits(GlobalNorm(parameters(), lr=rate))
        assert splits(torch.optim.AdamW(parameters(), lr=rate)) and elementwise(torch.optim.SGD(parameters(), lr=rate))
    rate = torch.tensor(0.0)
    assert splits(torch.optim.Adam(parameters(), lr=rate, foreach=False, capturable=False)) and rate == 0


def test_a_trial_in_which_nothing_moves_shows_nothing() -> None:
    assert not splits(Around(torch.optim.SGD(parameters(), lr=0.1)))
    assert not elementwise(Around(torch.optim.SGD(parameters(), lr=0.1)))


def steps_while_another_job_ends() -> bool:
    """Whether that job had lost its schedule, as in a thread that ends while another one steps."""
    model = built(0, lambda: nn.Linear(3, 2))
    handle = gw.parallelize(model, torch.optim.SGD(model.parameters()), plan=EXACT, process_group=here.group)
    watch = handle.session._script
    handle.detach()
    del handle, model
    gc.collect()
    watch.before_step(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    return watch._reducer._schedule() is None


def test_a_step_of_another_model_asks_nothing_of_a_job_that_ends(threads: Threads) -> None:
    assert all(threads.run(2, steps_while_another_job_ends))


def test_a_step_that_was_replaced_is_not_cut() -> None:
    def clips_first(optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        type(optimizer).step(optimizer)

    class Owner:
        def act(self, optimizer: Any, whole: Any) -> Any:
            return whole()

    owner = Owner()
    for replaced in (False, True):
        optimizer = torch.optim.SGD(parameters(), lr=0.1)
        if replaced:
            optimizer.step = types.MethodType(clips_first, optimizer)  # type: ignore[method-assign]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        stepping = Stepping([optimizer], owner.act)
        torch.optim.lr_scheduler.StepLR(optimizer, 7)
        assert is_replaced(optimizer) is replaced, scheduler
        assert ("stands in place of SGD.step" in why_whole(optimizer, None, 0)) is replaced
        stepping.remove()


def renormed(name: str) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    model = torch.nn.Embedding(6, 8, max_norm=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = gw.parallelize(model, optimizer, plan=SCHEDULES[name])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.arange(6)).square().sum().backward()
            optimizer.step()
        handle.flush()
    handle.detach()
    return float(model.weight.norm(dim=1).max()), [str(each.message) for each in caught if "was changed" in str(each.message)]


def test_weights_that_forward_changes_are_warned_of_where_they_are_lost(worlds: Worlds) -> None:
    for name in ("backward", "pipelined"):
        assert worlds.run(2, renormed, name) == [(pytest.approx(0.5, abs=0.05), [])] * 2
    for _, said in worlds.run(2, renormed, "BIT-SGD"):
        assert len(said) == 1 and "'weight'" in said[0] and "max_norm" in said[0]


def correct_with_power_sgd(resumed: bool) -> tuple[list[int], str]:
    spec = gw.PowerSGD(rank=1, start_step=4)
    plan = gw.Uniform(gw.QSGD(bits=4), schedule=gw.Delayed(k=2, correction=spec))
    model = built(0, lambda: torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    sent = []

    def steps(numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=seeded(number, here.rank))).square().sum().mul(1e-3).backward()
            optimizer.step()
            handle.flush()
            corrected = handle.session.schedule._corrections._corrected  # type: ignore[attr-defined]
            sent.append(sum(sum(chunk.bytes_to) for bucket in corrected._buckets for chunk in bucket.chunks))

    steps(range(9))
    if resumed:
        state = copy.deepcopy([model.state_dict(), optimizer.state_dict(), handle.state_dict()])
        handle.detach()
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        for each, saved in zip((model, optimizer, handle), state, strict=True):
            each.load_state_dict(saved)
    steps(range(9, 14))
    told = sent, digest(model.parameters())
    handle.detach()
    return told


def test_a_correction_whose_spec_changes_with_the_step_does(threads: Threads) -> None:
    first, second = threads.run(2, correct_with_power_sgd, False)
    sent = first[0]
    assert first == second
    assert sent[0] == sent[2] and sent[-1] < sent[0] / 4
    assert threads.run(2, correct_with_power_sgd, True)[0][1] == first[1], "a resumed run is another one"


def keep_state() -> tuple[set[float], set[float]]:
    kept: list[Any] = []

    def after(number: int, model: Given, optimizer: torch.optim.Optimizer, handle: gw.Handle) -> None:
        if number == 1:
            kept.append(handle.optimizer_state_dict())

    _, _, handle = train(SCHEDULES["sharded"], lambda parameters: torch.optim.Adam(parameters, lr=0.01), after=after)
    last = handle.optimizer_state_dict()
    handle.detach()
    return tuple({float(each["step"]) for each in state["state"].values()} for state in (kept[0], last))  # type: ignore[return-value]


def test_a_state_of_shards_that_is_kept_stays_as_it_was(threads: Threads) -> None:
    assert threads.run(2, keep_state) == [({2.0}, {6.0})] * 2


LOOKED_AT = {"delayed": gw.Delayed(k=None), "local": gw.LocalSteps(every=1, outer=gw.Nesterov(), delay=1)}


def look(name: str, mode: str) -> str:
    """What the last step left to do is done in an evaluation."""

    def after(number: int, model: Given, optimizer: torch.optim.Optimizer, handle: gw.Handle) -> None:
        if number == 0:
            with getattr(torch, mode)():
                model.eval()
                model(model.random_gradients(99))
            model.train()

    plan = SCHEDULES.get(name) or gw.Uniform(EXACT, schedule=LOOKED_AT[name])
    model, _, handle = train(plan, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), after=after)
    handle.detach()
    return digest(model.parameters())


@pytest.mark.parametrize("name", [*SCHEDULES, *LOOKED_AT])
def test_an_evaluation_in_inference_mode_after_the_first_step(threads: Threads, name: str) -> None:
    assert threads.run(2, look, name, "inference_mode") == threads.run(2, look, name, "no_grad")


def append() -> tuple[bool, str]:
    model = built(0, lambda: torch.nn.Sequential(torch.nn.Linear(6, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gw.Uniform(EXACT, schedule=gw.Delayed(k=None))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=seeded(number, here.rank))).square().sum().backward()
        optimizer.step()

    for number in range(3):
        step(number)
    model.append(built(1, lambda: torch.nn.Linear(6, 6)))
    optimizer.add_param_group({"params": model[-1].parameters()})
    for number in range(3, 6):
        step(number)
    own = {name: value.clone() for name, value in model[-1].state_dict().items()}
    whole = model.state_dict()
    same = all(torch.equal(value, whole[f"1.{name}"]) for name, value in own.items())
    handle.detach()
    return same, digest(own.values())


def test_a_module_that_was_added_shows_global_weights_too(threads: Threads) -> None:
    first, second = threads.run(2, append)
    assert first == second and first[0]


def test_optimizers_are_tried_under_another_default_device() -> None:
    torch.set_default_device("meta")
    try:
        matrix = torch.nn.Parameter(torch.ones(20, 20, device="cpu"))
        optimizer = torch.optim.SGD([matrix], lr=0.1, momentum=0.9)
        assert splits(optimizer) and elementwise(optimizer)
    finally:
        torch.set_default_device(None)
