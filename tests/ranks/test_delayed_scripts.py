"""What scripts do around delayed steps: looking at weights, changing them, schedulers, penalties, statistics, and refusals."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_steps import Reference, gradient, momentum
from test_delayed import STEPS, make_model
from threads import Threads, built, here
from torch import nn
from torch.optim.swa_utils import AveragedModel
from worlds import Worlds, digest, seeded

import gradwire as gw
from gradwire.engine.torch_hooks.splitting import why_at_once

EXACT = gw.Uniform(gw.Identity(), schedule=gw.Delayed(k=3))
EVAL = [torch.randn(4, 6, generator=seeded(99))]


class Run:
    """Training, with something done in every step."""

    def __init__(self, plan: Any = EXACT) -> None:
        self.model = make_model()
        self.optimizer = momentum(self.model.parameters())
        self.handle = gw.parallelize(self.model, self.optimizer, plan=plan, process_group=here.group)

    def end(self) -> str:
        weights = digest(self.model.state_dict().values())
        self.handle.detach()
        return weights


def evaluate(run: Run, model: torch.nn.Module | None = None) -> str:
    model = model or run.model
    model.eval()
    with torch.no_grad():
        found = digest([model(EVAL[0])])
    model.train()
    return found


def validate_in_training_mode(run: Run) -> str:
    with torch.no_grad():
        return digest([run.model(EVAL[0])])


def weight_average(run: Run) -> str:
    if not hasattr(run, "average"):
        run.average = AveragedModel(run.model)  # type: ignore[attr-defined]
    run.average.update_parameters(run.model)  # type: ignore[attr-defined]
    return digest(run.average.module.state_dict().values())  # type: ignore[attr-defined]


LOOKS: dict[str, Callable[[Run], str]] = {
    "eval": evaluate,
    "no_grad forward": validate_in_training_mode,
    "deepcopy": lambda run: digest(copy.deepcopy(run.model).state_dict().values()),
    "average": weight_average,
    "an outer module": lambda run: evaluate(run, nn.Sequential(run.model)),
    "norms": lambda run: digest([torch.stack([p.norm() for p in run.model.parameters()])]),
    "the optimizer": lambda run: digest(s["momentum_buffer"] for s in run.optimizer.state_dict()["state"].values()),
}


def looking(name: str) -> tuple[list[str], str, str]:
    """What was seen after each step, and the end with and without looking."""
    looked, blind = Run(), Run()
    seen = []
    for step in range(5):
        for run in (looked, blind):
            gradient(run.model, step, here.rank)
            run.optimizer.step()
            run.optimizer.zero_grad()
        seen.append(LOOKS[name](looked))
    return seen, looked.end(), blind.end()


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_sees_the_global_weights_and_changes_nothing(threads: Threads, name: str) -> None:
    (seen, looked, blind), (other, *_) = threads.run(2, looking, name)
    assert seen == other and len(set(seen)) == 5
    assert looked == blind


def clamp(run: Run, step: int) -> None:
    for parameter in run.model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def load_again(run: Run, step: int) -> None:
    if step == 3:
        run.model.load_state_dict(make_model().state_dict())


def changing(change: Callable[[Run, int], None]) -> tuple[list[float], str, bool]:
    """The largest weight after each change, W at the end, and whether the step after it computed on W."""
    run, largest, on_global = Run(), [], True
    for step in range(6):
        gradient(run.model, step, here.rank)
        run.optimizer.step()
        run.optimizer.zero_grad()
        change(run, step)
        weights = run.model.state_dict()
        largest.append(max(value.abs().max().item() for value in weights.values()))
        if step == 3:
            before = digest(weights.values())
            run.model(EVAL[0])
            on_global = digest(layer for m in (run.model[0], run.model[2]) for layer in (m.weight, m.bias)) == before
    return largest, run.end(), on_global


@pytest.mark.parametrize("change", [clamp, load_again])
def test_what_a_script_does_to_the_weights_counts(threads: Threads, change: Any) -> None:
    (largest, weights, on_global), (_, other, _) = threads.run(2, changing, change)
    assert weights == other and on_global
    if change is clamp:
        assert max(largest) <= torch.tensor(0.3).item()


def through_a_list(flushes: bool) -> tuple[bool, list[str]]:
    """Whether weights count that a script changes after a step through a list of its own, and what was warned of."""
    run = Run()
    parameters = list(run.model.parameters())
    gradient(run.model, 0, here.rank)
    run.optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if flushes:
            run.handle.flush()
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        kept = not any(parameter.any() for parameter in run.model.parameters())
    run.handle.detach()
    return kept, [str(each.message) for each in caught]


@pytest.mark.parametrize("flushes", [True, False])
def test_a_change_through_a_list_counts_after_a_flush(threads: Threads, flushes: bool) -> None:
    """Without one the list holds this rank's own weights."""
    ((kept, told),) = threads.run(1, through_a_list, flushes)
    assert kept == flushes
    assert ["call handle.flush() before the change" in words for words in told] == [True] * (not flushes)


