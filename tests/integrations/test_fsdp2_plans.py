"""Plans in FSDP2: compressors by module, and those that auto chooses."""

import io
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from worlds import Worlds, digest, mesh_of, seeded

import gradwire as gw
from gradwire.auto.measured_losses import WEIGHTED_4
from gradwire.core import Cluster, Link
from gradwire.integrations import fsdp2
from gradwire.integrations.fsdp2_plans import ModuleSpecs, policy_for

WIDE = gw.Where(min_numel=10_000)
WARMING = gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), warm_up_steps=3)


def sharded(**options: Any) -> nn.Sequential:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 400), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4))
    for layer in (model[1], model[3]):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def train(model: nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        data = torch.randn(8, 20, generator=seeded(step, dist.get_rank()))
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.full_tensor().flatten() for each in model.parameters()])


def by_module(plan: Any) -> dict[str, int]:
    """The bytes that a step sends for each module."""
    model = sharded()
    exchanges = fsdp2.compress(model, plan)
    train(model, range(2))
    sent = {name.removeprefix("gradients of "): each.wire_bytes for name, each in exchanges.stats().items()}
    exchanges.close()
    return sent


def test_a_policy_chooses_by_names_and_sizes_of_modules(worlds: Worlds) -> None:
    exact, mixed = (
        worlds.run(2, by_module, plan)[0]
        for plan in (gw.Identity(), gw.Policy(default=gw.Identity(), rules=[("3", gw.QSGD(bits=8)), (WIDE, gw.QSGD(bits=4))]))
    )
    assert mixed["model"] == exact["model"]
    assert 0.24 < mixed["3"] / exact["3"] < 0.32
    assert 0.12 < mixed["1"] / exact["1"] < 0.14


def in_a_group(rules: list[tuple[Any, gw.Spec]]) -> tuple[str, list[str], float, list[str]]:
    """The line, the exchanges and the share of its bytes that a group of two modules sends; and the compressors of auto."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 400), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4))
    fully_shard([model[1], model[3]])
    fully_shard(model)
    exchanges = fsdp2.compress(model, gw.Policy(default=gw.QSGD(bits=4), rules=rules))
    train(model, range(2))
    stats, line = exchanges.stats(), exchanges.describe()
    exchanges.close()
    sent = stats["gradients of 1 + 3"]
    auto = fsdp2.compress(model)
    train(model, range(1))
    auto.close()
    assert auto.decision is not None
    return line, sorted(stats), sent.wire_bytes / sent.gradient_bytes, sorted(auto.decision.specs)


WHOLE_GROUP = gw.Where("1 + 3")


@pytest.mark.parametrize("which", ["1", "3", "1|3", gw.Where(min_numel=100_000), WHOLE_GROUP])
def test_modules_that_are_sharded_together_have_one_compressor(worlds: Worlds, which: Any) -> None:
    (line, names, share, chosen), other = worlds.run(2, in_a_group, [(which, gw.Identity())])
    assert "1 module with QSGD(bits=4" in line and "1 module uncompressed" in line
    assert names == ["gradients of 1 + 3", "gradients of model"] and chosen == ["1 + 3", "model"]
    assert share == other[2] > 0.49  # 4 bits: an eighth of it


def refused_for_a_group() -> str:
    model = nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 4))
    fully_shard([model[0], model[1]])
    with pytest.raises(gw.PlanError) as raised:
        fsdp2.compress(model, gw.Policy(default=gw.QSGD(bits=4), rules=[("0", gw.Identity()), ("*", gw.QSGD(bits=8))]))
    return str(raised.value)


def test_two_compressors_for_modules_that_are_sharded_together_are_refused(worlds: Worlds) -> None:
    for words in worlds.run(2, refused_for_a_group):
        assert "Identity() for '0' and QSGD(bits=8" in words and "for '1'" in words and "'0|1'" in words


def with_links(gbps: float, accuracy: str) -> tuple[str, list[str], str]:
    """What auto chose on links of this rate: its line, the compressor of each module; and the weights after some steps."""
    link = Link(50.0, gbps)
    cluster = Cluster(nodes=dist.get_world_size(), ranks_per_node=1, intra=link, inter=link)
    model = sharded()
    exchanges = fsdp2.compress(model, accuracy=accuracy)
    assert exchanges.decision is None
    with mock.patch("gradwire.auto.alone.cluster_of", lambda ranks, seconds: cluster):
        train(model, range(4))
    decision = exchanges.decision
    assert decision is not None
    exchanges.close()
    return str(decision), [repr(decision.specs[name]) for name in ("1", "3", "model")], digest([whole(model)])


@pytest.mark.parametrize("ranks", [2, 3])
def test_auto_compresses_on_slow_links_alone(worlds: Worlds, ranks: int) -> None:
    slow, fast, exact = (
        worlds.run(ranks, with_links, gbps, accuracy) for gbps, accuracy in ((0.01, "safe"), (1000.0, "safe"), (0.01, "exact"))
    )
    for ends in (slow, fast, exact):
        assert len(set(map(str, ends))) == 1, "ranks differ"
    smallest = repr(gw.QSGD(bits=4))
    assert slow[0][1][0] == smallest and smallest in slow[0][0]
    assert fast[0][1] == exact[0][1] == [repr(gw.Identity())] * 3
    assert "uncompressed: gradient exchanges take" in exact[0][0]


def of_a_root_without_parameters(plan: Any, parameters: gw.Spec | None) -> tuple[list[str], str]:
    """The exchanges of a model each of whose layers is sharded by itself, and its weights after some steps."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    exchanges = fsdp2.compress(model, plan, parameters)
    train(model, range(2))
    names = sorted(exchanges.stats())
    exchanges.close()
    return names, digest([whole(model)])


