"""DistributedDataParallel with gradwire's hook: plain DDP's numbers under an identity plan, residuals, states, refusals."""

import gc
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_ddp import batch, everything, normalised, plain, sgd
from loss_scales import scaled_steps, unscaled
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from worlds import Given, World, Worlds, digest, seeded

import gradwire as gw
from gradwire.exchange.residual_store import added_up

FEEDBACK = gw.Uniform(gw.ErrorFeedback(gw.TopK(0.05)), bucket_bytes=4096, edge_bytes=4096)


def wrapped(model: nn.Module, plan: Any, **ddp: Any) -> tuple[DistributedDataParallel, gw.DDPState]:
    """The model in DDP with the hook."""
    run, state = DistributedDataParallel(model, **ddp), gw.DDPState(plan=plan)
    run.register_comm_hook(state, gw.ddp_hook)
    return run, state


# ---- plain DDP


class Deep(nn.Module):
    """A megabyte in layers that forward uses in another order than that of registration."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(6, 200), *[(200, 200)] * 6, (200, 3)]
        self.layers = nn.ModuleDict({str(at): nn.Linear(*sizes[at]) for at in (3, 7, 0, 5, 1, 2, 6, 4)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for at in range(8):
            inputs = self.layers[str(at)](inputs).tanh()
        return inputs


class InOrder(Deep):
    """The same, registered in the order of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(sorted(self.layers.items()))


class Branches(nn.Module):
    """Each step uses one of the first two parts, or both; the last is never used."""

    def __init__(self, differs: bool) -> None:
        super().__init__()
        self.parts, self.differs = nn.ModuleList([plain(), plain(), plain()]), differs

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        which = (dist.get_rank() if self.differs else int(inputs[0, 0] > 0)) % 2
        return self.parts[which](inputs)


class Sparse(nn.Module):
    """Two tables, one with sparse gradients; `alone`, only that one."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.sparse = nn.EmbeddingBag(50, 6, sparse=True)
        self.dense = nn.Identity() if alone else nn.Sequential(plain(), nn.Linear(3, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dense(self.sparse((inputs.abs() * 20).long().clamp(max=49)))  # type: ignore[no-any-return]


class EndsInCheckpoint(nn.Module):
    """Recomputes its last layers in backward once `recomputes` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest, self.recomputes = nn.Linear(6, 6), plain(), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.first(inputs).tanh()
        return checkpoint(self.rest, inputs, use_reentrant=True) if self.recomputes else self.rest(inputs)


def convolutional() -> nn.Sequential:
    layers = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Conv2d(4, 3, 1), nn.Flatten())
    return layers.to(memory_format=torch.channels_last)


def frozen() -> nn.Sequential:
    model = plain()
    model[0].weight.requires_grad_(False)
    return model


def in_small_buckets(plan: Any) -> tuple[DistributedDataParallel, gw.DDPState]:
    """A plan of None is plain DDP, with a state that no model has."""
    torch.manual_seed(7)
    options: dict[str, Any] = {"bucket_cap_mb": 0.0002, "find_unused_parameters": True}
    return wrapped(plain(), plan, **options) if plan is not None else (DistributedDataParallel(plain(), **options), gw.DDPState())