def beside_the_step(what: str) -> tuple[str, str]:
    """Things done between a step's forward and its end, and W without them."""
    ends = []
    for doing in (True, False):
        run = Run()
        for step in range(4):
            generator = seeded(step, here.rank)
            output = run.model(torch.randn(5, 6, generator=generator))
            if doing and what == "no_grad forward":
                with torch.no_grad():
                    run.model(EVAL[0])
            loss = output.square().mean()
            if doing and what == "norm":
                sum(p.detach().norm() for p in run.model.parameters())
            loss.backward()
            if doing and what == "clip":
                assert torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e9) > 0
            if doing and what == "save before the step":
                run.model.state_dict()
            run.optimizer.step()
            run.model.zero_grad()
        ends.append(run.end())
    return ends[0], ends[1]


@pytest.mark.parametrize("what", ["no_grad forward", "norm", "clip", "save before the step"])
def test_what_is_done_inside_a_step_changes_nothing(threads: Threads, what: str) -> None:
    for with_it, without in threads.run(2, beside_the_step, what):
        assert with_it == without


def clipped() -> tuple[int, list[int], bool]:
    """Bytes of the model, bytes of weights beside it after each clip inside a step, and whether gradients were clipped."""
    run = Run()
    nbytes, beside, right = sum(parameter.nbytes for parameter in run.model.parameters()), [], True
    for step in range(4):
        gradient(run.model, step, here.rank)
        run.handle.clip_grad_norm_(0.01)
        beside.append(run.handle.stats().memory.weight_bytes)
        grads = [layer.weight.grad for layer in (run.model[0], run.model[2])]
        right &= float(torch.nn.utils.get_total_norm(grads)) < 0.0101
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.end()
    return nbytes, beside, right


def test_a_clip_does_not_end_the_exchange_under_way(threads: Threads) -> None:
    """It needs no other rank, and no copy of the weights."""
    for nbytes, beside, right in threads.run(2, clipped):
        assert beside == [nbytes] * 4 and right


def penalty() -> list[str]:
    run = Run()
    for step in range(4):
        output = run.model(torch.randn(5, 6, generator=seeded(step, here.rank)))
        (output.square().mean() + 0.01 * sum(p.square().sum() for p in run.model.parameters())).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    return [run.end()]


def compared_often() -> list[str]:
    """What is warned of in steps whose weights are compared each time."""
    model = make_model()
    optimizer = momentum(model.parameters())
    plan = gw.Uniform(gw.QSGD(bits=4), schedule="delayed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = gw.parallelize(model, optimizer, plan=plan, drift_check_steps=1)
        for number in range(6):
            optimizer.zero_grad()
            model(torch.full((2, 6), float(number + here.rank))).sum().backward()
            optimizer.step()
        handle.detach()
    return [str(each.message) for each in caught]


def test_weights_of_a_rank_alone_are_not_compared_with_others(worlds: Worlds) -> None:
    assert worlds.run(2, compared_often) == [[], []]


def test_a_penalty_is_of_the_weights_that_the_step_computes_on(threads: Threads) -> None:
    def with_penalty(model: nn.Module, step: int, rank: int) -> None:
        output = model(torch.randn(5, 6, generator=seeded(step, rank)))
        (output.square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()

    expected = Reference(EXACT.schedule, make_model, momentum, with_penalty, 2)  # type: ignore[arg-type]
    expected.run(4)
    assert threads.run(2, penalty) == [[digest(expected.history[-1])]] * 2


def scheduled(before: bool) -> tuple[str, list[str]]:
    model = make_model()
    optimizer = momentum(model.parameters())
    made = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)] if before else []
    handle = gw.parallelize(model, optimizer, plan=EXACT, process_group=here.group)
    scheduler = made[0] if before else torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            gradient(model, step, here.rank)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    weights = digest(model.state_dict().values())
    handle.detach()
    return weights, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("before", [True, False])
