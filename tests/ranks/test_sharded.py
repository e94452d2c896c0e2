"""Pipelined(shard_optimizer=True): each rank keeps its shard of the optimizer's state, and what is learned is what the whole
state learns, bit for bit."""

import copy
import gc
import io
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_pipelined import LOSSY, PLAIN, Make, adam, fused, loss_of, momentum, policy, tied
from threads import Threads, built, here
from torch import nn
from worlds import World, Worlds, digest, gradwire_threads, seeded

import gradwire as gw
from gradwire.engine.prepare import prepare
from gradwire.engine.schedules.factory import check_optimizers
from gradwire.engine.schedules.sharded import ShardedSchedule
from gradwire.engine.torch_hooks.lazy_tensors import is_later
from gradwire.engine.torch_hooks.splitting import elementwise, splits

pytestmark = pytest.mark.filterwarnings("ignore:.*only its shard")

SHARDED = gw.Pipelined(shard_optimizer=True)
REFUSED = (gw.StepStateError, gw.PlanError)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Its state is there before the first step."""
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)


class Run:
    """A training that can be saved and taken up."""

    def __init__(self, make: Make, schedule: Any = SHARDED, spec: Any = PLAIN) -> None:
        self.model = tied()
        self.optimizer = make(self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=policy(spec, schedule), process_group=here.group)

    def backward(self, step: int) -> None:
        with self.handle.no_sync():
            loss_of(self.model, step + 100).backward()
        loss_of(self.model, step).backward()

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.backward(step)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any]:
        sharded = self.handle.plan.shards_optimizer
        return self.handle.optimizer_state_dict() if sharded else self.optimizer.state_dict()

    def end(self) -> tuple[str, str, int]:
        """The weights, the whole state of the optimizer, and the bytes of it that are kept here."""
        kept = [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        whole = [sorted(each.items()) for _, each in sorted(self.optimizer_state()["state"].items())]
        state = [value for each in whole for _, value in each]
        assert all(parameter.isfinite().all() for parameter in self.model.parameters())
        ends = digest(self.model.parameters()), digest(state), sum(v.numel() * v.element_size() for v in kept)
        self.handle.flush()
        self.optimizer.state.clear()
        self.handle.detach()
        return ends


def both(make: Make) -> list[Any]:
    ends = []
    for schedule in (SHARDED, "pipelined"):
        run = Run(make, schedule)
        run.steps(0, 5)
        ends.append((*run.end(), run.handle.stats().wire_bytes))
    return ends


@pytest.mark.parametrize(("ranks", "make"), [(2, fused), (3, momentum), (3, adam), (2, adagrad)])
def test_it_learns_what_the_whole_state_learns(threads: Threads, ranks: int, make: Make) -> None:
    told = threads.run(ranks, both, make)
    (weights, state, whole, _) = told[0][1]
    for sharded, unsharded in told:
        assert sharded[:2] == unsharded[:2] == (weights, state)
    kept, sent = zip(*(rank[0][2:] for rank in told), strict=True)
    assert sum(sent) == sum(rank[1][3] for rank in told), "as many bytes on the wire"
    # what every shard has beside its elements is a counter of 4 bytes; small tensors are not cut
    assert max(kept) < whole / ranks + 3500
    assert whole <= sum(kept) < 1.1 * whole


def saves() -> int:
    """Save the optimizer's state. The number of the thread."""
    run = Run(momentum)
    run.steps(0, 1)
    assert run.optimizer_state()["state"]
    run.end()
    return threading.get_ident()