@pytest.mark.parametrize("parameters", [None, gw.QSGD(bits=8)], ids=str)
@pytest.mark.parametrize("plan", ["auto", gw.QSGD(bits=4)], ids=str)
def test_the_root_may_own_no_parameters(worlds: Worlds, plan: Any, parameters: gw.Spec | None) -> None:
    first, second = worlds.run(2, of_a_root_without_parameters, plan, parameters)
    what = ["gradients"] if parameters is None else ["gradients", "parameters"]
    assert first == second and first[0] == [f"{each} of {layer}" for each in what for layer in (0, 1)]


def measured(_: None) -> bool:
    model = sharded()
    exchanges = fsdp2.compress(model)
    train(model, range(2))
    first = exchanges.decision
    train(model, range(2))
    exchanges.close()
    return first is not None and exchanges.decision is first and first.us > 0


def test_auto_measures_links_in_the_first_backward_and_once(worlds: Worlds) -> None:
    assert all(worlds.run(2, measured, None))


def resumed(plan: Any, steps: int) -> bool:
    """Whether a run that loads a state after so many steps goes on bit for bit, under what auto had chosen."""
    model = sharded()
    exchanges = fsdp2.compress(model, plan)
    train(model, range(steps))
    saved, weights = exchanges.state_dict(), io.BytesIO()
    torch.save({name: value.to_local() for name, value in model.state_dict().items()}, weights)
    assert (exchanges.decision is not None) == (plan == "auto")
    train(model, range(steps, 6))
    expected = whole(model)
    exchanges.close()
    model = sharded()
    weights.seek(0)
    with torch.no_grad():
        for name, value in torch.load(weights).items():
            model.state_dict()[name].to_local().copy_(value)
    exchanges = fsdp2.compress(model, plan)
    exchanges.load_state_dict(saved)
    train(model, range(steps, 6))
    exchanges.close()
    return exchanges.decision is None and torch.equal(whole(model), expected)


def test_a_state_keeps_what_auto_chose(worlds: Worlds) -> None:
    assert all(worlds.run(2, resumed, "auto", 3))


def with_another_accuracy() -> tuple[str, bool]:
    """What `load_state_dict` says to the state of a slow link under accuracy="exact", and whether "safe" takes it up."""
    link = Link(50.0, 0.01)
    cluster = Cluster(nodes=2, ranks_per_node=1, intra=link, inter=link)
    model = sharded()
    exchanges = fsdp2.compress(model)
    with mock.patch("gradwire.auto.alone.cluster_of", lambda ranks, seconds: cluster):
        train(model, range(1))
    saved = exchanges.state_dict()
    exchanges.close()
    with pytest.raises(ValueError, match="does not allow") as raised:
        fsdp2.compress(model, accuracy="exact").load_state_dict(saved)
    again = fsdp2.compress(model, accuracy="safe")
    again.load_state_dict(saved)
    return str(raised.value), gw.QSGD(bits=4) in again._specs.used