def test_rates_of_a_scheduler_are_those_of_the_step(worlds: Worlds, before: bool) -> None:
    expected = Reference(EXACT.schedule, make_model, momentum, gradient, 2)  # type: ignore[arg-type]

    def halve(step: int) -> None:
        expected.optimizer.param_groups[0]["lr"] = 0.3 * 0.5 ** (step // 2)

    expected.run(STEPS, halve)
    assert worlds.run(2, scheduled, before) == [(digest(expected.history[-1]), [])] * 2


class Odd(nn.Module):
    """A normalisation, tied weights, and a branch that not all ranks use and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.none, self.tied = built(0, lambda: [nn.Linear(6, 6) for _ in range(4)])
        self.norm = nn.BatchNorm1d(6)
        self.tied.weight = self.first.weight

    def forward(self, inputs: torch.Tensor, branch: bool) -> torch.Tensor:
        hidden = self.norm(self.tied(self.first(inputs)))
        return self.some(hidden) if branch else hidden  # type: ignore[no-any-return]


def odd() -> tuple[list[str], list[str], bool]:
    model = Odd()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    plan = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=4)), schedule="delayed")
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    rank, shown, buffers = here.rank, [], []
    unused = model.none.weight.detach().clone()
    for step in range(6):
        for part in range(2):  # gradients of two batches are added up
            model(torch.randn(8, 6, generator=seeded(step, part, rank)), branch=rank == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = model.state_dict()
        shown.append(digest(value for name, value in state.items() if "norm.run" not in name))
        buffers.append(digest([state["norm.running_mean"], state["norm.running_var"], state["norm.num_batches_tracked"]]))
    same = torch.equal(unused, model.none.weight) and model.none.weight not in optimizer.state
    handle.detach()
    return shown, buffers, same


def test_buffers_are_rank_0s_and_unused_parameters_stay(threads: Threads) -> None:
    (shown, buffers, same), (other, others, _) = threads.run(2, odd)
    assert shown == other and len(set(shown)) == 6
    assert buffers == others and len(set(buffers)) == 6
    assert same


def refused(what: str) -> str:
    model = make_model()
    optimizer: Any = momentum(model.parameters())
    plan: Any = EXACT
    if what == "two optimizers":
        optimizer = [momentum(model[0].parameters()), momentum(model[2].parameters())]
    if what == "foreign parameters":
        optimizer = momentum([*model.parameters(), nn.Parameter(torch.ones(3))])
    if what == "Adadelta":
        optimizer = torch.optim.Adadelta(model.parameters())
    if what == "no optimizer":
        optimizer = None
    if what == "momentum of the spec":
        optimizer, plan = torch.optim.SGD(model.parameters(), lr=0.1), gw.Uniform(gw.DGC(0.5), schedule="delayed")
    with pytest.raises((gw.PlanError, gw.StepStateError)) as caught:
        handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        try:
            model(EVAL[0]).sum().backward()
            if what == "a closure":
                optimizer.step(lambda: None)
            if what == "a fused scaler":
                optimizer.grad_scale = torch.ones(())
                optimizer.step()
        finally:
            handle.detach()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("two optimizers", "2 optimizers were passed"),
        ("foreign parameters", "steps 1 tensors that are none of the model's"),
        ("Adadelta", "for Adadelta such a step is not known"),
        ("no optimizer", "no optimizer was passed"),
        ("momentum of the spec", "sends gradients with momentum, and corrections"),
        ("a closure", "with a closure"),
        ("a fused scaler", "GradScaler"),
    ],
)
def test_what_cannot_be_delayed_is_refused(threads: Threads, what: str, words: str) -> None:
    for told in threads.run(2, refused, what):
        assert words in told


def steps_of_another(schedule: gw.Delayed, passed_first: bool) -> str:
    model = make_model()
    passed, other = momentum(model[0].parameters()), momentum(model[2].parameters())
    plan = gw.Uniform(gw.Identity(), schedule=schedule)
    handle = gw.parallelize(model, passed, plan=plan, process_group=here.group)
    gradient(model, 0, here.rank)
    with pytest.raises(gw.StepStateError) as caught:
        for optimizer in (passed, other) if passed_first else (other, passed):
            optimizer.step()
    assert "'2.weight'" in handle.session.why_not(handle.session.plan), "plan='auto' would try it"
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize("schedule", [gw.Delayed(k=3), gw.Delayed(k=None, local_update=False)], ids=["CD-SGD", "BIT-SGD"])
@pytest.mark.parametrize("passed_first", [False, True])
def test_a_step_of_what_the_passed_optimizer_lacks_is_refused(threads: Threads, schedule: gw.Delayed, passed_first: bool) -> None:
    for words in threads.run(2, steps_of_another, schedule, passed_first):
        assert words.startswith("SGD steps '2.weight', which no optimizer that was passed has: the delayed schedule counts")
        assert "several param_groups" in words


def past_the_schedule(taken: str) -> tuple[str, str, int]:
    """What a step raises that was taken before the schedule began, why steps are not split then, and the steps after detach()."""
    model = make_model()
    optimizer = momentum(model.parameters())
    step = optimizer.step
    if taken == "under an earlier handle":
        earlier = gw.parallelize(model, optimizer, plan=EXACT, process_group=here.group)
        step = optimizer.step
        earlier.detach()
    if taken == "compiled":
        step = torch.compile(optimizer.step, backend="eager")
    handle = gw.parallelize(model, optimizer, plan=EXACT, process_group=here.group)
    step()  # there is no gradient, and nothing to send
    before = digest(model.state_dict().values())
    gradient(model, 0, here.rank)
    with pytest.raises(gw.StepStateError) as caught:
        step()
    assert digest(model.state_dict().values()) == before
    why = why_at_once(optimizer)
    handle.detach()
    step()
    assert digest(model.state_dict().values()) != before
    return str(caught.value), why, len(optimizer._optimizer_step_pre_hooks)


@pytest.mark.parametrize("taken", ["before", "under an earlier handle"])
def test_a_step_that_was_taken_before_is_refused(threads: Threads, taken: str) -> None:
    """Else ranks would train on, and exchange nothing."""
    for words, *others in threads.run(2, past_the_schedule, taken):
        assert words.startswith("SGD.step was taken or compiled before the delayed schedule began, and steps '0.weight' past")
        assert others == ["", 0]


def test_a_step_that_was_compiled_before_is_refused(worlds: Worlds) -> None:
    for words, *_ in worlds.run(2, past_the_schedule, "compiled"):
        assert "taken or compiled before the delayed schedule began" in words


def test_detach_leaves_an_ordinary_model(threads: Threads) -> None:
    assert threads.run(1, detached) == [True]


def detached() -> bool:
    model, bare = make_model(), make_model()
    optimizer = momentum(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=EXACT, process_group=here.group)
    gradient(model, 0, 0)
    optimizer.step()
    handle.detach()
    return [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in bare.modules()] and (
        "step" not in vars(optimizer) and "state_dict" not in vars(optimizer)
    )


def looked_before_backward() -> str:
    run = Run()
    gradient(run.model, 0, here.rank)
    run.optimizer.step()
    run.optimizer.zero_grad()
    loss = run.model(EVAL[0]).square().mean()
    run.model.state_dict()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    run.handle.reset()
    run.handle.detach()
    return str(caught.value)


def test_weights_that_a_backward_needs_are_not_changed_under_it(threads: Threads) -> None:
    for words in threads.run(2, looked_before_backward):
        assert "modified by an inplace operation" in words
