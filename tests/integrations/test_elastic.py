"""Members that come and go, with torchft's lighthouse and real processes: one is killed and restarted."""

import copy
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from crowd import START_S, Crowd, Member
from elastic_member import TIMEOUT_S
from interpreters import Interpreters
from local_steps import lower_plainly
from loss_scales import scaled_steps, unscaled
from threads import Threads, built, here
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from worlds import Given, digest

import gradwire as gw
from gradwire.engine import REGISTRY, Keeps, kept_nodes, prepare
from gradwire.exchange import Exchange
from gradwire.integrations import member_state, quorum, torchft
from gradwire.integrations.gradient_means import GradientMeans
from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.local_rounds import LocalRounds
from gradwire.integrations.member_watch import LighthouseLine
from gradwire.integrations.members import Members
from gradwire.integrations.outer_steps import OuterSteps
from gradwire.integrations.quorum import load_torchft

MORE = [pytest.mark.slow, pytest.mark.thorough]
NINE = gw.LocalSteps(every=9)
EXAMPLE = Path(gw.__file__).parents[2] / "examples" / "elastic_train.py"


def linear() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("schedule", [gw.Pipelined(), gw.Delayed()])
def test_other_schedules_are_refused_by_name(schedule: Any) -> None:
    with pytest.raises(gw.PlanError, match=f"'{schedule.word}'"):
        gw.elastic(*linear(), plan=gw.Uniform(gw.Identity(), schedule=schedule), lighthouse="127.0.0.1:1")


@pytest.mark.parametrize("field", [{"fragments": 2}, {"steps_of_ranks": (8, 4)}], ids=str)
def test_what_no_round_does_is_refused(field: dict[str, Any]) -> None:
    plan = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=8, **field))
    with pytest.raises(gw.PlanError, match=f"{next(iter(field))}=.*Leave"):
        gw.elastic(*linear(), plan=plan, lighthouse="127.0.0.1:1")


@pytest.mark.parametrize("wrong", [{"timeout_s": 0}, {"timeout_s": None}, {"timeout_s": float("inf")}, {"min_replicas": 0}])
def test_values_for_off_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(gw.PlanError, match=next(iter(wrong))):
        gw.elastic(*linear(), plan=gw.Identity(), lighthouse="127.0.0.1:1", **wrong)


@pytest.mark.parametrize("accuracy", ["exact", "nonsense"])
def test_an_accuracy_without_effect_is_refused(accuracy: str) -> None:
    """Only auto chooses by it."""
    with pytest.raises(gw.PlanError, match=f"accuracy.*{accuracy}"):
        gw.elastic(*linear(), plan=gw.QSGD(bits=4), accuracy=accuracy, lighthouse="127.0.0.1:1")


def test_without_an_address_it_says_what_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(gw.StepStateError, match="gradwire lighthouse"):
        gw.elastic(*linear(), plan=gw.Identity())


@pytest.mark.parametrize(("given", "then"), [(None, "error"), ("info", "info")])
def test_the_log_of_torchft_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, given: str | None, then: str) -> None:
    monkeypatch.delenv("RUST_LOG", raising=False)
    if given is not None:
        monkeypatch.setenv("RUST_LOG", given)
    load_torchft()
    assert os.environ["RUST_LOG"] == then


class Nobody:
    """Takes the place of the members of a job."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def leave(self) -> None: ...


def test_a_model_has_one_job_which_lives_as_long_as_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft, "Members", Nobody)
    model, optimizer = linear()
    options: dict[str, Any] = {"plan": gw.Identity(), "lighthouse": "127.0.0.1:1"}
    job = weakref.ref(gw.elastic(model, optimizer, **options))
    gc.collect()
    assert job() is not None, "the hooks of a job that is gone average nothing"
    with pytest.raises(gw.StepStateError, match="averaged twice"):
        gw.elastic(model, optimizer, **options)
    assert not any(isinstance(each, Keeps) for each in vars(copy.deepcopy(model)).values())
    first = job()
    first.leave()
    second = gw.elastic(model, optimizer, **options)
    first.leave()
    with pytest.raises(gw.StepStateError, match="averaged twice"):
        gw.elastic(model, optimizer, **options)
    second.leave()


@pytest.mark.parametrize("schedule", [gw.Backward(), NINE], ids=lambda each: each.word)
@pytest.mark.parametrize("wrong", ["address", "members", "object"])
def test_a_job_that_does_not_begin_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch, schedule: Any, wrong: str) -> None:
    """An error that the script keeps holds the hooks, which would wait for members."""

    def refuse(*_: Any, **__: Any) -> None:
        raise gw.PlanError("no members")

    if wrong == "members":
        monkeypatch.setattr(torchft, "Members", refuse)
    model, optimizer = linear()
    options: dict[str, Any] = {"lighthouse": "nowhere" if wrong == "address" else "127.0.0.1:1"}
    if wrong == "object":
        options["also"] = [SimpleNamespace(state_dict=lambda: {"lock": threading})]
    with pytest.raises(gw.PlanError) as kept:
        gw.elastic(model, optimizer, plan=gw.Uniform(gw.Identity(), schedule=schedule), **options)
    for _ in range(NINE.every):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert kept.value is not None and not model._forward_pre_hooks


def test_a_model_with_a_handle_is_refused() -> None:
    model, optimizer = linear()
    REGISTRY.add(model, model.parameters(), None)
    with pytest.raises(gw.StepStateError, match="detach"):
        gw.elastic(model, optimizer, plan=gw.Identity(), lighthouse="127.0.0.1:1")


def test_a_model_of_a_job_gets_no_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft, "Members", Nobody)
    model, optimizer = linear()
    job = gw.elastic(model, optimizer, plan=gw.Identity(), lighthouse="127.0.0.1:1")
    with pytest.raises(gw.StepStateError, match=r"averaged twice.*leave\(\)"):
        prepare(model, gw.Identity(), 2)
    job.leave()
    prepare(model, gw.Identity(), 2)


def test_states_of_optimizers_in_another_order_are_refused() -> None:
    """The state of an optimizer has numbers in place of names, so another one of the same size would take it without a word."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    both = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in model]
    model(torch.ones(1, 3)).sum().backward()
    for each in both:
        each.step()
    state = member_state.state_of(model, (), both).save()
    member_state.state_of(model, (), both).load(state)
    with pytest.raises(
        gw.DisagreementError, match=r"SGD of \[\['0.weight', '0.bias'\]\], and this one has SGD of \[\['1.weight'"
    ):
        member_state.state_of(model, (), both[::-1]).load(state)
    with pytest.raises(gw.DisagreementError, match="has nothing in its place"):
        member_state.state_of(model, (), both[:1]).load(state)