def test_a_state_with_compressors_that_the_accuracy_forbids_is_refused(worlds: Worlds) -> None:
    for words, taken in worlds.run(2, with_another_accuracy):
        assert taken and "accuracy='exact' does not allow the saved plan's QSGD(bits=4" in words
        assert "Load the state with the accuracy=" in words


def test_what_auto_chose_in_an_earlier_release_goes_on() -> None:
    chosen: gw.Spec = gw.ErrorFeedback(gw.QSGD(bits=2))
    specs = ModuleSpecs({}, "auto", None, "aggressive")
    with mock.patch("torch.distributed.get_world_size", lambda: 2):
        specs.load({"model": policy_for(chosen, None).to_json(None)})
        with pytest.raises(ValueError, match=r"accuracy='aggressive' allowed in gradwire 0\.3\. Load the state with that"):
            ModuleSpecs({}, "auto", None, "safe").load({"model": policy_for(chosen, None).to_json(None)})
    assert specs.used == [chosen]


def test_what_needs_whole_gradients_is_refused() -> None:
    """FSDP2 gives each rank a shard, and each would be clipped by its own norm."""
    with pytest.raises(gw.PlanError, match="needs whole tensors, and FSDP2 gives each rank a shard"):
        ModuleSpecs({}, "auto", "alltoall", "safe")._set({"model": gw.DGC(clip=1.0)})


@pytest.mark.parametrize("steps", [2, 4])
def test_a_state_of_a_spec_that_warms_up(worlds: Worlds, steps: int) -> None:
    assert all(worlds.run(2, resumed, WARMING, steps))


def warmed(plan: Any) -> tuple[list[int], str]:
    """The bytes that each of five steps sends for the module "1", and the weights after them."""
    model, sent = sharded(), []
    exchanges = fsdp2.compress(model, plan)
    for step in range(5):
        train(model, range(step, step + 1))
        sent.append(exchanges.stats()["gradients of 1"].wire_bytes)
    exchanges.close()
    return sent, digest([whole(model)])


def test_first_steps_send_more_bits(worlds: Worlds) -> None:
    ends = worlds.run(2, warmed, WARMING)
    steady, two_bits = (worlds.run(2, warmed, msgspec.structs.replace(WARMING, warm_up_steps=n))[0][0] for n in (9, 0))
    assert ends[0] == ends[1]
    assert ends[0][0] == [*steady[:3], *two_bits[3:]]
    assert steady[0] > 1.7 * two_bits[0]


def hybrid(plan: Any, steps: int) -> tuple[bool, str]:
    """Whether auto chose the compressors between nodes, and the weights after so many steps."""
    mesh = mesh_of(2, 2)
    model = sharded(mesh=mesh["inside"])
    exchanges = fsdp2.replicate(model, mesh["between"].get_group(), plan)
    train(model, range(steps))
    decided = exchanges.decision is not None
    exchanges.close()
    return decided, digest([whole(model)])


@pytest.mark.parametrize(("plan", "steps"), [("auto", 3), (WEIGHTED_4, 24)])
def test_replicas_are_alike(worlds: Worlds, plan: Any, steps: int) -> None:
    """The second one also after its first steps, which send 4 bits."""
    ends = worlds.run(4, hybrid, plan, steps)
    assert all(decided == (plan == "auto") for decided, _ in ends) and len({weights for _, weights in ends}) == 1


def misused() -> list[str]:
    model, found = sharded(), []
    for plan, accuracy in (
        ("fast", "safe"),
        ("auto", "good"),
        (gw.QSGD(bits=4), "exact"),
        (gw.RandomK(0.1), "safe"),
        (3, "safe"),
        (WEIGHTED_4, "safe"),
    ):
        with pytest.raises(gw.PlanError) as raised:
            fsdp2.compress(model, plan, accuracy=accuracy)  # type: ignore[arg-type]
        found.append(str(raised.value))
    with pytest.raises(gw.PlanError) as raised:
        fsdp2.compress(model, gw.Policy(default=gw.Identity(), rules=[("head", gw.QSGD(bits=4))]))
    return [*found, str(raised.value)]


def test_wrong_plans_are_refused_by_name(worlds: Worlds) -> None:
    for messages in worlds.run(2, misused):
        wanted = ("'fast'", "'good'", "would have no effect", "alltoall", "plan is 3", "whole means", "'head'")
        assert all(each in message for each, message in zip(wanted, messages, strict=True)), messages