def test_the_state_is_copied_to_the_cpu_by_the_thread_whose_stream_wrote_it(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied_by, copy_to_cpu = set[int](), torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        copied_by.add(threading.get_ident())
        return copy_to_cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    scripts = threads.run(2, saves)
    assert copied_by == {*scripts}


def resumed() -> list[Any]:
    whole, first, second = Run(adam), Run(adam), Run(adam)
    whole.steps(0, 5)
    first.steps(0, 3)
    saved = io.BytesIO()
    parts = (first.model, first.handle, first.scheduler)
    torch.save([*(part.state_dict() for part in parts), first.handle.optimizer_state_dict()], saved)
    saved.seek(0)
    *states, of_optimizer = torch.load(saved, weights_only=True)
    for part, state in zip((second.model, second.handle, second.scheduler), states, strict=True):
        part.load_state_dict(state)
    second.handle.load_optimizer_state_dict(of_optimizer)
    second.steps(3, 5)
    ends = [whole.end(), second.end()]
    on_one = first.handle.optimizer_state_dict(rank=1)
    first.optimizer.state.clear()
    first.handle.detach()
    return [ends, bool(on_one)]


def test_a_resumed_run_equals_an_uninterrupted_one(threads: Threads) -> None:
    told = threads.run(2, resumed)
    assert [on_one for _, on_one in told] == [False, True]
    for (whole, second), _ in told:
        assert whole == second
        assert whole[2] > 0


def state_in_another_order() -> tuple[str, Any, Any]:
    """Loaded in the middle of a training; the order is of a run on one rank, from which residuals alone would be taken."""
    whole, run = Run(adam), Run(adam)
    whole.steps(0, 4)
    run.steps(0, 2)
    state = {f"rank0/{key.partition('/')[2]}": value for key, value in run.handle.state_dict().items()}
    state |= {"rank0/ranks": torch.tensor([0]), "rank0/order": state["rank0/order"].flip(0)}
    plan = run.handle.plan
    with pytest.raises(gw.StepStateError) as caught:
        run.handle.load_state_dict(state)
    assert run.handle.plan is plan and run.handle.session.exchange is run.handle.session.reducer.running
    run.steps(2, 4)
    return str(caught.value), run.end(), whole.end()


def test_a_state_in_another_order_is_refused_and_changes_nothing(threads: Threads) -> None:
    for words, refused, whole in threads.run(2, state_in_another_order):
        assert "another order" in words
        assert refused == whole


def odd_tensors(schedule: Any) -> list[str]:
    """bfloat16, other strides, none at all."""
    layers = built(0, lambda: (nn.Conv2d(16, 8, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(8, 3)))
    model = nn.Sequential(*layers)
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plan = gw.Uniform(PLAIN, schedule=schedule, bucket_bytes=1500, edge_bytes=1500, chunk_bytes=500)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    for step in range(4):
        (
            model(torch.randn(2, 16, 3, 3, generator=seeded(step, here.rank)).bfloat16()) * model.scale
        ).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = handle.optimizer_state_dict() if handle.plan.shards_optimizer else optimizer.state_dict()
    ends = [digest(model.parameters()), digest(each["momentum_buffer"] for _, each in sorted(state["state"].items()))]
    optimizer.state.clear()
    handle.detach()
    return ends


def test_narrow_and_strided_tensors(threads: Threads) -> None:
    sharded = threads.run(3, odd_tensors, SHARDED)
    assert sharded == threads.run(3, odd_tensors, "pipelined")
    assert sharded[0] == sharded[1]


def clipped(schedule: Any) -> tuple[list[float], torch.Tensor]:
    run, norms = Run(momentum, schedule), []
    for step in range(3):
        run.backward(step)
        norms.append(float(run.handle.clip_grad_norm_(0.5)))
        run.optimizer.step()
        run.optimizer.zero_grad()
    weights = torch.cat([p.detach().reshape(-1).clone() for p in run.model.parameters()])
    run.end()
    return norms, weights


def test_clipping_is_by_the_norm_of_all_shards(threads: Threads) -> None:
    (norms, weights), *others = threads.run(3, clipped, SHARDED)
    assert min(norms) > 0.5, "then nothing is clipped"
    assert all(other == norms and torch.equal(at, weights) for other, at in others)
    expected, at = threads.run(3, clipped, "pipelined")[0]
    assert norms == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights, at)


def not_a_number(schedule: Any) -> tuple[float, bool]:
    """One gradient on one rank is NaN: torch's clipping makes all of them NaN."""
    run = Run(momentum, schedule)
    run.backward(0) if here.rank else (loss_of(run.model, 0) + run.model.scale.sum() * float("nan")).backward()
    norm = run.handle.clip_grad_norm_(0.5, float("inf"))
    run.optimizer.step()
    run.handle.flush()
    weights = [run.model.attend.in_proj_weight, run.model.head.weight]
    all_nan = all(bool(weight.isnan().all()) for weight in weights)
    run.optimizer.state.clear()
    run.handle.detach()
    return float(norm), all_nan


def test_clipping_by_a_norm_that_is_no_number_is_torchs(threads: Threads) -> None:
    for schedule in (SHARDED, "pipelined"):
        assert [(str(norm), all_nan) for norm, all_nan in threads.run(2, not_a_number, schedule)] == [("nan", True)] * 2


def left_out_by_all() -> list[bool]:
    run = Run(adam)
    run.steps(0, 2)
    before = digest(run.model.parameters())
    run.backward(2)
    run.optimizer.zero_grad()
    same = digest(run.model.parameters()) == before
    run.steps(3, 5)
    changed = digest(run.model.parameters()) != before
    run.end()
    return [same, changed]


def left_out_by_one() -> tuple[str, str, str]:
    run = Run(momentum)
    run.steps(0, 2)
    run.backward(2)
    if here.rank == 0:
        run.optimizer.step()
        assert is_later(run.model.scale)
    run.optimizer.zero_grad()
    try:
        run.backward(3)
        words = ""
    except gw.StepStateError as error:
        words = str(error)
    run.handle.reset()
    weights = digest(run.model.parameters())
    run.steps(4, 6)
    return words, weights, run.end()[0]


def test_a_step_may_be_left_out_by_all_ranks_and_not_by_one(threads: Threads) -> None:
    assert threads.run(2, left_out_by_all) == [[True, True]] * 2
    first, second = threads.run(2, left_out_by_one)
    assert first == second, "the same words and weights"
    assert "rank 1 left out optimizer.step()" in first[0]


def test_on_a_device_any_training_forward_opens_the_gate_of_a_step_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of a forward inside no_sync() wait behind that gate too."""
    steps, opened = object.__new__(ShardedSchedule), []
    exchange = SimpleNamespace(flats=[torch.empty(0, device="meta")])
    steps._reducer = SimpleNamespace(exchange=exchange)  # type: ignore[assignment]
    steps._step_is_due = True
    monkeypatch.setattr(ShardedSchedule, "_gather_as_it_was", lambda self: opened.append(self))
    steps.on_forward(nn.Linear(1, 1).eval())
    assert not opened
    steps.on_forward(nn.Linear(1, 1))
    assert opened == [steps]


def other_buffers(changes: bool) -> tuple[list[float], tuple[str, str, int]]:
    """A buffer of another size after a step, and after one that was left out."""
    run = Run(adam)
    run.model.register_buffer("table", torch.zeros(3))
    for size in (4, 5):
        run.steps(size, size + 1)
        run.backward(size + 10)
        if size == 4:
            run.optimizer.step()
        run.optimizer.zero_grad()
        if changes:
            run.model.table = torch.full((size,), float(here.rank + size))
    run.steps(6, 8)
    return run.model.table.tolist(), run.end()


def test_buffers_may_change(threads: Threads) -> None:
    changed, kept = threads.run(2, other_buffers, True), threads.run(2, other_buffers, False)
    assert [table for table, _ in changed] == [[5.0] * 5] * 2, "rank 0's"
    assert [ends for _, ends in changed] == [ends for _, ends in kept]


def one_rank_saves() -> tuple[str, str]:
    run, saved = Run(adam), ""
    run.steps(0, 2)
    if here.rank == 0:
        run.model.eval()
        saved = digest(value for name, value in run.model.state_dict().items() if name != "head.weight")
        run.model.train()
    here.gather(None)
    return saved, run.end()[0]


def test_one_rank_may_save_before_a_barrier(threads: Threads) -> None:
    (saved, weights), (_, other) = threads.run(2, one_rank_saves)
    assert saved == weights == other


def refusals() -> dict[str, str]:
    """What is refused, between backward and step and after a step, and then training goes on."""
    run, told = Run(adam), {}
    run.steps(0, 1)
    run.backward(1)
    parameters = list(run.model.parameters())

    def attempt(what: str, act: Callable[[], Any]) -> None:
        with pytest.raises(REFUSED) as caught:
            act()
        told[what] = str(caught.value)

    attempt("use", lambda: parameters[0].grad.norm())
    attempt("clip", lambda: nn.utils.clip_grad_norm_(parameters, 1.0))
    attempt("another", torch.optim.SGD(parameters, lr=0.1).step)
    attempt("keep", lambda: run.optimizer.zero_grad(set_to_none=False))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    attempt("scale", lambda: scaler.unscale_(run.optimizer))
    attempt("save", run.optimizer.state_dict)
    attempt("copy", lambda: copy.deepcopy(run.optimizer))
    attempt("join", lambda: run.handle.join().__enter__())
    attempt("count", lambda: run.handle.clip_grad_norm_(1.0, 0))
    run.optimizer.step()
    attempt("again", run.optimizer.step)
    attempt("accumulate", lambda: loss_of(run.model, 2).backward())
    run.optimizer.zero_grad()
    run.steps(3, 4)
    attempt("no gradient", lambda: run.handle.clip_grad_norm_(1.0))
    run.model.extra = nn.Parameter(torch.ones(3))
    attempt("grow", lambda: run.model(torch.zeros(1, 2, dtype=torch.long), 0))
    del run.model.extra
    with pytest.warns(UserWarning, match="only its shard of the state of Adam"):
        run.handle.detach()
    assert not run.optimizer.state_dict()["state"]
    return told


def test_what_needs_a_whole_gradient_or_state_is_refused_in_words(worlds: Worlds) -> None:
    first, second = worlds.run(2, refusals)
    assert first == second
    words = {
        "use": "each rank holds only its shard",
        "clip": "handle.clip_grad_norm_()",
        "another": "an optimizer that gw.parallelize did not get steps it",
        "keep": "zero_grad(set_to_none=True)",
        "scale": "GradScaler",
        "save": "handle.optimizer_state_dict()",
        "copy": "handle.optimizer_state_dict()",
        "join": "handle.join()",
        "count": "norm_type is 0",
        "again": "Call step() once after each backward",
        "accumulate": "handle.no_sync()",
        "no gradient": "after backward()",
        "grow": "parallelize again",
    }
    assert {what: words[what] in said for what, said in first.items()} == dict.fromkeys(words, True)


def tuned() -> str:
    model = tied()
    with pytest.raises(gw.GradwireError) as caught:
        plan = gw.Tuned(gw.Uniform(PLAIN, schedule=SHARDED), search="grid")  # bayes would load scikit-learn first
        gw.parallelize(model, adam(model), plan=plan, process_group=here.group)
    return str(caught.value)


def test_what_changes_buckets_is_refused_on_all_ranks(threads: Threads) -> None:
    assert all("changes buckets while training" in words for words in threads.run(2, tuned))


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def with_a_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adam(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(half, lr=0.1) for half in ([*model.parameters()][::2], [*model.parameters()][1::2])]


@pytest.mark.parametrize(
    ("plan", "make", "words"),
    [
        (gw.Uniform(LOSSY, schedule=SHARDED), adam, "must be exact"),
        (gw.Uniform(PLAIN, schedule=SHARDED, scheme="allgather"), adam, "scheme='alltoall'"),
        (gw.Uniform(PLAIN, schedule=SHARDED), lbfgs, "LBFGS on a part of a tensor"),
        (gw.Uniform(PLAIN, schedule=SHARDED), adafactor, "Adafactor on a part of a tensor"),
        (gw.Uniform(PLAIN, schedule=SHARDED), with_a_hook, "Adam has step hooks"),
        (gw.Uniform(PLAIN, schedule=SHARDED), two, "2 optimizers were passed"),
    ],
)
def test_what_cannot_be_sharded_is_refused_at_the_start(plan: gw.Policy, make: Any, words: str) -> None:
    model = tied()
    with pytest.raises(gw.PlanError, match=words.replace("(", r"\(")):
        check_optimizers(make(model), prepare(model, plan, 2))


SHARDABLE = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adamax", "Adadelta", "ASGD", "Rprop"]


@pytest.mark.parametrize("name", SHARDABLE)
def test_optimizers_that_treat_elements_apart_are_known_by_a_trial(name: str) -> None:
    model = nn.Sequential(nn.Linear(40, 20), nn.Linear(20, 400))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    assert elementwise(optimizer)
    assert splits(optimizer), "then the pipelined schedule need not wait for all gathers"


class Norms(torch.optim.SGD):
    """As LARS: steps by the norm of each tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / parameter.grad.norm()
        return super().step(closure)


class StateFromTheStart(torch.optim.SGD):
    """As Adagrad was for long: a step finds state that was made with the optimizer."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                total = self.state[parameter]["sum"].add_(parameter.grad.square())
                parameter.grad = parameter.grad / (1 + total.sqrt())
        return super().step(closure)


def test_a_state_from_the_start_is_there_for_the_trial() -> None:
    optimizer = StateFromTheStart([nn.Parameter(torch.ones(30, 30))], lr=0.1)
    assert splits(optimizer) and elementwise(optimizer)


def test_a_state_of_a_shape_of_its_own_is_made_anew_for_the_trial() -> None:
    weight = nn.Parameter(torch.ones(30, 30))
    optimizer = torch.optim.Adafactor([weight])
    weight.grad = torch.ones(30, 30)
    optimizer.step()
    assert splits(optimizer)


def test_one_that_steps_by_norms_is_not_taken_for_one() -> None:
    assert not elementwise(Norms([nn.Parameter(torch.ones(30, 30))], lr=0.1))
    assert not elementwise(Norms([nn.Parameter(torch.ones(3000))], lr=0.1))


def test_the_plan_says_so_and_others_are_as_they_were() -> None:
    plan = policy(PLAIN, SHARDED).plan(prepare(tied(), policy(PLAIN, SHARDED), 2).tensors)
    assert plan.to_dict()["schedule"] == {"kind": "pipelined", "shard_optimizer": True}
    assert gw.Plan.from_dict(plan.to_dict()) == plan
    assert policy(PLAIN, "pipelined").to_dict()["schedule"] == {"kind": "pipelined"}
    with pytest.raises(gw.GradwireError, match="shard_optimizer is 1: it must be true or false"):
        gw.Pipelined(shard_optimizer=1)  # type: ignore[arg-type]


class KeepsModel:
    """What a script's step hook may refer to."""

    def __init__(self) -> None:
        self.model = tied()
        self.optimizer = adam(self.model)
        self.handle = gw.parallelize(self.model, self.optimizer, plan=policy(PLAIN, SHARDED))


def left_with_a_hook() -> tuple[str, list[str]]:
    """A step hook keeps the model, which is refused while gathers of an earlier step may be under way. The threads that are left
    when the script has dropped all of it."""
    kept = KeepsModel()
    for step in range(2):
        loss_of(kept.model, step).backward()
        kept.optimizer.step()
        kept.optimizer.zero_grad()
    kept.optimizer.register_step_post_hook(lambda *_, model=kept.model: model.training)
    loss_of(kept.model, 2).backward()
    with pytest.raises(gw.StepStateError) as caught:
        kept.optimizer.step()
    words = str(caught.value)
    del kept, caught
    gc.collect()
    deadline = time.monotonic() + 20
    while gradwire_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return words, gradwire_threads()


def test_a_step_hook_that_keeps_the_model_keeps_no_lanes() -> None:
    with World(2, 8.0) as world:
        for words, threads in world.run(left_with_a_hook):
            assert "hook" in words and threads == []