def test_learning_rates_of_numpy_reach_joiners_as_numbers() -> None:
    """Joiners unpickle nothing, and numpy's numbers are objects of numpy."""
    model, optimizer = linear()
    half = np.float64(0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: half)
    state = member_state.state_of(model, (), [optimizer, scheduler])
    of_optimizer, of_scheduler = from_bytes(to_bytes(state.save()))["others"]
    assert [type(each) for each in (of_optimizer["param_groups"][0]["lr"], *of_scheduler["_last_lr"])] == [float, float]
    assert of_optimizer["param_groups"][0]["lr"] == optimizer.param_groups[0]["lr"] == 0.05


def test_milestones_of_numpy_reach_joiners_as_numbers() -> None:
    model, optimizer = linear()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(np.array([2, 4, 4])))
    state = member_state.state_of(model, (), [optimizer, scheduler])
    milestones = from_bytes(to_bytes(state.save()))["others"][1]["milestones"]
    assert milestones == scheduler.milestones == Counter({2: 1, 4: 2}) and type(milestones) is Counter
    assert {type(each) for each in milestones} == {int}


class Strange:
    """Has a state that nobody reads without unpickling."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [torch.ones(3), self.value]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.ones(3), r"is array\(\[1., 1., 1.\]\), a numpy.ndarray"),
        (Path("a"), r"is PosixPath\('a'\), a pathlib.*PosixPath"),
        (len, "is .*, a builtins.builtin_function_or_method"),
        (lambda: 0, "is .*, a builtins.function"),
        (Counter({Path("a"): 1, "b": 2}), r"\.keys\(\) is PosixPath\('a'\), a pathlib.*PosixPath"),
        ({"b": (1, {"c": np.ones(3)})}, r"\['b'\]\[1\]\['c'\] is array"),
    ],
)
def test_a_state_that_no_joiner_reads_is_refused_at_the_start(value: Any, words: str) -> None:
    """Every joiner would end, and the member that is left would wait for others."""
    with pytest.raises(gw.PlanError, match=r"the state of Strange\['seen'\]\[1\] ?" + words):
        gw.elastic(*linear(), plan=gw.Identity(), lighthouse="127.0.0.1:1", also=[Strange(value)])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.nn.BatchNorm1d(1, affine=False), r"float32 of shape \[3\] for the tensor 'running_mean'.*this one has .*\[1\]"),
        (torch.nn.BatchNorm1d(3, affine=False).double(), "float32 .* this one has torch.float64"),
        (torch.nn.BatchNorm1d(3), "sent nothing for the tensor 'bias'"),
        (torch.nn.Identity(), "for the tensor 'num_batches_tracked' of the model, and this one has nothing"),
    ],
)
def test_another_model_takes_no_state(other: torch.nn.Module, words: str) -> None:
    state = member_state.state_of(torch.nn.BatchNorm1d(3, affine=False), (), []).save()
    before = {name: each.clone() for name, each in other.state_dict().items()}
    with pytest.raises(gw.DisagreementError, match=words):
        member_state.state_of(other, (), []).load(state)
    assert all(torch.equal(each, before[name]) for name, each in other.state_dict().items())


def test_without_torchft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    with pytest.raises(gw.PlanError, match=r"pip install .torchft>=0\.2"):
        gw.elastic(*linear(), plan=gw.Identity(), lighthouse="127.0.0.1:1")


class RefusedExchange(Exchange):
    """An exchange of one tensor, whose steps other members never end."""

    def __init__(self, names: list[str]) -> None:
        self.slots, self.sent = {name: name for name in names}, set()  # type: ignore[assignment,misc]
        self.plan = gw.Uniform(gw.Identity()).plan([gw.TensorInfo("a", (1,), "float32")])

    def ready(self, what: Any, tensor: Any = None) -> None:
        self.sent.add(what)


class RefusingMembers:
    """Members of whom no step counts."""

    factor = 1.0

    def __init__(self, names: list[str]) -> None:
        self.committed, self.begun, self.lost, self._exchange = 0, 0, 0, RefusedExchange(names)

    def meet(self) -> Exchange:
        return self._exchange

    def begin(self, exchange: Exchange) -> None:
        self.begun += 1
        exchange.sent.clear()

    def end(self, exchange: Exchange) -> bool:
        return False

    def commit(self) -> None:
        self.committed += 1


def test_a_grad_scaler_goes_on_after_a_step_that_does_not_count() -> None:
    model, optimizer = linear()
    named = dict(model.named_parameters())
    means, members = GradientMeans(model, named, [optimizer]), RefusingMembers(list(named))
    means.begin(members)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = {name: each.detach().clone() for name, each in named.items()}
    scaler.scale(model(torch.randn(4, 3)).square().mean()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(each, before[name]) for name, each in named.items())
    assert members.committed == 0 and members.lost == 1 and scaler.get_scale() == 64.0
    means.detach()


class StayingMembers:
    """All ranks are members, and every step counts."""

    parts, factor = 0, 1.0

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self.world_size = exchange, exchange.group.world_size

    def meet(self) -> Exchange:
        return self._exchange

    def begin(self, exchange: Exchange) -> None:
        exchange.begin()

    def end(self, exchange: Exchange) -> bool:
        exchange.wait()
        return True

    def commit(self) -> None:
        pass


def trained_under_scales(plan: Any, scaled: bool) -> tuple[str, str, str]:
    """Digests of the means and of what was not sent, without the scale, and the error of a backward."""
    model = built(3, lambda: Given([(40, 50), (30, 20)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    named = dict(model.named_parameters())
    members = StayingMembers(Exchange(named, gw.Policy(default=plan, exempt_vectors=False), here.group))
    means, found, words = GradientMeans(model, named, [optimizer]), list[torch.Tensor](), ""
    means.begin(members)  # type: ignore[arg-type]
    try:
        for step, scale_loss, scale in scaled_steps(scaled):
            scale_loss(model(model.random_gradients(here.rank, step))).backward()
            found += [each.grad / scale for each in named.values()]
            optimizer.step()
            optimizer.zero_grad()
    except gw.StepStateError as error:
        words = str(error)
    kept = members.meet().state_dict()
    members.meet().close()
    means.detach()
    return digest(found), digest(unscaled(kept, scaled)) if found and "residual" in str([*kept]) else "", words


@pytest.mark.parametrize(
    "spec",
    [gw.ErrorFeedback(gw.QSGD(bits=2)), gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.9)],
    ids=repr,
)
def test_residuals_follow_the_scale_of_the_loss(threads: Threads, spec: gw.Spec) -> None:
    assert threads.run(2, trained_under_scales, spec, True) == threads.run(2, trained_under_scales, spec, False)


def test_a_spec_with_a_magnitude_of_its_own_is_refused_under_a_loss_scale(threads: Threads) -> None:
    for *_, words in threads.run(2, trained_under_scales, gw.SignSGD(), True):
        assert words.startswith("a GradScaler multiplied the loss by 4096, and the plan has SignSGD")
    assert not any(words for *_, words in threads.run(2, trained_under_scales, gw.SignSGD(), False))


def test_residuals_stay_while_a_member_catches_up() -> None:
    """It takes part in steps without a backward, so it knows no scale. What all members keep alike must stay alike."""
    model, optimizer = linear()
    means, members = means_of(model, optimizer)
    factors, exchange = list[float](), members.meet()
    exchange.residuals = SimpleNamespace(follow=lambda factor, left_out: factors.append(factor))  # type: ignore[assignment]
    members.world_size = 2  # type: ignore[attr-defined]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    zeros = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    # the scale of each step, the members that train, and whether this one makes the step again
    steps = [(64.0, 2, False), (16.0, 1, False), (16.0, 2, False), (32.0, 2, False), (8.0, 1, True), (4.0, 2, False)]
    for scale, parts, is_behind in steps:
        members.parts = parts  # type: ignore[attr-defined]
        members.meet = (lambda: zeros) if is_behind else (lambda: exchange)  # type: ignore[method-assign,assignment,return-value]
        loss = model(torch.ones(1, 3)).sum()
        if scale != scaler.get_scale():
            scaler.update(scale)
        scaler.scale(loss).backward()
        optimizer.step()
    assert factors == [2.0, 0.5], "the last change is that from the step that was made again"
    means.detach()


class AgreeingMembers(RefusingMembers):
    """Members of whom every step counts, with the same gradients."""

    def end(self, exchange: Exchange) -> bool:
        return True


def means_of(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> tuple[GradientMeans, AgreeingMembers]:
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    means, members = GradientMeans(model, named, optimizers), AgreeingMembers(list(named))
    means.begin(members)  # type: ignore[arg-type]
    return means, members


@pytest.mark.parametrize("change", ["thawed", "added", "replaced"])
@pytest.mark.parametrize("schedule", ["backward", "local"])
def test_a_parameter_that_trains_later_is_refused(change: str, schedule: str) -> None:
    """It would be averaged by nobody."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(change != "thawed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if schedule == "backward":
        means, _ = means_of(model, optimizer)
    else:
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        means = LocalRounds(model, OuterSteps(named, NINE), [optimizer], NINE)  # type: ignore[assignment]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if change == "thawed":
        model[0].requires_grad_(True)
    elif change == "added":
        model.append(torch.nn.Linear(2, 2))
    else:
        model[0].weight = torch.nn.Parameter(torch.ones(3, 3))
    name = "2.weight" if change == "added" else "0.weight"
    before = model[-1].weight.detach().clone()
    with pytest.raises(gw.StepStateError, match=rf"'{name}' was thawed, added or replaced"):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(model[-1].weight, before)
    means.detach()


