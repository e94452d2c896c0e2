"""`gw.DDPState()`: plan="auto" in the hook of DistributedDataParallel."""

import io
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside_ddp import batch, normalised, plain, sgd
from threads import here
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, digest

import gradwire as gw
from gradwire.auto import Auto
from gradwire.core import pairs_ranks
from gradwire.integrations import ddp_plans

DECIDED = 20
"""Steps after which auto has decided."""


def deep() -> nn.Sequential:
    """Five megabytes."""
    return nn.Sequential(nn.Linear(6, 400), *(nn.Linear(400, 400) for _ in range(8)), nn.Linear(400, 3))


def wrapped(model: nn.Module, accuracy: str = "safe", **ddp: Any) -> tuple[DistributedDataParallel, gw.DDPState]:
    run, state = DistributedDataParallel(model, **ddp), gw.DDPState(accuracy=accuracy)
    run.register_comm_hook(state, gw.ddp_hook)
    return run, state


def train(run: DistributedDataParallel, steps: Iterator[int] | range) -> None:
    optimizer = sgd(run)
    for step in steps:
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward()
        optimizer.step()


def decided(accuracy: str, ddp: dict[str, Any]) -> tuple[str, str, gw.ExchangeStats]:
    torch.manual_seed(3)
    run, state = wrapped(deep(), accuracy, **ddp)
    assert state.decision is None
    train(run, range(DECIDED))
    assert state.decision is not None
    return digest(run.parameters()), str(state.decision), state.stats()


@pytest.mark.parametrize("ddp", [{"bucket_cap_mb": 1, "gradient_as_bucket_view": True}, {}, {"static_graph": True}])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_decide_and_end_alike(worlds: Worlds, ranks: int, ddp: dict[str, Any]) -> None:
    ends = worlds.run(ranks, decided, "safe", ddp)
    assert len({weights for weights, _, _ in ends}) == 1
    assert len({line for _, line, _ in ends}) == 1
    line, stats = ends[0][1:]
    assert line.startswith("plan='auto' ") and stats.steps == DECIDED


def exact_or_ddp(hooked: bool) -> str:
    torch.manual_seed(3)
    model = deep()
    train(wrapped(model, "exact", bucket_cap_mb=1)[0] if hooked else DistributedDataParallel(model), range(DECIDED))
    return digest(model.parameters())


def test_exact_ends_bit_for_bit_as_under_ddp(worlds: Worlds) -> None:
    assert worlds.run(2, exact_or_ddp, True) == worlds.run(2, exact_or_ddp, False)


def accumulated(_: None) -> tuple[str, bool]:
    torch.manual_seed(3)
    run, state = wrapped(normalised(), bucket_cap_mb=1)
    optimizer = sgd(run)
    for step in range(3 * DECIDED):
        with run.no_sync() if step % 3 < 2 else nullcontext():
            run(batch(step)).square().mean().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return digest(run.parameters()), state.decision is not None


def test_accumulation_counts_as_one_step(worlds: Worlds) -> None:
    ends = worlds.run(2, accumulated, None)
    assert ends[0] == ends[1] and ends[0][1]


def joined(_: None) -> str:
    torch.manual_seed(3)
    run, _state = wrapped(plain())
    with run.join():
        train(run, range(5 + 20 * dist.get_rank()))
    return digest(run.parameters())


def test_a_rank_that_runs_out_of_data_decides_with_the_others(worlds: Worlds) -> None:
    first, second = worlds.run(2, joined, None)
    assert first == second


def resumed(_: None) -> tuple[str, str, bool]:
    """The weights after a run, after one that goes on from its state, and whether the plan went on.

    Nothing asks for another decision, as a busy machine may."""
    with mock.patch("gradwire.auto.driver.ChangeWatch.step", lambda *_: None):
        return _resumed()


def _resumed() -> tuple[str, str, bool]:
    torch.manual_seed(3)
    model, ends = deep(), []
    run, state = wrapped(model, bucket_cap_mb=1)
    train(run, range(DECIDED))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = state.state_dict()
    plan = state._exchange.plan.digest()  # type: ignore[union-attr]
    train(run, range(6))
    ends.append(digest(model.parameters()))
    model = deep()
    model.load_state_dict(weights)
    run, state = wrapped(model, bucket_cap_mb=1)
    state.load_state_dict(saved)
    train(run, range(6))
    ends.append(digest(model.parameters()))
    return ends[0], ends[1], state._exchange.plan.digest() == plan  # type: ignore[union-attr]


def test_a_run_goes_on_bit_for_bit_under_the_plan_that_was_chosen(worlds: Worlds) -> None:
    for first, second, same in worlds.run(2, resumed, None):
        assert same and first == second


def saved_in_pairs() -> dict[str, Any]:
    """A state of two nodes of two ranks, where each rank has its partner on the other node."""
    torch.manual_seed(3)
    with here.on_node("aabb"[dist.get_rank()]):
        run, state = wrapped(nn.Sequential(nn.Linear(6, 200), nn.Linear(200, 200), nn.Linear(200, 3)))
        train(run, range(2))
    assert state._exchange is not None and paired(state._exchange.plan)
    return state.state_dict()


