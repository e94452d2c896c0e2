"""FSDP2 with gradwire: its own numbers under an identity plan, residuals, states; HSDP on 2 x 2 ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from worlds import Worlds, digest, seeded

import gradwire as gw
from gradwire.integrations import fsdp2

FEEDBACK = gw.ErrorFeedback(gw.QSGD(bits=2))


def network() -> nn.Sequential:
    """Sizes that two and four ranks do not divide."""
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(33, 33), nn.Tanh(), nn.LayerNorm(33)) for _ in range(3)]
    return nn.Sequential(nn.Linear(7, 33), *blocks, nn.Linear(33, 5))


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model[1:-1]:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(size, 7, generator=seeded(step, dist.get_rank()))
    noise = torch.randn(size, 5, generator=seeded(step, dist.get_rank(), 1))
    return inputs, (inputs @ torch.randn(7, 5, generator=seeded(2)) + 2 * noise).argmax(1)


def train(model: nn.Module, steps: range, accumulate: int = 1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in steps:
        for part in range(accumulate):
            if accumulate > 1:
                model.set_requires_gradient_sync(part == accumulate - 1)
            inputs, labels = batch(step * accumulate + part)
            nn.functional.cross_entropy(model(inputs).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(model: nn.Module) -> torch.Tensor:
    """All parameters, of all ranks."""
    return torch.cat([parameter.full_tensor().detach().reshape(-1).double() for parameter in model.parameters()])


def beside_fsdp(options: dict[str, Any], accumulate: int) -> float:
    """The largest difference from FSDP2's own weights after some steps, over the largest change of these."""
    ends = []
    for ours in (False, True):
        model = sharded(network(), **options)
        first = whole(model)
        exchanges = fsdp2.compress(model, gw.Identity()) if ours else None
        train(model, range(5), accumulate)
        ends.append(whole(model))
        if exchanges is not None:
            exchanges.close()
    return ((ends[1] - ends[0]).abs().max() / (ends[0] - first).abs().max()).item()


PRECISIONS = {
    "float32": ({}, 1e-6),
    "bfloat16": ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 0.02),
    "float16": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, 2e-3),
}


@pytest.mark.parametrize(("precision", "accumulate"), [("float32", 1), ("float32", 3), ("bfloat16", 1), ("float16", 1)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_are_those_of_fsdp(worlds: Worlds, ranks: int, precision: str, accumulate: int) -> None:
    options, tolerance = PRECISIONS[precision]
    for difference in worlds.run(ranks, beside_fsdp, options, accumulate):
        assert difference <= tolerance


def learned(compressed: bool) -> float:
    """The loss at the end, on inputs that were not trained on."""
    model = sharded(network())
    exchanges = fsdp2.compress(model, gw.QSGD(bits=4)) if compressed else None
    train(model, range(300))
    with torch.no_grad():
        inputs, labels = batch(1000, size=4000)
        loss = nn.functional.cross_entropy(model(inputs), labels)
    if exchanges is not None:
        exchanges.close()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


@pytest.mark.slow
def test_the_loss_is_that_of_fsdp_with_4_bits(worlds: Worlds) -> None:
    plain, ours = (worlds.run(2, learned, compressed)[0] for compressed in (False, True))
    assert plain < 1.2
    assert ours == pytest.approx(plain, rel=0.01)


def resumed() -> bool:
    """Whether a run that was taken up goes on bit for bit, and there were residuals."""
    model = sharded(network())
    exchanges = fsdp2.compress(model, FEEDBACK)
    optimizer = train(model, range(3))
    assert optimizer.state
    optimizer.state.clear()  # the momentum begins anew in both
    saved = {key: value.clone() for key, value in exchanges.state_dict().items()}
    weights = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    assert any("residual" in key and value.abs().max() > 0 for key, value in saved.items())
    train(model, range(3, 6))
    other = sharded(network())
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), weights, strict=True):
            parameter.to_local().copy_(value)
    second = fsdp2.compress(other, FEEDBACK)
    second.load_state_dict(saved)
    assert digest(second.state_dict().values()) == digest(saved.values())
    train(other, range(3, 6))
    ends = [digest([*(p.to_local() for p in each.parameters())]) for each in (model, other)]
    states = [digest(each.state_dict().values()) for each in (exchanges, second)]
    for each in (exchanges, second):
        each.close()
    return ends[0] == ends[1] and states[0] == states[1]


def test_a_state_is_taken_up_bit_for_bit(worlds: Worlds) -> None:
    assert worlds.run(2, resumed) == [True, True]


def hybrid(spec: gw.Spec) -> tuple[float, float, float]:
    """On 2 x 2 ranks: the difference from HSDP's weights, over their change; how far replicas are apart; bytes over fp32's."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
    native = sharded(network(), mesh=mesh)
    first = whole(native)
    train(native, range(5))
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += dist.get_rank() // 2  # replicas differ before replicate()
    sharded(model, mesh=mesh["inside"])
    group = mesh["between"].get_group()
    exchanges = fsdp2.replicate(model, group, spec)
    train(model, range(5))
    ours = whole(model)
    other = ours.clone()
    dist.broadcast(other, dist.get_global_rank(group, 0), group=group)
    sent = [exchanges.exchange_of(name, {}, group).stats() for name in exchanges.modules]
    ratio = sum(each.wire_bytes for each in sent) / sum(each.gradient_bytes for each in sent)
    exchanges.close()
    change = (whole(native) - first).abs().max()
    return ((ours - whole(native)).abs().max() / change).item(), (ours - other).abs().max().item(), ratio


def test_hsdp_on_two_by_two_ranks(worlds: Worlds) -> None:
    for difference, apart, ratio in worlds.run(4, hybrid, gw.Identity()):
        assert difference <= 1e-6 and apart == 0 and ratio == pytest.approx(1.0, rel=0.05)
    for difference, apart, ratio in worlds.run(4, hybrid, gw.QSGD(bits=4)):
        assert difference < 0.5 and apart == 0 and ratio <= 0.15


def said(act: Callable[[], Any]) -> str:
    try:
        act()
    except (gw.GradwireError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misused() -> list[str]:
    told = [said(lambda: fsdp2.compress(network(), gw.QSGD(bits=4)))]
    model = sharded(network())
    told.append(said(lambda: fsdp2.compress(model, gw.DGC(warm_up_steps=10))))
    told.append(said(lambda: fsdp2.compress(model, "auto")))  # type: ignore[arg-type]
    told.append(said(lambda: fsdp2.compress(model, gw.RandomK(0.1))))
    exchanges = fsdp2.compress(model, gw.QSGD(bits=4))
    told.append(said(lambda: exchanges.load_state_dict({"other/rank0/step": torch.tensor(1)})))
    train(model, range(1))
    told.append(said(lambda: exchanges.load_state_dict({})))
    exchanges.close()
    return told


SAID = (
    "PlanError: fully_shard was called on no module", "PlanError: spec is DGC", "PlanError: spec is 'auto'",
    "PlanError: scheme is 'alltoall', but tensor 'model' has spec RandomK",
    "ValueError: the state has 'other/rank0/step'", "PlanError: load_state_dict() was called after a backward",
)  # fmt: skip


def test_wrong_use_is_told_in_words(worlds: Worlds) -> None:
    for told in worlds.run(2, misused):
        assert [words[: len(start)] for words, start in zip(told, SAID, strict=True)] == list(SAID)