@pytest.mark.parametrize("schedule", ["backward", "local"])
def test_steps_of_an_optimizer_that_was_not_passed_are_refused(schedule: str) -> None:
    """No step of them counts: the job would stand still, and a joiner would not get the optimizer's state."""
    model, optimizer = linear()
    if schedule == "backward":
        means, _ = means_of(model, optimizer)
    else:
        means = LocalRounds(model, OuterSteps(dict(model.named_parameters()), NINE), [optimizer], NINE)  # type: ignore[assignment]
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(9):
        model(torch.ones(1, 3)).sum().backward()
        other.step()
    before = model.weight.detach().clone()  # type: ignore[operator]
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(gw.StepStateError, match=r"AdamW steps 'weight', and no optimizer steps that was passed: .* gw\.elastic"):
        other.step()
    assert torch.equal(model.weight, before)  # type: ignore[arg-type]
    means.detach()
    other.step()


@pytest.mark.parametrize("second_moment", ["mean", "own"])
def test_second_moments_in_rounds_are_those_of_a_mean_over_the_members(second_moment: str) -> None:
    schedule = gw.LocalSteps(every=9, second_moment=second_moment)
    model = linear()[0]
    alone = copy.deepcopy(model)
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, alone))
    means = LocalRounds(model, OuterSteps(dict(model.named_parameters()), schedule), [optimizer], schedule)
    for parts in (0, 2, 3, 3, 1):  # members that train; 0 before they have met
        members_that_met = Members.__new__(Members)
        # all of them join in the first period: no member has a part yet
        members_that_met.parts, members_that_met.world_size = (0 if parts == 2 else parts), parts
        members_that_met.exchange = object()  # type: ignore[assignment]
        means.begin(members_that_met)
        for each, own in ((model, optimizer), (alone, plain)):
            each(torch.randn(5, 3, generator=torch.Generator().manual_seed(parts))).square().sum().backward()
            own.step()
        if second_moment == "mean" and parts > 1:
            lower_plainly(plain, parts)
        model.zero_grad()
        alone.zero_grad()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[found]["exp_avg_sq"], plain.state[expected]["exp_avg_sq"])
    means.detach()