def paired(plan: gw.Plan) -> bool:
    return any(pairs_ranks(bucket.option) for bucket in plan.buckets)


def taken_up_on(names: str, states: list[dict[str, Any]]) -> tuple[str, bool, int]:
    """The weights of a run that goes on from these states, whether its ranks have partners, and its step in the end."""
    torch.manual_seed(3)
    with here.on_node(names[dist.get_rank()]):
        run, state = wrapped(nn.Sequential(nn.Linear(6, 200), nn.Linear(200, 200), nn.Linear(200, 3)))
        state.load_state_dict(states[dist.get_rank()])
        train(run, range(2, 4))
    assert state._exchange is not None
    return digest(run.parameters()), paired(state._exchange.plan), state._exchange.step


def test_auto_decides_anew_where_ranks_of_a_node_have_lost_their_partners(worlds: Worlds) -> None:
    states = worlds.run(4, saved_in_pairs)
    ends = worlds.run(4, taken_up_on, "aaab", states)
    assert ends == [(ends[0][0], False, 4)] * 4


def resumed_from_a_rival(_: None) -> tuple[bool, bool, bool]:
    """Whether a state was saved of another plan than the chosen one, whether a run that loads it runs the chosen one, and whether
    it looks for another one."""
    torch.manual_seed(3)
    run, state = wrapped(deep(), bucket_cap_mb=1)
    with mock.patch("gradwire.auto.driver.ChangeWatch.step", lambda *_: None):  # nothing asks for a look or a decision
        train(run, range(DECIDED))
    job, exchange = state._find_job(), state._exchange
    assert isinstance(job.driver, Auto) and exchange is not None
    chosen = exchange.plan
    plain_now = any(spec.encodes for bucket in chosen.buckets for spec in bucket.specs)
    job.driver._second = cast(Any, SimpleNamespace(tries=True))
    exchange.change_to(job.plan_of(gw.Uniform(gw.Identity() if plain_now else gw.QSGD(bits=4))))
    saved, rival = state.state_dict(), exchange.plan
    run, state = wrapped(deep(), bucket_cap_mb=1)
    state.load_state_dict(saved)
    train(run, range(1))
    exchange, driver = state._exchange, state._find_job().driver
    assert exchange is not None and driver is not None
    return rival.digest() != chosen.digest(), exchange.plan.digest() == chosen.digest(), driver.searching


def test_a_state_that_is_saved_while_a_rival_runs_goes_on_with_the_chosen_plan(worlds: Worlds) -> None:
    assert worlds.run(2, resumed_from_a_rival, None) == [(True, True, False)] * 2


def saved_whole(_: None) -> tuple[bool, bool]:
    """Whether a copy of the whole DDP model computes what the model does, and a fresh hook can be registered with it."""
    torch.manual_seed(3)
    run, _state = wrapped(plain())
    train(run, range(3))
    file = io.BytesIO()
    torch.save(run, file)
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    same = torch.equal(copied(batch(0)), run(batch(0)))
    state = gw.DDPState()
    copied.register_comm_hook(state, gw.ddp_hook)
    train(copied, range(3))
    return same, state.stats().steps == 3


def test_the_whole_ddp_model_is_saved_without_the_hook(worlds: Worlds) -> None:
    assert worlds.run(2, saved_whole, None) == [(True, True)] * 2


def unlike(_: None) -> str:
    run, _state = wrapped(plain(), ("safe", "exact")[dist.get_rank()])
    with pytest.raises(gw.DisagreementError) as raised:
        train(run, range(1))
    return str(raised.value)


def test_ranks_with_other_settings_are_named(worlds: Worlds) -> None:
    assert all("plan" in message for message in worlds.run(2, unlike, None))


def advised(ddp: dict[str, Any]) -> list[str]:
    torch.manual_seed(3)
    run, _state = wrapped(deep(), **ddp)
    with mock.patch.object(ddp_plans, "say") as say:
        train(run, range(DECIDED))
    return [call.args[0] for call in say.call_args_list]


def test_one_large_bucket_of_ddp_is_said_with_the_cure(worlds: Worlds) -> None:
    lines, others = worlds.run(2, advised, {})
    assert len(lines) == 1 and "bucket_cap_mb=1" in lines[0] and not others
    assert worlds.run(2, advised, {"bucket_cap_mb": 1}) == [[], []]


def slower(_: None) -> list[float]:
    """The recorded waits of a rank whose partner's backward is 30 ms late, in milliseconds."""
    run, state = wrapped(plain())
    optimizer = sgd(run)
    for step in range(4):
        optimizer.zero_grad()
        loss = run(batch(step)).square().mean()
        time.sleep(0.03 * dist.get_rank())
        loss.backward()
        optimizer.step()
    return [1e3 * report.exposed_s for report in state._job.reports]  # type: ignore[union-attr]


def test_the_wait_for_other_ranks_is_recorded(worlds: Worlds) -> None:
    first, _ = worlds.run(2, slower, None)
    assert len(first) == 4 and max(first[1:]) > 10


@pytest.mark.parametrize("wrong", [{"accuracy": "good"}, {"plan": gw.QSGD(bits=4), "accuracy": "exact"}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(gw.PlanError, match="accuracy"):
        gw.DDPState(**wrong)
