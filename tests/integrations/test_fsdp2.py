"""FSDP2 with gradwire: its own numbers under an identity plan, residuals, states; HSDP on 2 x 2 ranks."""

import gc
import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loss_scales import scaled_steps
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from worlds import Worlds, digest, gradwire_threads, mesh_of, seeded

import gradwire as gw
from gradwire.integrations import fsdp2
from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.packs import ModulePacks

FEEDBACK = gw.ErrorFeedback(gw.QSGD(bits=2))


def network(width: int = 33) -> nn.Sequential:
    """Sizes that two and four ranks do not divide."""
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(3)]
    return nn.Sequential(nn.Linear(7, width), *blocks, nn.Linear(width, 5))


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


def with_a_group_beside() -> tuple[str, bool]:
    """The digest of the weights with a group for gradwire alone, and whether its lanes use that group."""
    beside = dist.new_group(backend="gloo")
    model = sharded(network())
    exchanges = fsdp2.compress(model, gw.QSGD(bits=4), process_group=beside)
    train(model, range(2))
    used = [lanes.group.process_group is beside for lanes in exchanges._lanes.values()]
    ends = digest([whole(model)])
    exchanges.close()
    return ends, used == [True]


def test_gradwire_can_have_a_group_beside_fsdps(worlds: Worlds) -> None:
    first, second = worlds.run(2, with_a_group_beside)
    assert first == second and first[1]


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


def learned(compressed: bool, parameters: gw.Spec | None = None) -> float:
    """The loss at the end, on inputs that were not trained on."""
    model = sharded(network())
    exchanges = fsdp2.compress(model, gw.QSGD(bits=4), parameters) if compressed else None
    train(model, range(300))
    if exchanges is not None:
        sent = [each for name, each in exchanges.stats().items() if name.startswith("gradients of ")]
        assert len(sent) == len(exchanges.modules)
        assert all(each.steps == 300 and each.wire_bytes < each.gradient_bytes / 3 for each in sent)
    with torch.no_grad():
        inputs, labels = batch(1000, size=4000)
        loss = nn.functional.cross_entropy(model(inputs), labels)
    if exchanges is not None:
        exchanges.close()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


@pytest.mark.slow
@pytest.mark.thorough
def test_the_loss_is_that_of_fsdp_with_4_bits(worlds: Worlds) -> None:
    plain, ours = (worlds.run(2, learned, compressed)[0] for compressed in (False, True))
    assert plain < 1.2
    assert ours == pytest.approx(plain, rel=0.01)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_loss_is_that_of_fsdp_with_compressed_weights(worlds: Worlds) -> None:
    plain = worlds.run(2, learned, False)[0]
    for parameters in (gw.Cast(), gw.QSGD(bits=8)):
        assert worlds.run(2, learned, True, parameters)[0] == pytest.approx(plain, rel=0.01)


def resumed(folder: str, parameters: gw.Spec | None, replicas: bool) -> bool:
    """Whether a run that was taken up from PyTorch's distributed checkpoint goes on bit for bit, and there were residuals."""
    mesh = mesh_of(2, 2) if replicas else None

    def made() -> tuple[nn.Module, fsdp2.ModuleExchanges]:
        if mesh is None:
            model = sharded(network())
            return model, fsdp2.compress(model, FEEDBACK, parameters=parameters)
        model = sharded(network(), mesh=mesh["inside"])
        return model, fsdp2.replicate(model, mesh["between"].get_group(), FEEDBACK)

    model, exchanges = made()
    train(model, range(3))
    dcp.save({"model": model.state_dict(), "gradwire": exchanges}, checkpoint_id=folder)
    train(model, range(3, 6))
    other, second = made()
    weights = other.state_dict()
    dcp.load({"model": weights, "gradwire": second}, checkpoint_id=folder)
    other.load_state_dict(weights)
    train(other, range(3, 6))
    (own,) = exchanges.state_dict().values()
    states = torch.load(io.BytesIO(own), weights_only=True)
    packs = [state for name, each in states.items() if name.startswith("gradients of ") for _, state in each["packs"]]
    kept = [value.abs().max() for each in packs for key, value in each.items() if "residual" in key]
    ends = [digest([*(p.to_local() for p in each.parameters())]) for each in (model, other)]
    same = exchanges.state_dict() == second.state_dict()
    for each in (exchanges, second):
        each.close()
    return bool(kept) and max(kept) > 0 and ends[0] == ends[1] and same