def test_a_step_that_a_scaler_leaves_out_counts_in_the_round_of_its_member() -> None:
    """Else the others would wait for this member's round."""
    schedule, (model, optimizer) = gw.LocalSteps(every=9), linear()
    means = LocalRounds(model, OuterSteps(dict(model.named_parameters()), schedule), [optimizer], schedule)
    met = Members.__new__(Members)
    met.parts, met.world_size, met.exchange = 2, 2, object()  # type: ignore[assignment]
    means.begin(met)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(torch.randn(4, 3)).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert means._local_steps == 3 and scaler.get_scale() == 32.0
    means.detach()


class SentRound(Exchange):
    """The exchange of a round, whose mean is what this member sends."""

    def __init__(self) -> None:
        self.sent: dict[str, torch.Tensor] = {}

    def ready_all(self, tensors: Any) -> None:
        self.sent = {name: each.clone() for name, each in tensors.items()}


class BreaksOff:
    """Members whom one joins. It makes a round of the others again; the next one fails, and it makes that with them."""

    factor, parts, begins = 1.0, 2, False

    def __init__(self, means: dict[str, torch.Tensor]) -> None:
        self._means, self.exchange, self.rounds = means, SentRound(), 0

    @property
    def is_behind(self) -> bool:
        return self.rounds == 1

    def meet(self) -> Any:
        return self.exchange if self.rounds else self._means

    def begin(self, exchange: Exchange) -> None: ...

    def end(self, exchange: Exchange) -> bool:
        return True

    def commit(self) -> None:
        self.rounds += 1


@pytest.mark.parametrize("mixing", [1.0, 0.5])
def test_a_joiner_that_does_not_catch_up_sends_no_outer_gradient(mixing: float) -> None:
    """It has not trained: the rounds of the others would count twice."""
    schedule, (model, optimizer) = gw.LocalSteps(every=9, mixing=mixing), linear()
    outer = OuterSteps(dict(model.named_parameters()), schedule)
    rounds = LocalRounds(model, outer, [optimizer], schedule)
    members: Any = BreaksOff({name: torch.ones_like(each) for name, each in model.named_parameters()})
    rounds.begin(members)
    rounds._round()
    assert members.rounds == 2 and sorted(members.exchange.sent) == ["bias", "weight"]
    assert not any(each.any() for each in members.exchange.sent.values())
    rounds.detach()


def test_an_optimizer_of_other_parameters_may_step_often() -> None:
    """It has the model's too, which get no gradient for its steps."""
    model, optimizer = linear()
    means, _ = means_of(model, optimizer)
    own = torch.nn.Parameter(torch.ones(3))
    other, before = torch.optim.AdamW([own, *model.parameters()], lr=0.1), model.weight.detach().clone()  # type: ignore[operator]
    for _ in range(12):
        own.sum().backward()
        other.step()
    assert torch.equal(model.weight, before)  # type: ignore[arg-type]
    means.detach()


def two() -> tuple[torch.nn.Sequential, list[torch.optim.Optimizer]]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    return model, [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]