def stepped(run: DistributedDataParallel, steps: range) -> str:
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    for step in steps:
        run(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(run.parameters())


def frozen_before_the_first_step(at: int, plan: Any) -> tuple[str, list[str]]:
    """The weights after some steps, and the names of tensors that the hook averages."""
    run, state = in_small_buckets(plan)
    run.module[at].requires_grad_(False)
    weights = stepped(run, range(4))
    buckets = state.stats().buckets if plan is not None else ()
    return weights, sorted(name for bucket in buckets for name in bucket.tensors)


@pytest.mark.parametrize("at", [0, 2])
def test_layers_that_are_frozen_after_ddp_was_made_train_as_in_ddp(worlds: Worlds, at: int) -> None:
    ddp, ours = (worlds.run(2, frozen_before_the_first_step, at, plan) for plan in (None, gw.Uniform(gw.Identity())))
    assert [weights for weights, _ in ours] == [weights for weights, _ in ddp]
    assert ours[0][1] == ["0.bias", "0.weight", "2.bias", "2.weight"]


def frozen_and_resumed() -> tuple[str, str]:
    """The weights of a run that freezes a layer, and of one that goes on from its state with the layer frozen."""
    feedback = gw.ErrorFeedback(gw.QSGD(bits=4))
    run, state = in_small_buckets(feedback)
    stepped(run, range(2))
    run.module[0].requires_grad_(False)
    stepped(run, range(2, 3))
    weights, saved = {name: value.clone() for name, value in run.module.state_dict().items()}, state.state_dict()
    again, other = in_small_buckets(feedback)
    again.module.load_state_dict(weights)
    again.module[0].requires_grad_(False)
    other.load_state_dict(saved)
    return stepped(run, range(3, 6)), stepped(again, range(3, 6))


def test_a_state_is_taken_up_where_a_layer_is_frozen_now(worlds: Worlds) -> None:
    assert all(whole == resumed for whole, resumed in worlds.run(2, frozen_and_resumed))


def ordinary(run: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(5):
        optimizer.zero_grad()
        dtype = next(run.parameters()).dtype
        run(batch(step).to(dtype)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(run.parameters(), 0.5)
        optimizer.step()


def accumulating(run: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(8):
        with run.no_sync() if step % 3 < 2 else nullcontext():
            run(batch(step)).square().mean().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def uneven(run: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    with run.join():
        for step in range(2 + 3 * dist.get_rank()):
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()


def late(run: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Rank 1 has no batch at all."""
    with run.join():
        for step in range(3 * (1 - dist.get_rank())):
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()


def unclipped(run: DistributedDataParallel, _: torch.optim.Optimizer) -> None:
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)  # sparse gradients allow no weight decay
    for step in range(5):
        optimizer.zero_grad()
        run(batch(step)).square().mean().backward()
        optimizer.step()


def recomputes_later(run: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(5):
        optimizer.zero_grad()
        run.module.recomputes = step >= 3
        run(batch(step)).square().mean().backward()
        optimizer.step()


Loop = Callable[[DistributedDataParallel, torch.optim.Optimizer], None]

CASES: dict[str, tuple[Callable[[], nn.Module], Loop, dict[str, Any]]] = {
    "ordinary": (plain, ordinary, {}),
    "small buckets": (Deep, ordinary, {"bucket_cap_mb": 0.2}),
    "bucket views": (plain, ordinary, {"gradient_as_bucket_view": True}),
    "accumulation": (plain, accumulating, {}),
    "buffers": (normalised, ordinary, {}),
    "join": (plain, uneven, {}),
    "join without a batch": (plain, late, {}),
    "static graph": (lambda: Branches(False).parts[0], ordinary, {"static_graph": True}),
    "unused": (lambda: Branches(False), ordinary, {"find_unused_parameters": True}),
    "unused on one rank": (lambda: Branches(True), ordinary, {"find_unused_parameters": True}),
    "bfloat16": (lambda: plain().to(torch.bfloat16), ordinary, {}),
    "float16": (lambda: plain().to(torch.float16), ordinary, {}),
    "float64": (lambda: plain().double(), ordinary, {}),
    "channels last": (convolutional, ordinary, {}),
    "frozen": (frozen, ordinary, {}),
    "sparse": (Sparse, unclipped, {}),
    "reentrant later": (EndsInCheckpoint, recomputes_later, {}),
    "sparse alone": (lambda: Sparse(alone=True), unclipped, {}),
}


def ends(case: str, plan: Any) -> list[tuple[str, str]]:
    """The weights, and the gradients and buffers, after plain DDP's loop and after that of DDP with the hook."""
    make, loop, ddp = CASES[case]
    found = []
    for hooked in (False, True):
        torch.manual_seed(7)
        model = make()
        run, _ = wrapped(model, plan, **ddp) if hooked else (DistributedDataParallel(model, **ddp), None)
        at_first = digest(model.parameters())
        loop(run, sgd(model))
        assert digest(model.parameters()) != at_first
        others = [each for each in everything(model) if each is not None]
        found.append((digest(model.parameters()), digest(others)))
    return found


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_end_bit_for_bit_as_under_ddp(worlds: Worlds, case: str) -> None:
    for ddp, ours in worlds.run(2, ends, case, gw.Uniform(gw.Identity(), bucket_bytes=4096)):
        assert ours == ddp


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", ["small buckets", "unused on one rank", "join", "bfloat16", "sparse"])
def test_ranks_end_alike_with_4_bits(worlds: Worlds, case: str, ranks: int) -> None:
    weights = [ours[0] for _, ours in worlds.run(ranks, ends, case, gw.QSGD(bits=4))]
    assert len(set(weights)) == 1


def learned(plan: Any) -> float:
    """The loss of a classifier at the end, on data with noise that all ranks share."""
    torch.manual_seed(1)
    data, noise = torch.randn(2048, 20, generator=seeded(1)), torch.randn(2048, 5, generator=seeded(4))
    labels = (data @ torch.randn(20, 5, generator=seeded(2)) + 3 * noise).argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    run = DistributedDataParallel(model) if plan is None else wrapped(model, plan)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(300):
        chosen = torch.randint(len(data), (32,), generator=seeded(3, step, dist.get_rank()))
        optimizer.zero_grad()
        nn.functional.cross_entropy(run(data[chosen]), labels[chosen]).backward()
        optimizer.step()
    return nn.functional.cross_entropy(model(data), labels).item()


def test_the_loss_is_that_of_ddp_with_4_bits(worlds: Worlds) -> None:
    ddp, ours = (worlds.run(2, learned, plan)[0] for plan in (None, gw.QSGD(bits=4)))
    assert ddp < 1.2
    assert ours == pytest.approx(ddp, rel=0.01)


# ---- plans


def buckets(plan: Any, sized: bool) -> tuple[list[set[str]], list[set[str]], int]:
    """Names by bucket of DDP in the last step, and by bucket of the plan; and the bytes sent."""
    model = InOrder()
    sizes = {"bucket_cap_mb_list": gw.bucket_sizes(model, plan)} if sized else {}
    run, state = DistributedDataParallel(model, **sizes), gw.DDPState(plan=plan)
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen: list[set[str]] = []

    def watching(state: gw.DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            seen.clear()
        seen.append({names[parameter] for parameter in bucket.parameters()})
        return gw.ddp_hook(state, bucket)

    run.register_comm_hook(state, watching)
    ordinary(run, sgd(model))
    stats = state.stats()
    return seen, [set(each.tensors) for each in stats.buckets], stats.wire_bytes


def test_sizes_make_ddps_buckets_those_of_the_plan(worlds: Worlds) -> None:
    plan = gw.Policy(default=gw.QSGD(bits=4), bucket_bytes=200_000, edge_bytes=100_000)
    for ddp, ours, _ in worlds.run(2, buckets, plan, True):
        assert len(ours) > 3
        assert ddp == ours


def test_rules_see_the_names_of_the_model(worlds: Worlds) -> None:
    rule = ("layers.3.weight", gw.Identity())
    two_bits, by_name = (gw.Policy(default=gw.QSGD(bits=2), rules=rules) for rules in ([], [rule]))
    less, more = (worlds.run(2, buckets, plan, False)[0][2] for plan in (two_bits, by_name))
    assert more > less + 100_000


# ---- residuals


def carried(state: gw.DDPState) -> Iterator[tuple[str, torch.Tensor]]:
    saved = {key.partition("/")[2]: value.double() for key, value in state.state_dict().items()}
    yield from added_up([{key: value for key, value in saved.items() if key.startswith("residual")}]).items()


def nothing_is_lost() -> list[float]:
    """What was sent and what residuals hold beside what was computed: for each tensor the difference, over its norm."""
    model = Given([3000, 70, 500, 4000])
    run, state = wrapped(model, FEEDBACK)
    sent = [torch.zeros_like(each, dtype=torch.float64) for each in model.parameters()]
    computed = [torch.zeros_like(each) for each in sent]
    for step in range(6):
        run.zero_grad()
        run(model.random_gradients(dist.get_rank(), step)).backward()
        for total, parameter in zip(sent, model.parameters(), strict=True):
            total += parameter.grad.double()
        true = model.mean_of(lambda rank, step=step: model.random_gradients(rank, step), dist.get_world_size())
        for total, mean in zip(computed, true, strict=True):
            total += mean
    left = dict(carried(state))
    differences = []
    for index, (own, true) in enumerate(zip(sent, computed, strict=True)):
        residual = left[f"residual/p{index}"]
        dist.all_reduce(residual)
        assert residual.norm() > 0.1
        differences.append(((own + residual - true).norm() / true.norm()).item())
    return differences


@pytest.mark.parametrize("ranks", [2, 3])
def test_residuals_follow_their_parameters_when_ddp_rebuilds_buckets(worlds: Worlds, ranks: int) -> None:
    for differences in worlds.run(ranks, nothing_is_lost):
        assert max(differences) < 1e-5


def resumed(plan: Any, pause: int) -> bool:
    """Whether a run that was taken up in another DDP model goes on bit for bit."""
    torch.manual_seed(7)
    model = Deep()
    run, state = wrapped(model, plan)
    optimizer = sgd(model)

    def train(run: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            run(batch(step)).square().mean().backward()
            optimizer.step()

    train(run, optimizer, range(pause))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "hook": state.state_dict()}
    saved = {part: torch.utils._pytree.tree_map(clone, value) for part, value in saved.items()}
    train(run, optimizer, range(pause, 6))
    expected = digest([*model.parameters(), *state.state_dict().values()])
    other = Deep()
    other.load_state_dict(saved["model"])
    second, second_state = wrapped(other, plan)
    second_state.load_state_dict(saved["hook"])
    assert digest(second_state.state_dict().values()) == digest(saved["hook"].values())
    other_optimizer = sgd(other)
    other_optimizer.load_state_dict(saved["optimizer"])
    train(second, other_optimizer, range(pause, 6))
    return digest([*other.parameters(), *second_state.state_dict().values()]) == expected


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("pause", [2, 4])
@pytest.mark.parametrize("plan", [FEEDBACK, gw.QSGD(bits=4)], ids=["feedback", "qsgd"])
def test_a_run_is_taken_up_bit_for_bit(worlds: Worlds, plan: Any, pause: int) -> None:
    assert worlds.run(2, resumed, plan, pause) == [True, True]


# ---- the scale of a GradScaler


WEIGHTED = gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.9)
SCALED: dict[str, tuple[Any, dict[str, Any]]] = {
    "ordinary": (gw.ErrorFeedback(gw.QSGD(bits=2)), {}),
    "weighted": (WEIGHTED, {}),
    "static graph": (FEEDBACK, {"static_graph": True}),
    "reentrant": (FEEDBACK, {"bucket_cap_mb": 1e-4}),
    "join": (WEIGHTED, {}),
}


def under_scales(case: str, scaled: bool) -> tuple[str, str]:
    """Digests of the means of all steps, and of what was not sent, both without the scale. In "join" rank 1 has one batch."""
    plan, ddp = SCALED[case]
    torch.manual_seed(7)
    model = EndsInCheckpoint()
    model.recomputes = case == "reentrant"
    run, state = wrapped(model, plan, **ddp)
    means = []
    with run.join() if case == "join" else nullcontext():
        for step, scale_loss, scale in scaled_steps(scaled):
            if case == "join" and step > 0 and dist.get_rank() == 1:
                break
            run.zero_grad()
            scale_loss(run(batch(step)).square().mean()).backward()
            means += [parameter.grad / scale for parameter in model.parameters()]
    return digest(means), digest(unscaled(state.state_dict(), scaled))


@pytest.mark.parametrize("case", SCALED)
def test_residuals_follow_the_scale_of_the_loss(worlds: Worlds, case: str) -> None:
    assert worlds.run(2, under_scales, case, True) == worlds.run(2, under_scales, case, False)


def refused(joining: bool) -> tuple[str, float]:
    """The error of a scaled loss with a spec that has a magnitude of its own, and the gradient under a scale of 1. With `joining`
    rank 1 has no batch."""
    gradients = []
    for scale in (1.0, 2.0**16):
        model = Given([8], seed=0)
        run, _ = wrapped(model, gw.Policy(default=gw.TwoBit(threshold=0.5), exempt_vectors=False))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        try:
            with run.join() if joining and scale != 1 else nullcontext():
                if not joining or scale == 1 or dist.get_rank() == 0:
                    scaler.scale(run([torch.full((8,), 0.75)])).backward()
        except gw.StepStateError as error:
            return str(error), gradients[0].item()
        gradients.append(model.p0.grad[0])
    return "", 0.0


@pytest.mark.parametrize("joining", [False, True])
def test_a_spec_with_a_magnitude_of_its_own_is_refused_under_a_loss_scale(worlds: Worlds, joining: bool) -> None:
    for words, mean in worlds.run(2, refused, joining):
        assert words.startswith("a GradScaler multiplied the loss by 65536, and the plan has TwoBit") and mean == 0.5


VOTES = [
    gw.Policy(default=gw.SignSGD(), exempt_vectors=False),
    gw.Policy(default=gw.QSGD(bits=4), rules=[("p0", gw.Signum())], exempt_vectors=False),
]


def voting_in_join() -> list[str]:
    """The errors of a backward inside `join()` under plans with votes. Rank 1 has no batch."""
    told = []
    for plan in VOTES:
        run, _ = wrapped(Given([8, 8], seed=0), plan)
        try:
            with run.join():
                if dist.get_rank() == 0:
                    run([torch.full((8,), -0.75)] * 2).backward()
        except gw.StepStateError as error:
            told.append(str(error))
    return told


def test_a_plan_with_votes_is_refused_in_join_on_all_ranks(worlds: Worlds) -> None:
    for told in worlds.run(2, voting_in_join):
        for words, spec in zip(told, ("SignSGD()", "Signum("), strict=True):
            assert words.startswith(f"a step began inside join(), and the plan has {spec}") and "EFSignSGD" in words


def with_a_group_beside(reverse: bool) -> tuple[str, bool]:
    """The digest of the gradients with a group for gradwire alone, and whether its exchange uses that group; or the error."""
    ranks = [*range(dist.get_world_size())]
    beside = dist.new_group(ranks[:1] if reverse else ranks, backend="gloo")
    model = Given([300, 20], seed=0)
    run, state = DistributedDataParallel(model), gw.DDPState(plan=gw.QSGD(bits=4), process_group=beside)
    run.register_comm_hook(state, gw.ddp_hook)
    try:
        run(model.random_gradients(dist.get_rank())).backward()
    except gw.PlanError as error:
        return str(error), False
    assert state._job is not None
    used = state._job.exchange.group.process_group is beside
    state._job.stop()
    return digest(p.grad for p in model.parameters() if p.grad is not None), used


def test_gradwire_can_have_a_group_beside_ddps(worlds: Worlds) -> None:
    first, second = worlds.run(2, with_a_group_beside, False)
    assert first == second and first[1]
    for words, used in worlds.run(2, with_a_group_beside, True):
        assert "and DDP averages between [0, 1]" in words and not used


def saved_whole() -> tuple[str, str, int]:
    """What a model and its copy that was saved as a whole end with, the hook registered again; the steps of the new hook."""

    def train(model: nn.Module, steps: range) -> None:
        optimizer = sgd(model)
        for step in steps:
            optimizer.zero_grad()
            model(Given.random_gradients(model.module, dist.get_rank(), step)).backward()
            optimizer.step()

    run, _ = wrapped(Given([3000, 500]), gw.Identity())
    train(run, range(2))
    file = io.BytesIO()
    torch.save(run, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again.register_comm_hook(state := gw.DDPState(plan=gw.Identity()), gw.ddp_hook)
    for each in (run, again):
        train(each, range(2, 5))
    return digest(run.parameters()), digest(again.parameters()), state.stats().steps


def test_a_model_is_saved_whole(worlds: Worlds) -> None:
    first, second = worlds.run(2, saved_whole)
    assert first == second and first[0] == first[1] and first[2] == 3


def saved_with_residuals(steps: int) -> dict[str, torch.Tensor]:
    model = Given([3000, 500])
    run, state = wrapped(model, FEEDBACK)
    for step in range(steps):
        run.zero_grad()
        run(model.random_gradients(dist.get_rank(), step)).backward()
    return state.state_dict()


def taken_over(saved: dict[str, torch.Tensor]) -> list[float]:
    """Of a state of other ranks: by tensor, what a step of zeros sends and what is left, added up, over what was saved."""
    model = Given([3000, 500])
    run, state = wrapped(model, FEEDBACK)
    state.load_state_dict(saved)
    run([torch.zeros_like(each) for each in model.parameters()]).backward()
    left, ratios = dict(carried(state)), []
    for name, parameter in model.named_parameters():
        before = sum(value.double() for key, value in saved.items() if "/residual" in key and key.endswith(name))
        dist.all_reduce(residual := left[f"residual/{name}"])
        ratios.append(((parameter.grad.double() + residual - before).norm() / before.norm()).item())
    return ratios


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_state_is_taken_up_by_another_number_of_ranks(worlds: Worlds, ranks: int) -> None:
    saved = {key: value for state in worlds.run(2, saved_with_residuals, 4) for key, value in state.items()}
    for ratios in worlds.run(ranks, taken_over, saved):
        assert max(ratios) < 1e-5


def resumed_with(kind: str) -> str:
    """What a rank raises in the first backward after rank 1 loaded nothing, or a state that does not fit."""
    model = Given([3000, 500])
    run, state = wrapped(model, FEEDBACK)
    for step in range(2):
        run(model.random_gradients(dist.get_rank(), step)).backward()
    saved = state.state_dict()
    other, second = wrapped(Given([3000, 500]), FEEDBACK)
    if dist.get_rank() == 1:
        saved = {} if kind == "nothing" else {k: v for k, v in saved.items() if not k.endswith("residual/0/p0")}
    second.load_state_dict(saved)
    return said(lambda: other(model.random_gradients(dist.get_rank(), 2)).backward())


def test_ranks_that_load_unlike_states_are_told(worlds: Worlds) -> None:
    for told in worlds.run(2, resumed_with, "nothing"):
        assert "ranks disagree on the step of the state that was loaded: rank 0 has 2, rank 1 has 0" in told
    first, second = worlds.run(2, resumed_with, "unfit")
    assert first.startswith("DisagreementError: all ranks stop, because some of them failed: rank 1: the state has no")
    assert second.startswith("ValueError: the state has no residual/0/p0")


# ---- refused


@pytest.mark.parametrize(
    "plan",
    [
        gw.AdaptiveBits(),
        gw.Tuned(gw.Policy(default=gw.QSGD(bits=4))),
        gw.Uniform(gw.Identity(), schedule="pipelined", scheme="alltoall"),
        gw.Policy(default=gw.QSGD(bits=4), schedule=gw.Delayed()),
        3,
    ],
    ids=["bits", "tuned", "pipelined", "delayed", "number"],
)
def test_plans_that_ddp_cannot_run_name_parallelize(plan: Any) -> None:
    with pytest.raises(gw.PlanError, match=r"handle = gw\.parallelize\(model, optimizer"):
        gw.DDPState(plan=plan)
    with pytest.raises(gw.PlanError, match=r"handle = gw\.parallelize\(model, optimizer"):
        gw.bucket_sizes(plain(), plan)


def found_though_frozen() -> tuple[bool, int]:
    """Whether the hook averages when `gc.freeze` came before the first backward; and what is frozen after."""
    run, _ = wrapped(plain(), gw.Identity())
    gc.collect()
    gc.freeze()
    try:
        run(batch(0)).square().mean().backward()
        mean = torch.cat([each.grad.flatten() for each in run.parameters()])
        gathered = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mean)
        return all(torch.equal(each, mean) for each in gathered), gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_model_that_the_collector_froze_is_found(worlds: Worlds) -> None:
    for averaged, frozen_objects in worlds.run(2, found_though_frozen):
        assert averaged and frozen_objects > 1000


def said(act: Callable[[], Any]) -> str:
    try:
        act()
    except (gw.GradwireError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misused() -> list[str]:
    told = []
    state = gw.DDPState(plan=gw.QSGD(bits=4))
    told.append(said(lambda: state.load_state_dict({})))
    told.append(said(state.stats))
    assert state.state_dict() == {}
    one, other = DistributedDataParallel(plain()), DistributedDataParallel(plain())
    for run in (one, other):
        run.register_comm_hook(state, gw.ddp_hook)
    told.append(said(lambda: one(batch(0)).sum().backward()))
    model, state = wrapped(plain(), gw.Policy(default=gw.QSGD(), rules=[("no_such", gw.Identity())]))
    told.append(said(lambda: model(batch(0)).sum().backward()))
    model, state = wrapped(plain(), gw.QSGD(bits=4))
    told.append(said(lambda: gw.parallelize(model)))
    model(batch(0)).sum().backward()
    saved = state.state_dict()
    _narrow, state = wrapped(nn.Linear(6, 3), gw.QSGD(bits=4))
    told.append(said(lambda: state.load_state_dict(saved)))
    told.append(said(lambda: state.load_state_dict({"a": 1})))
    same, state = wrapped(plain(), FEEDBACK)
    state.load_state_dict(saved)
    told.append(said(lambda: same(batch(0)).sum().backward()))
    first, state = wrapped(plain(), gw.QSGD(bits=4))
    first(batch(0)).sum().backward()
    second = DistributedDataParallel(plain())
    second.register_comm_hook(state, gw.ddp_hook)
    told.append(said(lambda: second(batch(0)).sum().backward()))
    cast = DistributedDataParallel(plain())
    cast.register_comm_hook(gw.DDPState(plan=gw.QSGD(bits=4)), fp16_compress_wrapper(gw.ddp_hook))
    told.append(said(lambda: cast(batch(0)).sum().backward()))
    return told


SAID = (
    "StepStateError: this DDPState is registered with 0 DDP models", "StepStateError: there are no statistics before",
    "StepStateError: this DDPState is registered with 2 DDP models",
    "PlanError: rule ('no_such', Identity()) matches none", "PlanError: model is wrapped in DistributedDataParallel",
    "ValueError: the state has 4 tensors, and DDP averages 2", "ValueError: the state has no key that begins with rank0/",
    "ValueError: the state was saved under plan", "StepStateError: this DDPState averages gradients of another DDP model",
    "PlanError: the hook got torch.float16 for gradients of torch.float32: a hook around it",
)  # fmt: skip


def test_wrong_use_is_told_in_words(worlds: Worlds) -> None:
    for told in worlds.run(2, misused):
        assert [words[: len(start)] for words, start in zip(told, SAID, strict=True)] == list(SAID)


def left() -> list[str]:
    """A backward that ends in the middle, on both ranks."""
    model = Deep()
    run, _ = wrapped(model, gw.QSGD(bits=4), bucket_cap_mb=0.2)
    for step in range(2):
        run(batch(step)).sum().backward()

    def stop(gradient: torch.Tensor) -> None:
        raise ValueError("stopped")

    model.layers["0"].weight.register_hook(stop)
    return [said(lambda: run(batch(2)).sum().backward()) for _ in range(2)]


def test_after_a_backward_that_was_left_ddp_goes_no_further(worlds: Worlds) -> None:
    for first, second in worlds.run(2, left):
        assert first == "ValueError: stopped"
        assert second.startswith("RuntimeError: Expected to have finished reduction in the prior iteration")


def left_alone() -> str:
    run, _ = wrapped(plain(), gw.QSGD(bits=4))
    for step in range(3):  # then DDP sends nothing of its own
        run(batch(step)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(0.5)
    return said(lambda: run(batch(3)).sum().backward())


def test_a_rank_that_died_is_named_by_backward() -> None:
    with World(2, group_timeout_s=8.0) as world:
        world.start(left_alone)
        first, second = world.collect(60.0)
    assert second.kind == "died"
    assert first.kind == "returned" and first.value.startswith("CommunicationError: ") and "rank 1" in first.value


def compiled() -> list[str]:
    """A model compiled with DDP around it, in plain DDP and with the hook."""
    ends = []
    for hooked in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = Deep()
        run = wrapped(model, gw.Identity())[0] if hooked else DistributedDataParallel(model)
        ordinary(torch.compile(run, backend="aot_eager"), sgd(model))
        ends.append(digest(model.parameters()))
    return ends


def test_a_compiled_model_ends_as_under_ddp(worlds: Worlds) -> None:
    for ddp, ours in worlds.run(2, compiled, deadline_s=200.0):
        assert ours == ddp


def planned_for_names(path: str) -> int:
    run, state = wrapped(plain(), path)
    for step in range(3):
        run(batch(step)).sum().backward()
    return state.stats().steps


def test_a_plans_file_fits_the_model_inside_ddp(worlds: Worlds, tmp_path: Path) -> None:
    infos = [gw.TensorInfo(name, tuple(each.shape), "float32") for name, each in reversed([*plain().named_parameters()])]
    gw.Policy(default=gw.QSGD(bits=4)).plan(infos).save(tmp_path / "plan.json")
    assert worlds.run(2, planned_for_names, str(tmp_path / "plan.json")) == [3, 3]