@pytest.mark.parametrize(("ranks", "parameters"), [(2, None), (2, gw.QSGD(bits=8)), (4, None)])
def test_a_distributed_checkpoint_goes_on_bit_for_bit(
    worlds: Worlds, tmp_path: Path, ranks: int, parameters: gw.Spec | None
) -> None:
    assert worlds.run(ranks, resumed, str(tmp_path / "saved"), parameters, ranks == 4) == [True] * ranks


def gathered(parameters: gw.Spec, **options: Any) -> tuple[float, bool]:
    """With rounded parameters: the largest error of an output, over the largest output; whether the sharded parameters stay
    exact and ranks compute with the same weights."""
    model = sharded(network(), **options)
    before = whole(model)
    inputs = torch.randn(64, 7, generator=seeded(9))  # the same on all ranks
    outputs = []
    for compress in (False, True):
        exchanges = fsdp2.compress(model, gw.Identity(), parameters=parameters) if compress else None
        with torch.no_grad():
            outputs.append(model(inputs).float())
        model.reshard()
    other = outputs[1].clone()
    dist.broadcast(other, 0)
    exchanges.close()
    error = (outputs[1] - outputs[0]).abs().max() / outputs[0].abs().max()
    return error.item(), torch.equal(before, whole(model)) and torch.equal(outputs[1], other)


@pytest.mark.parametrize(("parameters", "limit"), [(gw.Identity(), 0.0), (gw.Cast(), 1e-3), (gw.QSGD(bits=8), 0.05)], ids=repr)
@pytest.mark.parametrize("ranks", [2, 3])
def test_forward_weights_are_rounded_and_the_sharded_ones_exact(
    worlds: Worlds, ranks: int, parameters: gw.Spec, limit: float
) -> None:
    for error, same in worlds.run(ranks, gathered, parameters):
        assert same and error <= limit and (error > 0) == (limit > 0)


