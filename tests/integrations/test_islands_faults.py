"""Islands whose models or plans differ, and ranks that die in the exchange: errors that name the difference and the ranks."""

import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_quorums import Answers, answer
from torch import nn
from torch.distributed.fsdp import fully_shard
from worlds import World, Worlds, mesh_of

import gradwire as gw
from gradwire.exchange import TensorMeta
from gradwire.integrations.elastic_islands import IslandLighthouse
from gradwire.integrations.island_calls import LostRankError
from gradwire.integrations.island_state import IslandState
from gradwire.integrations.islands import share_inside
from gradwire.integrations.member_state import MemberState
from gradwire.integrations.members import Members


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(4, 4))


def freeze(model: nn.Sequential) -> None:
    model[1].requires_grad_(False)


def count(model: nn.Sequential) -> None:
    model.register_buffer("seen", torch.zeros(()))


def widen(model: nn.Sequential) -> None:
    model[0] = nn.Linear(3, 8)


def round_off(model: nn.Sequential) -> None:
    model.bfloat16()


def said_of(change: Callable[[nn.Sequential], None] | None, every: int) -> str:
    """The error where the last island has a changed model, or exchanges every so many steps."""
    mesh = mesh_of(2, 1)
    model, is_last = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), dist.get_rank() == 1
    if is_last and change is not None:
        change(model)
    plan = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=every if is_last else 4))
    with pytest.raises(gw.DisagreementError) as error:
        gw.islands(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (append, "rank 0 has 4 tensors, rank 1 has 6 tensors"),
        (count, "rank 0 has 4 tensors, rank 1 has 5 tensors"),
        (widen, r"rank 0 has \['0.weight', \[4, 3\], 'torch.float32', 'trains'\], rank 1 has \['0.weight', \[8, 3\]"),
        (round_off, "'torch.float32', 'trains'.* rank 1 has .*'torch.bfloat16', 'trains'"),
        (freeze, r"\['1.weight', \[4, 4\], 'torch.float32', 'trains'\], rank 1 has .*'frozen'"),
    ],
)
def test_other_models_are_refused_on_all_islands(worlds: Worlds, change: Any, words: str) -> None:
    """Torch's collectives end a process where tensors have other sizes."""
    first, second = worlds.run(2, said_of, change, 4)
    assert first == second and re.search(words, first), first


def test_another_number_of_steps_is_named(worlds: Worlds) -> None:
    for said in worlds.run(2, said_of, None, 5):
        assert "disagree on the plan" in said and "LocalSteps(every=4)" in said and "LocalSteps(every=5)" in said


def of_unlike_shards() -> str:
    """The error where islands have other shards at one place only."""
    mesh = mesh_of(2, 2)
    model = nn.Linear(3, 3 if dist.get_rank() < 2 else 4)  # the first of two ranks has two rows of both
    fully_shard(model, mesh=mesh["inside"])
    plan = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=4))
    with pytest.raises(gw.DisagreementError) as error:
        gw.islands(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh, plan)
    return str(error.value)


def test_all_ranks_of_an_island_refuse_other_models(worlds: Worlds) -> None:
    assert all("[3, 3]" in said and "[4, 3]" in said for said in worlds.run(4, of_unlike_shards))


def with_a_problem_on_rank_3(problem: str) -> tuple[str, str]:
    """The kind of the error, and its words."""
    mesh, model = mesh_of(2, 2), nn.Linear(3, 4)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    plan: Any = gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=4))
    if dist.get_rank() == 3:
        model.register_buffer("seen", torch.zeros(2, device="meta" if problem == "memory" else "cpu"))
        optimizer = None if problem == "optimizer" else optimizer
        plan = gw.QSGD(bits=4) if problem == "plan" else plan
    with pytest.raises(gw.GradwireError) as error:
        gw.islands(model, optimizer, mesh, plan)
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize(
    ("problem", "words"),
    [("memory", "'seen' has no memory yet"), ("optimizer", "optimizer is NoneType"), ("plan", "islands train apart")],
)
def test_a_problem_of_one_rank_is_told_on_all_ranks(worlds: Worlds, problem: str, words: str) -> None:
    *others, (kind, said) = worlds.run(4, with_a_problem_on_rank_3, problem)
    assert kind == "PlanError" and words in said
    assert all(kind == "DisagreementError" and f"rank 3: PlanError: {said}" in told for kind, told in others)


def without_rank_1(call: Callable[[Any], Any]) -> tuple[str, tuple[int, ...]]:
    group: Any = dist.group.WORLD
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(gw.CommunicationError) as error:
        call(group)
    return str(error.value), error.value.ranks


def shares(group: Any) -> None:
    share_inside(group, {"weight": torch.zeros(3)}, {"weight": 1})


def loads(group: Any) -> None:
    outer: Any = SimpleNamespace(weights={"weight": torch.zeros(3)})
    IslandState(outer, None, group, group).load({})


def of_lighthouse(group: Any) -> IslandLighthouse:
    lighthouse = IslandLighthouse.__new__(IslandLighthouse)
    lighthouse._island, lighthouse.place = group, 1
    return lighthouse


def agrees(group: Any) -> None:
    of_lighthouse(group).all_agree(True)


def asks(group: Any) -> None:
    of_lighthouse(group)._of_first(b"")


@pytest.mark.parametrize("call", [shares, loads, agrees, asks])
def test_a_rank_that_died_is_named_on_its_island(call: Callable[[Any], Any]) -> None:
    with World(2, 30.0) as world:
        world.start(without_rank_1, call)
        survivor, _ = world.collect(60, needed={0})
    assert survivor.kind == "returned", survivor.value
    said, ranks = survivor.value
    assert said.startswith("rank 0: one of the ranks [1] died or stalled") and ranks == (1,)


class BrokenIsland(Answers):
    """The lighthouse of an island of which a rank died."""

    def all_do(self, action: Callable[[], None]) -> None:
        raise LostRankError("rank 1 died")


def test_an_island_that_lost_a_rank_asks_for_no_other_quorum() -> None:
    """Each question would fail, for ever: all of its ranks would have to answer."""
    lighthouse: Any = BrokenIsland(answer())
    members = Members({"weight": TensorMeta((2,))}, gw.Identity(), MemberState(dict, print), lighthouse)  # type: ignore[arg-type]
    with pytest.raises(LostRankError):
        members.meet()