def test_the_step_by_which_torch_makes_a_state_is_none_of_the_job() -> None:
    model, optimizer = linear()
    _, members = means_of(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert (members.begun, members.committed) == (0, 0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert (members.begun, members.committed) == (1, 1)


def test_a_closure_is_refused() -> None:
    """It computes gradients inside the step, after those of before were averaged."""
    model, optimizer = linear()
    means, members = means_of(model, optimizer)
    before = model.weight.detach().clone()  # type: ignore[union-attr,operator]
    with pytest.raises(gw.StepStateError, match="closure"):
        optimizer.step(lambda: model(torch.ones(1, 3)).sum())
    assert members.begun == 0 and torch.equal(model.weight, before)  # type: ignore[arg-type]
    means.detach()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("training", [True, False])
def test_several_optimizers_make_one_step_in_any_order(order: list[int], training: bool) -> None:
    model, optimizers = two()
    model.train(training)
    means, members = means_of(model, *optimizers)
    for steps in (1, 2, 3):
        model(torch.ones(1, 3)).sum().backward()
        for at in order:
            optimizers[at].step()
            assert members.committed == steps
        assert members.begun == steps
    means.detach()


def test_a_grad_scaler_may_skip_one_of_several_optimizers() -> None:
    model, optimizers = two()
    means, members = means_of(model, *optimizers)
    for steps, stepped in enumerate([[0, 1], [0], [0, 1], [0], [1], [0, 1]], 1):
        model(torch.ones(1, 3)).sum().backward()
        for at in stepped:
            optimizers[at].step()
        assert members.begun == members.committed == steps
    means.detach()


def test_optimizers_that_step_in_turns_are_refused() -> None:
    """A joiner that makes a step again does not know which optimizer made it."""
    model, optimizers = two()
    means, members = means_of(model, *optimizers)
    for turn in (*optimizers, optimizers[0]):
        model(torch.ones(1, 3)).sum().backward()
        turn.step()
    with pytest.raises(gw.StepStateError, match=r"in turns.*LocalSteps"):
        model(torch.ones(1, 3))
    assert members.committed == 3
    means.detach()


def test_a_second_backward_of_a_step_is_refused() -> None:
    """Its gradients would be averaged in an exchange that joiners do not expect."""
    model, optimizer = linear()
    means, members = means_of(model, optimizer)
    one, other = (model(torch.ones(1, 3)).sum() for _ in range(2))
    one.backward()
    with pytest.raises(gw.StepStateError, match=r"no_sync\(\)"):
        other.backward()
    assert members.begun == 1
    means.detach()


def test_a_step_that_fails_and_that_the_script_skips_is_over_with_the_next_forward() -> None:
    model, optimizer = linear()
    means, members = means_of(model, optimizer)
    members.end = lambda exchange: False  # type: ignore[method-assign]
    model(torch.ones(1, 3)).sum().backward()
    members.end = lambda exchange: True  # type: ignore[method-assign]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert (members.begun, members.committed) == (2, 1)
    means.detach()


@pytest.mark.parametrize("is_due", [False, True])
def test_a_layer_that_is_frozen_later_stays_as_it_is(is_due: bool) -> None:
    """Gradients of zeros would let the weight decay move it, also on a joiner that makes a step of the others again."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    means, members = means_of(model, optimizer)
    model[0].requires_grad_(False)
    if is_due:
        members.meet = lambda: {name: torch.zeros_like(each) for name, each in model.named_parameters()}  # type: ignore
    before = [each.detach().clone() for each in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    assert [each.grad is None for each in model.parameters()] == [True, True, False, False]
    optimizer.step()
    assert members.committed == 1
    assert [torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)][:3] == [True, True, False]
    means.detach()


def test_a_wait_for_members_that_do_not_come_ends() -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    try:
        model, optimizer = linear()
        address = f"127.0.0.1:{urlsplit(lighthouse.address()).port}"
        job = gw.elastic(model, optimizer, plan=gw.Identity(), lighthouse=address, patience_s=0.5)
        with pytest.raises(gw.CommunicationError, match="fewer than 2 members"):
            model(torch.randn(4, 3))
        job.leave()
    finally:
        lighthouse.shutdown()


def test_the_script_says_how_many_members_are_enough_for_the_usual_lighthouse(interpreters: Interpreters) -> None:
    """One of two machines may go on alone, without an option of `gradwire lighthouse`."""
    pytest.importorskip("torchft.coordination")
    lighthouse, address = started_lighthouse(interpreters, "127.0.0.1:0")
    try:
        model, optimizer = linear()
        job = gw.elastic(model, optimizer, plan=gw.Identity(), min_replicas=1, lighthouse=address, patience_s=20.0)
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        assert (job.step, job.world_size) == (1, 1)
        job.leave()
        job = gw.elastic(model, optimizer, plan=gw.Identity(), min_replicas=2, lighthouse=address, patience_s=3.0)
        with pytest.raises(gw.CommunicationError, match="fewer than 2 members"):
            model(torch.randn(4, 3))
        job.leave()
    finally:
        lighthouse.terminate()
        lighthouse.wait(10)


def test_members_that_start_together_begin_together_and_nobody_settles_for_a_joiner(monkeypatch: pytest.MonkeyPatch) -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000, quorum_tick_ms=20)
    address = f"127.0.0.1:{urlsplit(lighthouse.address()).port}"
    members = [quorum.Lighthouse(address, 2, timedelta(seconds=30), 60.0) for _ in range(4)]
    monkeypatch.setattr(quorum, "_SETTLE_S", 2.5)
    with ThreadPoolExecutor(4) as pool:
        try:
            asked = [pool.submit(member.ask, 0, 0) for member in members[:2]]
            time.sleep(0.3)
            asked.append(pool.submit(members[2].ask, 0, 0))
            first = [each.result(60) for each in asked]
            assert [each.replica_world_size for each in first] == [3, 3, 3] and len({each.quorum_id for each in first}) == 1
            monkeypatch.setattr(quorum, "_SETTLE_S", 1000.0)
            joins = pool.submit(members[3].ask, 0, 0)
            for step in count(1):  # until the lighthouse has heard of the joiner
                asked = [pool.submit(member.ask, step, 0) for member in members[:3]]
                if [each.result(60).replica_world_size for each in asked] == [4, 4, 4]:
                    break
            assert (joins.result(60).replica_world_size, joins.result().max_step) == (4, step)
        finally:
            for member in members:
                member.leave()
            lighthouse.shutdown()


class SlowClient:
    """A manager's client whose lighthouse waits for a slow member: a request of less than 30 seconds ends without an answer."""

    def __init__(self) -> None:
        self.requests = 0

    def _quorum(self, timeout: timedelta, **_: Any) -> Any:
        self.requests += 1
        if timeout < timedelta(seconds=30):
            raise TimeoutError
        return SimpleNamespace(replica_ids=["a", "b"], replica_world_size=2, max_step=7)


def test_one_request_waits_as_long_as_a_member_may_be_slower() -> None:
    """The answer to a request that ends may be on its way: then the others wait for this member."""
    member = quorum.Lighthouse("127.0.0.1:1", 2, timedelta(seconds=30), 900.0)
    client = member._client = SlowClient()
    assert member.ask(7, 0).max_step == 7 and client.requests == 1
    member.leave()


def test_a_request_is_made_again_for_another_lighthouse_alone() -> None:
    """One that ended before is no reason: the request already goes to the other one."""
    coordination = pytest.importorskip("torchft.coordination")
    first = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    address = f"127.0.0.1:{urlsplit(first.address()).port}"
    line = LighthouseLine(address)
    assert [line.finds_another() for _ in range(3)] == [True, False, False]
    first.shutdown()
    del first  # which closes its connections
    until = time.monotonic() + 30.0
    while line._watch is not None and time.monotonic() < until:
        assert not line.finds_another()
        time.sleep(0.05)
    assert line._watch is None
    second = coordination.LighthouseServer(bind=address, min_replicas=2, join_timeout_ms=60_000)
    try:
        assert [line.finds_another() for _ in range(3)] == [True, False, False]
    finally:
        line.close()
        second.shutdown()


def test_who_leaves_ends_its_request() -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    member = quorum.Lighthouse(f"127.0.0.1:{urlsplit(lighthouse.address()).port}", 2, timedelta(seconds=30), 900.0)
    with ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(member.ask, 0, 0)
            until, waits = time.monotonic() + 30.0, list[threading.Thread]()
            while not waits and time.monotonic() < until:
                time.sleep(0.01)
                waits = [each for each in threading.enumerate() if each.name == "gradwire-quorum"]
            member.leave()
            with pytest.raises(gw.CommunicationError):
                asked.result(5.0)
            waits[0].join(5.0)
            assert not waits[0].is_alive()
        finally:
            lighthouse.shutdown()


@pytest.mark.parametrize(
    "plan",
    [
        "2 bits with feedback",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("low rank", "local")),
        pytest.param("auto", marks=MORE),
    ],
)
def test_the_others_make_steps_while_a_joiner_waits_for_its_state(interpreters: Interpreters, tmp_path: Path, plan: str) -> None:
    pytest.importorskip("torchft")
    crowd = Crowd(interpreters, plan, str(tmp_path))
    try:
        others = [crowd.join() for _ in range(2)]
        crowd.await_steps(others, 4, START_S)
        joiner = crowd.join(slow_s=1.5)
        crowd.await_steps([joiner], 2, START_S)
        came_s = joiner.steps[0]["at_s"]
        of_three = [said for said in others[0].steps if said["members"] == 3 and said["at_s"] < came_s]
        assert len(of_three) >= 5, crowd.logs()
        if plan != "local":  # whose joiner makes the kept rounds at once
            assert joiner.steps[0]["step"] == of_three[0]["step"], "it makes the first of these steps again"
        ending = crowd.finish()
        assert len(ending) >= 2 and not any(each.process.returncode for each in ending), crowd.logs()
        assert crowd.unequal_steps() == []
        assert len({(each.steps[-1]["step"], each.steps[-1]["weights"]) for each in ending}) == 1
        assert all(each.end is not None and each.end["before"] == each.end["after"] for each in ending), [
            each.end for each in ending
        ]
    finally:
        crowd.close()


@pytest.mark.parametrize("plan", [pytest.param("2 bits with feedback", marks=MORE), "local"])
def test_a_member_that_is_killed_and_restarted_ends_with_the_others_weights(
    interpreters: Interpreters, tmp_path: Path, plan: str
) -> None:
    pytest.importorskip("torchft")
    crowd = Crowd(interpreters, plan, str(tmp_path))
    try:
        members = [crowd.join() for _ in range(3)]
        crowd.await_steps(members, 4, START_S)
        crowd.go(members[1], signal.SIGKILL)
        crowd.await_steps(crowd.living, 4, TIMEOUT_S + 2)
        again = crowd.join()
        crowd.await_steps([again], 4, START_S)
        assert again.steps[0]["step"] > members[1].steps[-1]["step"], "it began with the step of the others"
        ending = crowd.finish()
        assert len(ending) >= 2 and not any(each.process.returncode for each in ending), crowd.logs()
        assert crowd.unequal_steps() == []
        assert len({(each.steps[-1]["step"], each.steps[-1]["weights"]) for each in ending}) == 1
        assert {said["members"] for said in members[0].steps} >= {2, 3}
        assert all(each.end is not None and each.end["before"] == each.end["after"] for each in ending)
    finally:
        crowd.close()


@pytest.mark.parametrize("who", ["joiner", pytest.param("first", marks=MORE), pytest.param("second", marks=MORE)])
def test_a_member_that_is_killed_while_members_meet_is_missed_before_the_timeout(
    interpreters: Interpreters, tmp_path: Path, who: str
) -> None:
    """The first or the second serves the store where they meet."""
    pytest.importorskip("torchft")
    crowd = Crowd(interpreters, "exact", str(tmp_path), timeout_s=120.0)
    try:
        members = [crowd.join(dies_at=2 * (who == name)) for name in ("first", "second")]
        crowd.await_steps(members, 4, START_S)
        if who == "joiner":
            crowd.join_and_die()
        else:
            members.append(crowd.join())
            dies = members.pop(int(who == "second"))
            dies.goes = True
            dies.process.wait(START_S)
        crowd.await_steps(members, 4, 30.0)
        crowd.finish()
        assert [each.process.returncode for each in members] == [0, 0], crowd.logs()
        assert crowd.unequal_steps() == []
    finally:
        crowd.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_auto_decides_anew_when_a_member_joins(interpreters: Interpreters, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    crowd = Crowd(interpreters, "auto", str(tmp_path))
    try:
        members = [crowd.join() for _ in range(2)]
        until_decided(crowd, members)
        crowd.await_steps([crowd.join()], 1, START_S)
        until_decided(crowd, crowd.living)
        crowd.finish()
        assert crowd.unequal_steps() == []
        of_three = [said["decided"] for said in members[0].steps if said["members"] == 3]
        assert not of_three[0] and of_three[-1]
    finally:
        crowd.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_lighthouse_that_is_started_again_names_the_next_steps(interpreters: Interpreters, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    crowd = Crowd(interpreters, "exact", str(tmp_path))
    first, crowd.address = started_lighthouse(interpreters, "127.0.0.1:0")
    lighthouses = [first]
    try:
        members = [crowd.join() for _ in range(2)]
        crowd.await_steps(members, 4, START_S)
        first.kill()
        first.wait()
        time.sleep(2.0)  # members ask meanwhile
        lighthouses.append(started_lighthouse(interpreters, crowd.address)[0])
        crowd.await_steps(members, 4, 30.0)
        crowd.finish()
        assert [each.process.returncode for each in members] == [0, 0], crowd.logs()
        assert crowd.unequal_steps() == []
    finally:
        for each in lighthouses:
            each.kill()
            each.wait()
        crowd.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_joiner_with_another_plan_goes_and_the_others_go_on(interpreters: Interpreters, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    crowd = Crowd(interpreters, "exact", str(tmp_path))
    try:
        members = [crowd.join() for _ in range(2)]
        crowd.await_steps(members, 2, START_S)
        wrong = crowd.join("4 bits")
        assert wrong.process.wait(START_S) == 1
        crowd.await_steps(members, 3, START_S)
        crowd.finish()
        assert [each.process.returncode for each in members] == [0, 0], crowd.logs()
        assert "DisagreementError" in crowd.logs() and not wrong.steps
    finally:
        crowd.close()


def rounds_alone(address: str, batches: range, saved: bytes | None) -> tuple[list[int], bytes]:
    """The steps of a job of one member after each local step, and its checkpoint. saved: that of the job before."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = from_bytes(saved) if saved is not None else {}
    if state:
        model.load_state_dict(state["model"])
    plan = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=2, outer=gw.Nesterov(lr=0.7, momentum=0.9)))
    job = gw.elastic(model, optimizer, plan=plan, min_replicas=1, lighthouse=address, patience_s=20.0)
    if state:
        job.load_state_dict(state["job"])
    steps = []
    for seed in batches:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        (model(inputs) - inputs[:, :4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(job.step)
    with job.global_weights():
        end = to_bytes({"model": model.state_dict(), "job": job.state_dict()})
    job.leave()
    return steps, end


def test_local_rounds_go_on_from_a_checkpoint_and_are_the_steps_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    coordination = pytest.importorskip("torchft.coordination")
    monkeypatch.setattr(quorum, "_SETTLE_S", 0.01)
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, quorum_tick_ms=20, heartbeat_timeout_ms=300)
    address = f"127.0.0.1:{urlsplit(lighthouse.address()).port}"
    try:
        steps, end = rounds_alone(address, range(8), None)
        first, saved = rounds_alone(address, range(4), None)
        then, resumed = rounds_alone(address, range(4, 8), saved)
    finally:
        lighthouse.shutdown()
    assert steps == first + then == [0, 1, 1, 2, 2, 3, 3, 4]
    torch.testing.assert_close(from_bytes(resumed), from_bytes(end), rtol=0.0, atol=0.0)  # with the outer momentum


def started_lighthouse(interpreters: Interpreters, bind: str) -> tuple[Any, str]:
    """A lighthouse of the command line, and its address."""
    command = [sys.executable, "-u", "-m", "gradwire", "lighthouse", "--bind", bind]
    lighthouse = interpreters.start(command, stdout=subprocess.PIPE, text=True)
    return lighthouse, lighthouse.stdout.readline().rstrip().rpartition("//")[2]


def test_a_lighthouse_that_cannot_listen_says_where(interpreters: Interpreters) -> None:
    pytest.importorskip("torchft")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "gradwire", "lighthouse", "--bind", address]
        said = interpreters.start(command, stderr=subprocess.PIPE, text=True).communicate(timeout=60)[1]
    assert address in said and "--bind" in said and "Traceback" not in said


RESTARTED = """
import sys
import time
import torch
import gradwire as gw
step, plan = int(sys.argv[2]), gw.Identity()
if sys.argv[3] == "local":
    plan = gw.Uniform(plan, schedule=gw.LocalSteps.diloco(every=5))
torch.manual_seed(step)
model = torch.nn.Linear(20, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
job = gw.elastic(model, optimizer, plan=plan, lighthouse=sys.argv[1])
momenta = {name: torch.ones_like(each) for name, each in model.named_parameters()} if step else {}
job.load_state_dict({"step": step, "momenta": momenta})
began_s, share, before = time.monotonic(), None, [each.detach().clone() for each in model.parameters()]
model(torch.zeros(8, 20))  # the members meet
with job.global_weights():
    stayed = all(map(torch.equal, model.parameters(), before))
while job.step < 110:
    inputs = torch.randn(8, 20)
    (own,) = torch.autograd.grad(model(inputs).square().mean(), model.weight)
    model(inputs).square().mean().backward()
    optimizer.step()
    share = share or float(model.weight.grad.norm() / own.norm())
    optimizer.zero_grad()
with job.global_weights():
    print(job.step, sum(weight.double().sum().item() for weight in model.parameters()), share, time.monotonic() - began_s, stayed)
job.leave()
"""


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ("exact", (100, 0)),
        ("local", (100, 0)),
        pytest.param("exact", (100, 100), marks=MORE),
        pytest.param("local", (100, 100), marks=MORE),
        pytest.param("exact", (0, 98), marks=MORE),
    ],
)
def test_a_job_counts_on_from_a_checkpoint(interpreters: Interpreters, plan: str, steps: tuple[int, int]) -> None:
    """Nobody waits for a timeout of 60 seconds, and the first mean is of those who had the checkpoint."""
    pytest.importorskip("torchft")
    lighthouse, address = started_lighthouse(interpreters, "127.0.0.1:0")
    pipes = {"stdout": subprocess.PIPE, "text": True}
    try:
        ends = [interpreters.start([sys.executable, "-c", RESTARTED, address, str(step), plan], **pipes) for step in steps]
        first, second = (each.communicate(timeout=120)[0].split() for each in ends)
    finally:
        lighthouse.send_signal(signal.SIGINT)
        lighthouse.wait(10)
    assert first[:2] == second[:2] and first[0] == "110"
    assert max(float(each[3]) for each in (first, second)) < 45
    if 0 in steps:
        trains = first if steps[0] else second
        assert float(trains[2]) == pytest.approx(1.0)
        assert trains[4] == "True", "nobody has trained yet"


def test_steps_are_set_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    members = SimpleNamespace(step=0, world_size=0, leave=lambda: None)
    monkeypatch.setattr(torchft, "Members", lambda *_, **__: members)
    job = gw.elastic(*linear(), plan=gw.Identity(), lighthouse="127.0.0.1:1")
    with pytest.raises(gw.PlanError, match="step is -1"):
        job.step = -1
    job.step = 4
    job.load_state_dict({"step": 5, "momenta": {}})
    assert job.state_dict() == {"step": 5, "momenta": {}}
    members.world_size = 2
    with pytest.raises(gw.StepStateError, match=r"step is set to 6.*met already"):
        job.step = 6


def test_momenta_of_another_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft, "Members", lambda *_, **__: SimpleNamespace(step=0, world_size=0, leave=lambda: None))
    plan = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps.diloco(every=5))
    job = gw.elastic(*linear(), plan=plan, lighthouse="127.0.0.1:1")
    assert sorted(job.state_dict()["momenta"]) == ["bias", "weight"]
    with pytest.raises(ValueError, match=r"momenta of the state have .* of shape \[1\] for 'bias', and .* shape \[2\]"):
        job.load_state_dict({"step": 5, "momenta": {"weight": torch.ones(2, 3), "bias": torch.ones(1)}})
    assert job.step == 0, "nothing is taken of it"
    job.leave()


def until_decided(crowd: Crowd, members: list[Member]) -> None:
    while not all(each.steps and each.steps[-1]["decided"] for each in members):
        crowd.await_steps(members, 1, START_S)


@pytest.mark.slow
def test_the_example_runs_with_the_lighthouse_of_the_command_line(interpreters: Interpreters) -> None:
    pytest.importorskip("torchft")
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    pipes = {"stdout": subprocess.PIPE, "text": True}
    lighthouse, address = started_lighthouse(interpreters, "127.0.0.1:0")
    try:
        ends = [interpreters.start([sys.executable, EXAMPLE, address], **pipes) for _ in range(2)]
        printed = [each.communicate(timeout=120)[0] for each in ends]
    finally:
        lighthouse.send_signal(signal.SIGINT)
        lighthouse.wait(10)
    assert [each.returncode for each in ends] == [0, 0]
    last = {said.splitlines()[-1] for said in printed}
    assert len(last) == 1 and last.pop().startswith("step 300: weights "), printed


def test_the_nodes_of_all_parameters_are_kept() -> None:
    """On a device a new node would accumulate on the stream of its forward, which may be another one for each parameter."""
    model = torch.nn.Linear(3, 2, device="meta").eval()
    means = GradientMeans(model, dict(model.named_parameters()), [torch.optim.SGD(model.parameters())])
    for node in kept_nodes(model.parameters()):
        node.metadata["kept"] = True
    del node
    model(torch.ones(1, 3, device="meta")).sum().backward()
    assert all("kept" in node.metadata for node in kept_nodes(model.parameters()))
    means.detach()
    assert not any("kept" in node.metadata for node in kept_nodes(model.parameters()))