@pytest.mark.parametrize("parameters", [gw.Identity(), gw.QSGD(bits=8)], ids=repr)
def test_parameters_in_bfloat16_are_gathered(worlds: Worlds, parameters: gw.Spec) -> None:
    narrow = partial(gathered, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for error, same in worlds.run(2, narrow, parameters):
        assert same and error <= (0.05 if parameters != gw.Identity() else 0)


def hybrid(spec: gw.Spec, width: int) -> tuple[float, float, float]:
    """On 2 x 2 ranks: the difference from HSDP's weights, over their change; how far replicas are apart; bytes over fp32's."""
    mesh = mesh_of(2, 2)
    native = sharded(network(width), mesh=mesh)
    first = whole(native)
    train(native, range(5))
    model = network(width)
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
    sent = exchanges.stats().values()
    assert len(sent) == len(exchanges.modules)
    ratio = sum(each.wire_bytes for each in sent) / sum(each.gradient_bytes for each in sent)
    exchanges.close()
    change = (whole(native) - first).abs().max()
    return ((ours - whole(native)).abs().max() / change).item(), (ours - other).abs().max().item(), ratio


def test_hsdp_on_two_by_two_ranks(worlds: Worlds) -> None:
    for difference, apart, ratio in worlds.run(4, hybrid, gw.Identity(), 33):
        assert difference <= 1e-6 and apart == 0 and ratio == pytest.approx(1.0, rel=0.05)
    for difference, apart, ratio in worlds.run(4, hybrid, gw.QSGD(bits=4), 129):
        assert difference < 0.5 and apart == 0 and ratio <= 0.14


def said(act: Callable[[], Any]) -> str:
    try:
        act()
    except (gw.GradwireError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misused() -> list[str]:
    told = [said(lambda: fsdp2.compress(network(), gw.QSGD(bits=4)))]
    model = sharded(network())
    told.append(said(lambda: fsdp2.compress(model, 4)))  # type: ignore[arg-type]
    told.append(said(lambda: fsdp2.compress(model, "fast")))
    told.append(said(lambda: fsdp2.compress(model, gw.RandomK(0.1))))
    exchanges = fsdp2.compress(model, gw.QSGD(bits=4))
    told.append(said(lambda: fsdp2.compress(model, gw.QSGD(bits=4), parameters=gw.TopK(0.1))))
    told.append(said(lambda: exchanges.load_state_dict({"rank7": b""})))
    for wrong in ({"gradients of other": {}}, {"gradients of model": {"rank0/step": torch.tensor(3)}}, {"ranks": 3}):
        own = {f"rank{dist.get_rank()}": to_bytes(wrong)}
        told.append(said(partial(exchanges.load_state_dict, own)))
    train(model, range(1))
    told.append(said(lambda: exchanges.load_state_dict({})))
    exchanges.close()
    return told


SAID = (
    "PlanError: fully_shard was called on no module", "PlanError: plan is 4", "PlanError: plan is 'fast'",
    "PlanError: scheme is 'alltoall', but tensor 'model' has spec RandomK",
    "PlanError: parameters is TopK", "ValueError: the state has no rank",
    "ValueError: the state has 'gradients of other'", "ValueError: the state does not say which parameters",
    "ValueError: 3 ranks saved the state, and these are 2", "PlanError: load_state_dict() was called after a step",
)  # fmt: skip


def test_wrong_use_is_told_in_words(worlds: Worlds) -> None:
    for told in worlds.run(2, misused):
        assert [words[: len(start)] for words, start in zip(told, SAID, strict=True)] == list(SAID)


class Heads(nn.Module):
    """A trunk, and heads of which a step uses one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(7, 8)
        self.heads = nn.ModuleList(nn.Linear(8, size) for size in sizes)

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(inputs).tanh())


class Fsdp:
    """A model under FSDP2 with gradwire's exchanges; its gradients added up over steps."""

    def __init__(self, sizes: tuple[int, ...], spec: gw.Spec | None, parameters: gw.Spec | None, **options: Any) -> None:
        self.model = fully_shard(Heads(*sizes), **options)
        self.exchanges = fsdp2.compress(self.model, spec, parameters) if spec is not None else None
        self.sums: dict[str, torch.Tensor] = {}

    def step(self, step: int, head: int, scale: float = 1.0) -> None:
        inputs = torch.randn(8, 7, generator=seeded(step, dist.get_rank()))
        (scale * self.model(inputs, head)).square().mean().backward()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                whole = parameter.grad.full_tensor()
                self.sums[name] = self.sums.get(name, torch.zeros_like(whole)) + whole
                parameter.grad = None


def in_turns(sizes: tuple[int, ...], heads: list[int]) -> dict[str, float]:
    """How far each parameter's gradients, added up over steps without optimizer, are from FSDP2's own, over the latter."""
    plain, ours = Fsdp(sizes, None, None), Fsdp(sizes, FEEDBACK, None)
    for run in (plain, ours):
        for step, head in enumerate(heads):
            run.step(step, head)
    ours.exchanges.close()
    return {name: ((ours.sums[name] - whole).norm() / whole.norm()).item() for name, whole in plain.sums.items()}


@pytest.mark.parametrize("sizes", [(5, 5), (5, 9)], ids=["equal", "unequal"])
def test_residuals_follow_parameters_of_heads_that_are_used_in_turns(worlds: Worlds, sizes: tuple[int, ...]) -> None:
    """Error feedback loses nothing: over many steps the sum of gradients is that of FSDP2, for each parameter."""
    for apart in worlds.run(2, in_turns, sizes, [0, 1] * 30):
        assert len(apart) == 6 and max(apart.values()) < 0.1


def of_zero(sizes: tuple[int, ...]) -> float:
    """The norm of the other head's gradient after one head was used, where it is zero under FSDP2."""
    run = Fsdp(sizes, FEEDBACK, None)
    run.step(0, 0, scale=30.0)
    run.step(1, 1, scale=0.0)
    run.exchanges.close()
    return run.sums["heads.1.weight"].norm().item()


@pytest.mark.parametrize("sizes", [(5, 5), (5, 9)], ids=["equal", "unequal"])
def test_a_head_without_gradient_gets_none_of_another_head(worlds: Worlds, sizes: tuple[int, ...]) -> None:
    assert worlds.run(2, of_zero, sizes) == [0.0, 0.0]


def frozen_later() -> dict[str, float]:
    """As `in_turns`, with a part that is frozen for some steps: only its parameters are left out."""
    runs = Fsdp((5,), None, None), Fsdp((5,), FEEDBACK, None)
    for run in runs:
        for step in range(60):
            run.model.heads[0].requires_grad_(not 10 <= step < 20)
            run.step(step, 0)
    runs[1].exchanges.close()
    return {name: ((runs[1].sums[name] - s).norm() / s.norm()).item() for name, s in runs[0].sums.items()}


def test_a_part_that_is_frozen_later_keeps_its_residuals(worlds: Worlds) -> None:
    for apart in worlds.run(2, frozen_later):
        assert len(apart) == 4 and max(apart.values()) < 0.1


def resharded(parameters: gw.Spec) -> float:
    """The largest difference from FSDP2's own gradients where backward gathers from two of four ranks."""
    runs = [Fsdp((5,), spec, given, reshard_after_forward=2) for spec, given in ((None, None), (gw.Identity(), parameters))]
    for run in runs:
        for step in range(3):
            run.step(step, 0)
    runs[1].exchanges.close()
    return max((runs[1].sums[name] - s).abs().max().item() for name, s in runs[0].sums.items())


def test_parameters_that_are_gathered_from_another_group(worlds: Worlds) -> None:
    assert max(worlds.run(4, resharded, gw.Identity())) < 1e-5


def heads_between_replicas(heads: list[int]) -> dict[str, float]:
    """As `in_turns`, between the replicas of HSDP."""
    mesh = mesh_of(2, 2)
    plain, ours = Fsdp((5, 5), None, None, mesh=mesh), Fsdp((5, 5), None, None, mesh=mesh["inside"])
    ours.exchanges = fsdp2.replicate(ours.model, mesh["between"].get_group(), FEEDBACK)
    for run in (plain, ours):
        for step, head in enumerate(heads):
            run.step(step, head)
    ours.exchanges.close()
    return {name: ((ours.sums[name] - whole).norm() / whole.norm()).item() for name, whole in plain.sums.items()}


def test_residuals_follow_parameters_between_replicas(worlds: Worlds) -> None:
    for apart in worlds.run(4, heads_between_replicas, [0, 1] * 30):
        assert max(apart.values()) < 0.1


# ---- the scale of a GradScaler


def under_scales(how: str, scaled: bool) -> list[str]:
    """Digests of the means of each step, without the scale. Head 0 is left out in one step, in which the scale changes."""
    if how == "replicate":
        mesh = mesh_of(2, 1)
        run = Fsdp((5, 5), None, None, mesh=mesh["inside"])
        plan = gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.9)
        run.exchanges = fsdp2.replicate(run.model, mesh["between"].get_group(), plan)
    else:
        run = Fsdp((5, 5), FEEDBACK, None)
    means = []
    for step, scale_loss, scale in scaled_steps(scaled):
        inputs = torch.randn(8, 7, generator=seeded(step, dist.get_rank()))
        scale_loss(run.model(inputs, step % 2).square().mean()).backward()
        grads = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
        means.append(digest([grad.full_tensor() / scale for grad in grads]))
        run.model.zero_grad()
    run.exchanges.close()
    return means


@pytest.mark.parametrize("how", ["compress", "replicate"])
def test_residuals_follow_the_scale_of_the_loss(worlds: Worlds, how: str) -> None:
    assert worlds.run(2, under_scales, how, True) == worlds.run(2, under_scales, how, False)


def saved_under_a_scale(folder: str, scaled: bool) -> None:
    """Save after one step, with residuals of all parts."""
    model = sharded(network())
    exchanges = fsdp2.compress(model, FEEDBACK)
    _, scale_loss, _ = next(scaled_steps(scaled))
    scale_loss(model(batch(9)[0]).square().mean()).backward()
    dcp.save({"gradwire": exchanges}, checkpoint_id=folder)
    exchanges.close()


def thawed_under_scales(folder: str, scaled: bool) -> list[str]:
    """Digests of the means of each step after a resume, without the scale. A part is frozen until the scale has changed."""
    model = sharded(network())
    exchanges = fsdp2.compress(model, FEEDBACK)
    exchanges.load_state_dict(fsdp2.saved_states(folder))
    means = []
    for step, scale_loss, scale in scaled_steps(scaled):
        model[2].requires_grad_(step == 2)
        scale_loss(model(batch(step)[0]).square().mean()).backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        means.append(digest([grad.full_tensor() / scale for grad in grads]))
        model.zero_grad()
    exchanges.close()
    return means


@pytest.mark.parametrize("ranks", [2, 3], ids=["the same ranks", "more ranks"])
def test_residuals_that_wait_in_a_state_follow_the_scale_of_the_loss(worlds: Worlds, tmp_path: Path, ranks: int) -> None:
    found = []
    for scaled in (True, False):
        folder = str(tmp_path / f"{scaled}")
        worlds.run(2, saved_under_a_scale, folder, scaled)
        found.append(worlds.run(ranks, thawed_under_scales, folder, scaled))
    assert found[0] == found[1]


def refused(how: str) -> list[str]:
    """The errors of a scaled loss and of one with a scale of 1, with a spec that has a magnitude of its own for one module."""
    told = []
    plan = gw.Policy(default=gw.QSGD(bits=4), rules=[("model", gw.ErrorFeedback(gw.Threshold(0.5, capacity=1.0)))])
    for scale in (2.0**16, 1.0):
        model = network()
        if how == "replicate":
            mesh = mesh_of(2, 1)
            exchanges = fsdp2.replicate(sharded(model, mesh=mesh["inside"]), mesh["between"].get_group(), plan)
        else:
            exchanges = fsdp2.compress(sharded(model), plan)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        told.append(said(scaler.scale(model(batch(0)[0]).square().mean()).backward))
        exchanges.close()
    return told


@pytest.mark.parametrize("how", ["compress", "replicate"])
def test_a_spec_with_a_magnitude_of_its_own_is_refused_under_a_loss_scale(worlds: Worlds, how: str) -> None:
    for scaled, plain in worlds.run(2, refused, how):
        assert scaled.startswith("StepStateError: a GradScaler multiplied the loss by 65536, and the plan has ErrorFeedback(Thr")
        assert plain == ""


def resumed_in_turns(folder: str, last: int, first: int) -> bool:
    """Whether a run resumes bit for bit that saved after a step of head `last`, and goes on with head `first`."""
    before = Fsdp((5, 9), FEEDBACK, None)
    for step, head in enumerate([0, 1, 0, 1 - last, last]):
        before.step(step, head)
    dcp.save({"gradwire": before.exchanges}, checkpoint_id=folder)
    after = Fsdp((5, 9), FEEDBACK, None)
    dcp.load({"gradwire": after.exchanges}, checkpoint_id=folder)
    before.sums = {}
    for run in (before, after):
        for step, head in enumerate([first, 1 - first, first], 5):
            run.step(step, head)
    same = digest(before.sums.values()) == digest(after.sums.values())
    states = [run.exchanges.state_dict() for run in (before, after)]
    for run in (before, after):
        run.exchanges.close()
    return same and states[0].keys() == states[1].keys()


@pytest.mark.parametrize(("last", "first"), [(0, 0), (0, 1)])
def test_heads_in_turns_resume_bit_for_bit(worlds: Worlds, tmp_path: Path, last: int, first: int) -> None:
    assert worlds.run(2, resumed_in_turns, str(tmp_path / "saved"), last, first) == [True] * 2


def compressed_again() -> tuple[bool, bool]:
    """Whether a second `compress` without `parameters` gathers exact ones, and whether there are more threads than of one."""
    model, inputs = sharded(network()), torch.randn(4, 7, generator=seeded(1))
    with torch.no_grad():
        exact = model(inputs)
    exchanges = fsdp2.compress(model, FEEDBACK, gw.QSGD(bits=4))
    model(inputs).square().mean().backward()
    before = len(gradwire_threads())
    exchanges = fsdp2.compress(model, FEEDBACK)
    with torch.no_grad():
        same = torch.equal(model(inputs), exact)
    model(inputs).square().mean().backward()
    gc.collect()
    more = len(gradwire_threads()) > before  # threads of an earlier model of this process may end meanwhile
    exchanges.close()
    return same, more


def test_a_second_call_replaces_the_first_one(worlds: Worlds) -> None:
    assert worlds.run(2, compressed_again) == [(True, False)] * 2


FIFTHS = gw.ErrorFeedback(gw.TopK(0.2))


def begun(folder: str, replicas: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The exact gradients of one step, and those that arrived with residuals left, which are saved."""
    plain, ours = (on_replicas(replicas, spec) for spec in (None, FIFTHS))
    for run in (plain, ours):
        run.step(0, 0, scale=30.0)
    dcp.save({"gradwire": ours.exchanges}, checkpoint_id=folder)
    ours.exchanges.close()
    return plain.sums, ours.sums


def ended(folder: str, replicas: int) -> dict[str, torch.Tensor]:
    """The gradients of later steps, which have none of their own."""
    run = on_replicas(replicas, FIFTHS)
    with pytest.raises(ValueError, match="saved_states"):
        run.exchanges.load_state_dict({"rank0": fsdp2.saved_states(folder)["rank0"]})
    run.exchanges.load_state_dict(fsdp2.saved_states(folder))
    for step in range(12):
        run.step(step, 0, scale=0.0)
    run.exchanges.close()
    return run.sums


def on_replicas(replicas: int, spec: gw.Spec | None) -> Fsdp:
    """FSDP2 on all ranks, or with so many replicas HSDP."""
    if not replicas:
        return Fsdp((5,), spec, None)
    mesh = mesh_of(replicas, dist.get_world_size() // replicas)
    run = Fsdp((5,), None, None, mesh=mesh["inside"] if spec is not None else mesh)
    if spec is not None:
        run.exchanges = fsdp2.replicate(run.model, mesh["between"].get_group(), spec)
    return run


@pytest.mark.parametrize(("before", "after"), [((2, 0), (3, 0)), ((4, 2), (2, 2)), ((2, 2), (4, 2))], ids=str)
def test_residuals_survive_another_number_of_ranks(
    worlds: Worlds, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """What was not sent of a gradient is sent by the ranks that go on: the sum over all steps is the exact gradient."""
    exact, first = worlds.run(before[0], begun, str(tmp_path / "saved"), before[1])[0]
    later = worlds.run(after[0], ended, str(tmp_path / "saved"), after[1])[0]
    for name, whole in exact.items():
        missing, left = ((whole - each).norm() / whole.norm() for each in (first[name], first[name] + later[name]))
        assert missing > 0.01 and left < 1e-5, name


def passed_on(folder: str, into: str, replicas: int) -> None:
    """Load what another number of ranks saved, and save it before any backward."""
    run = on_replicas(replicas, FIFTHS)
    run.exchanges.load_state_dict(fsdp2.saved_states(folder))
    dcp.save({"gradwire": run.exchanges}, checkpoint_id=into)
    run.exchanges.close()


def ended_as_saved(folder: str, replicas: int) -> dict[str, torch.Tensor]:
    """As `ended`, with as many ranks as saved."""
    run = on_replicas(replicas, FIFTHS)
    dcp.load({"gradwire": run.exchanges}, checkpoint_id=folder)
    for step in range(12):
        run.step(step, 0, scale=0.0)
    run.exchanges.close()
    return run.sums


@pytest.mark.parametrize(
    ("ranks", "replicas", "last"), [((2, 3, 3), 0, ended_as_saved), ((3, 2, 3), 0, ended), ((4, 2, 4), 2, ended)]
)
def test_residuals_survive_a_save_before_the_first_backward(
    worlds: Worlds, tmp_path: Path, ranks: tuple[int, int, int], replicas: int, last: Callable[..., dict[str, torch.Tensor]]
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    exact, sent = worlds.run(ranks[0], begun, first, replicas)[0]
    worlds.run(ranks[1], passed_on, first, second, replicas)
    later = worlds.run(ranks[2], last, second, replicas)[0]
    for name, whole in exact.items():
        missing, left = ((whole - each).norm() / whole.norm() for each in (sent[name], sent[name] + later[name]))
        assert missing > 0.01 and left < 1e-5, name


def resaved_in_turns(folder: str, into: str) -> dict[str, torch.Tensor]:
    """Load what another number of ranks saved of two heads, use one, save, and go on with the other. The gradients of all these
    steps, which have none of their own."""
    run = Fsdp((5, 9), FIFTHS, None)
    run.exchanges.load_state_dict(fsdp2.saved_states(folder))
    for step in range(12):
        run.step(step, 0, scale=0.0)
    dcp.save({"gradwire": run.exchanges}, checkpoint_id=into)
    again = Fsdp((5, 9), FIFTHS, None)
    dcp.load({"gradwire": again.exchanges}, checkpoint_id=into)
    for step in range(12):
        again.step(step, 1, scale=0.0)
    sums = {name: run.sums.get(name, 0) + again.sums.get(name, 0) for name in {*run.sums, *again.sums}}
    for each in (run, again):
        each.exchanges.close()
    return sums


def begun_with_heads(folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    plain, ours = (Fsdp((5, 9), spec, None) for spec in (None, FIFTHS))
    for run in (plain, ours):
        for head in (0, 1):
            run.step(0, head, scale=30.0)
    dcp.save({"gradwire": ours.exchanges}, checkpoint_id=folder)
    ours.exchanges.close()
    return plain.sums, ours.sums


def test_a_head_that_was_not_used_yet_keeps_its_residuals_in_a_save(worlds: Worlds, tmp_path: Path) -> None:
    exact, sent = worlds.run(2, begun_with_heads, str(tmp_path / "first"))[0]
    later = worlds.run(3, resaved_in_turns, str(tmp_path / "first"), str(tmp_path / "second"))[0]
    for name in ("heads.0.weight", "heads.1.weight"):
        missing, left = ((exact[name] - each).norm() / exact[name].norm() for each in (sent[name], sent[name] + later[name]))
        assert missing > 0.01 and left < 1e-5, name


def test_states_of_two_saves_are_refused() -> None:
    states = {rank: {"step": 3 + rank, "packs": [], "kept": {}} for rank in range(2)}
    with pytest.raises(ValueError, match="different numbers of exchanges"):
        ModulePacks().load_others(states)


def one_state_does_not_fit() -> tuple[str, float]:
    """Rank 1's state was saved under another plan."""
    before = Fsdp((5,), FEEDBACK, None)
    before.step(0, 0)
    ((key, saved),) = before.exchanges.state_dict().items()
    states = from_bytes(saved)
    for _, state in states["gradients of model"]["packs"]:
        for name in [each for each in state if each.endswith("/plan")] if dist.get_rank() == 1 else ():
            state[name] = torch.zeros_like(state[name])
    before.exchanges.close()
    after = Fsdp((5,), FEEDBACK, None)
    after.exchanges.load_state_dict({key: to_bytes(states)})
    began = time.monotonic()
    with pytest.raises((ValueError, gw.DisagreementError)) as error:
        after.step(1, 0)
    after.exchanges.close()
    return str(error.value), time.monotonic() - began


def test_a_state_that_does_not_fit_on_one_rank_is_told_on_all_at_once(worlds: Worlds) -> None:
    (first, first_s), (second, second_s) = worlds.run(2, one_state_does_not_fit)
    assert "rank 1: the state was saved under plan 0000" in first
    assert second.startswith("the state was saved under plan 0000")
    assert max(first_s, second_s) < 30.0


def read_early(ours: bool, how: str) -> tuple[list[float], list[bool]]:
    """Gradients where something reads them before backward ends; and whether an exchange ran while backward went on."""
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)} if how == "converted" else {}
    model = sharded(network(), **options)
    exchanges = fsdp2.compress(model, gw.Identity()) if ours else None
    seen: list[float] = []
    if how == "hooked":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.to_local().double().sum().item()))
    if how == "all-reduce hook":
        for each in (*model[1:-1], model):
            each.set_all_reduce_hook(lambda reduced: seen.append(reduced.double().sum().item()))
    ran = []
    if exchanges is not None:
        model[0].register_full_backward_pre_hook(lambda *_: ran.append(exchanges._turns._running is not None))
    for step in range(2):
        inputs, labels = batch(step)
        nn.functional.cross_entropy(model(inputs).float(), labels).backward()
        if how == "ordinary":
            model.zero_grad()
    if how == "ordinary":
        nn.functional.cross_entropy(model(batch(3)[0]), batch(3)[1]).backward()
    seen += [parameter.grad.full_tensor().double().sum().item() for parameter in model.parameters()]
    if exchanges is not None:
        exchanges.close()
    return seen, ran


@pytest.mark.parametrize("how", ["ordinary", "added", "hooked", "all-reduce hook", "converted"])
def test_backward_waits_only_where_fsdp_reads_the_result_at_once(worlds: Worlds, how: str) -> None:
    for (theirs, _), (ours, ran) in zip(worlds.run(2, read_early, False, how), worlds.run(2, read_early, True, how), strict=True):
        assert ours == pytest.approx(theirs, rel=0.02 if how == "converted" else 1e-4, abs=1e-4)
        assert ran == {"ordinary": [True] * 3, "added": [True, False]}.get(how, [False, False])
