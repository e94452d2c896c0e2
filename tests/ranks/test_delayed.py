"""The delayed schedule against its recurrences, bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from delayed_steps import Reference, Sent, gradient, momentum, tanh_layers
from threads import Threads, here
from worlds import Given, Worlds, digest, seeded

import gradwire as gw
from gradwire.engine.schedules import delayed
from gradwire.engine.schedules.weights import TwoWeights
from gradwire.exchange.layout import cut

STEPS = 12


def make_model() -> torch.nn.Module:
    return tanh_layers(6, 9, 3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def engine(schedule: gw.Delayed, make_optimizer: Any, look: bool, plan: Any = None) -> tuple[list[str], list[str]]:
    """Digests of W after each step, which are looked at in every step or only at the end, and of L after it."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=plan or gw.Uniform(gw.Identity(), schedule=schedule), process_group=here.group)
    after, own = [], []
    for step in range(STEPS):
        gradient(model, step, here.rank)
        optimizer.step()
        optimizer.zero_grad()
        own.append(digest(layer.weight for layer in (model[0], model[2])))
        if look or step == STEPS - 1:
            after.append(digest(model.state_dict().values()))
    handle.detach()
    return after, own


def reference(schedule: gw.Delayed, make_optimizer: Any, ranks: int) -> Reference:
    expected = Reference(schedule, make_model, make_optimizer, gradient, ranks)
    expected.run(STEPS)
    return expected


SCHEDULES = {
    "OD-SGD": gw.Delayed(k=1),
    "CD-SGD": gw.Delayed(k=2),
    "after a warm-up": gw.Delayed(k=5, warmup_steps=3),
    "never corrects": gw.Delayed(k=None),
    "own local rate": gw.Delayed(k=5, local_lr=0.02),
    "a part of the rate": gw.Delayed(k=5, local_ratio=0.25),
    "plain SGD at the rank": gw.Delayed(k=5, local_step="sgd"),
    "as published": gw.Delayed.cd_sgd(k=3, warmup_steps=2),
    "as published, own rate": gw.Delayed.cd_sgd(k=3, local_lr=0.05),
    "the last warm-up step is overlapped": gw.Delayed(k=2, warmup_steps=3, warmup_lands=False),
    "no local step": gw.Delayed(k=None, local_lr=0),
    "BIT-SGD": gw.Delayed(k=None, local_update=False),
}


def test_options_of_the_local_update_change_what_ranks_compute_on() -> None:
    ends = {name: digest(reference(schedule, momentum, 2).history[-1]) for name, schedule in SCHEDULES.items()}
    alike = {"OD-SGD", "CD-SGD", "never corrects"}  # nothing is compressed
    assert len({ends[name] for name in alike}) == 1
    assert len({ends[name] for name in ends.keys() - alike}) == len(ends) - len(alike)


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_are_those_of_the_recurrences(threads: Threads, name: str, make_optimizer: Any) -> None:
    expected = reference(SCHEDULES[name], make_optimizer, ranks=2)
    after = [digest(weights) for weights in expected.history]
    looked = threads.run(2, engine, SCHEDULES[name], make_optimizer, True)
    assert [each for each, _ in looked] == [after, after]
    unseen = threads.run(2, engine, SCHEDULES[name], make_optimizer, False)
    assert [each for each, _ in unseen] == [after[-1:], after[-1:]]
    assert [own for _, own in unseen] == [own for _, own in looked], "looking at weights changed what is computed on"


# ---- bucket by bucket


def by_buckets(make_optimizer: Any, behind: bool, hooked: bool) -> tuple[list[str], int, int]:
    """Digests of W and L at the end, how often the optimizer stepped some parameters, and the number of buckets."""
    updates, usual, bound = [], TwoWeights.update, delayed._BEHIND_S

    def counted(self: TwoWeights, *arguments: Any) -> None:
        updates.append(arguments)
        usual(self, *arguments)

    TwoWeights.update, delayed._BEHIND_S = counted, -1.0 if behind else 1e9  # type: ignore[method-assign]
    try:
        model = make_model()
        optimizer = make_optimizer(model.parameters())
        if hooked:
            optimizer.register_step_post_hook(lambda *_: None)
        plan = gw.Uniform(gw.Identity(), bucket_bytes=64, schedule=gw.Delayed(k=3))
        handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
        for step in range(STEPS):
            gradient(model, step, here.rank)
            optimizer.step()
            optimizer.zero_grad()
        own = digest(layer.weight for layer in (model[0], model[2]))
        counts = len(updates), len(handle.plan.buckets)
        whole = digest(model.state_dict().values())
        handle.detach()
        return [own, whole], *counts
    finally:
        TwoWeights.update, delayed._BEHIND_S = usual, bound  # type: ignore[method-assign]


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
def test_a_wire_that_is_behind_gets_buckets_one_by_one(worlds: Worlds, make_optimizer: Any) -> None:
    ends = {}
    for behind, hooked in ((False, False), (True, False), (True, True)):
        ranks = worlds.run(2, by_buckets, make_optimizer, behind, hooked)
        ends[behind, hooked] = [digests for digests, _, _ in ranks]
        for _, updates, buckets in ranks:
            assert buckets > 1
            # the first step has none to land, the last lands when it is looked at
            assert updates == (STEPS - 1) * (buckets if behind and not hooked else 1)
    assert ends[True, False] == ends[False, False] == ends[True, True]


class Stumbles(torch.optim.SGD):
    """Raises once, in the middle of a step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls == 8 and here.rank == 1:
            raise RuntimeError("out of memory")
        return super().step(closure)


def stumble() -> tuple[list[int], int]:
    """Steps whose `optimizer.step()` raised, and how many there were in the end."""
    bound, delayed._BEHIND_S = delayed._BEHIND_S, -1.0
    model, raised = make_model(), []
    optimizer = Stumbles(model.parameters(), lr=0.1)
    plan = gw.Uniform(gw.Identity(), bucket_bytes=64, schedule=gw.Delayed(k=None, local_lr=0))
    handle = gw.parallelize(model, optimizer, plan=plan, drift_check_steps=0, process_group=here.group)
    for step in range(STEPS):
        gradient(model, step, here.rank)
        try:
            optimizer.step()
        except RuntimeError:
            raised.append(step)
        optimizer.zero_grad()
    handle.flush()
    steps = handle.stats().steps
    handle.detach()
    delayed._BEHIND_S = bound
    return raised, steps


def test_an_optimizer_that_raises_between_buckets_leaves_no_rank_waiting(worlds: Worlds) -> None:
    (first, steps), (second, others) = worlds.run(2, stumble)
    assert first == []
    assert len(second) == 1
    assert steps == others == STEPS


class OverAliases(torch.optim.SGD):
    """Steps tensors of its own over the parameters' memory, as those do that keep all parameters in one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.aliases = [parameter.detach() for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for alias, parameter in zip(self.aliases, self.param_groups[0]["params"], strict=True):
            if parameter.grad is not None:
                alias.add_(parameter.grad, alpha=-0.1)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def watched_by_aliases(parameters: Any) -> torch.optim.Optimizer:
    """SGD with a hook that clamps tensors over the parameters' memory."""
    optimizer = plain_sgd(parameters)
    aliases = [parameter.detach() for parameter in optimizer.param_groups[0]["params"]]
    optimizer.register_step_post_hook(lambda *_: [alias.clamp_(-0.3, 0.3) for alias in aliases])
    return optimizer


def clamping(parameters: Any) -> torch.optim.Optimizer:
    optimizer = plain_sgd(parameters)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.clamp_(-0.3, 0.3)

    optimizer.register_step_post_hook(clamp)
    return optimizer


@pytest.mark.parametrize(("over", "plain"), [(OverAliases, plain_sgd), (watched_by_aliases, clamping)])
def test_who_writes_over_the_parameters_memory_writes_the_global_weights(threads: Threads, over: Any, plain: Any) -> None:
    for schedule in (SCHEDULES["no local step"], gw.Delayed(k=3, local_lr=0, warmup_steps=2)):
        expected = threads.run(2, engine, schedule, plain, False)
        assert threads.run(2, engine, schedule, over, False) == expected


FOUR_BITS = gw.ErrorFeedback(gw.QSGD(bits=4, block=32))


def compressed(schedule: gw.Delayed) -> tuple[list[str], list[str], float]:
    """W after each step, by the recurrences and by the engine, and how far the last is from W of uncompressed gradients."""
    model = make_model()
    optimizer = momentum(model.parameters())
    handle = gw.parallelize(model, optimizer, plan=gw.Uniform(FOUR_BITS, schedule=schedule), process_group=here.group)
    plan = handle.plan
    handle.detach()
    sent = Sent(schedule, plan, make_model)
    expected = Reference(schedule, make_model, momentum, gradient, 2, sent.mean)
    expected.run(STEPS)
    sent.handle.detach()
    after, _ = engine(schedule, momentum, True, plan)
    uncompressed = reference(schedule, momentum, 2).history[-1]
    distance = sum((a - b).norm().item() for a, b in zip(expected.history[-1], uncompressed, strict=True))
    return [digest(weights) for weights in expected.history], after, distance


@pytest.mark.parametrize(
    "schedule",
    [
        gw.Delayed(k=None),
        gw.Delayed(k=2),
        gw.Delayed(k=2, flush=True),
        gw.Delayed(k=5, warmup_steps=2),
        gw.Delayed(k=3, local_update=False),
    ],
    ids=repr,
)
def test_compressed_steps_are_those_of_the_recurrences(threads: Threads, schedule: gw.Delayed) -> None:
    for expected, after, distance in threads.run(2, compressed, schedule):
        assert after == expected
        assert distance > 1e-4, "nothing was compressed"


def flushed_into_a_void_step() -> tuple[float, float]:
    """Rank 1 alone changes its model before a step whose corrections flush residuals, so the step is void. How far what ranks
    computed is from what weights took up and residuals hold, and the length of the residuals."""
    model = Given([700], seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    begun, computed = model.p0.detach().double(), torch.zeros(700, dtype=torch.float64)
    spec = gw.ErrorFeedback(gw.QSGD(bits=2))
    plan = gw.Uniform(spec, schedule=gw.Delayed(k=2, flush=True, correction=spec, stagger=False))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    for step in range(6):
        gradients = model.random_gradients(step, here.rank)
        if step == 2 and here.rank == 1:
            model.register_buffer("seen", torch.zeros(1))
        try:
            model(gradients).backward()
            computed += gradients[0].double() / here.world_size
            optimizer.step()
            handle.flush()
        except gw.StepStateError:
            handle.reset()
            if here.rank == 1:
                del model.seen
        optimizer.zero_grad()
    left = sum(value.double() for key, value in handle.state_dict().items() if "residual/" in key)
    here.add_up(computed)
    here.add_up(left)
    off = begun - model.p0.detach().double() - (computed - left)
    handle.detach()
    return float(off.norm()), float(left.norm())


def test_what_was_flushed_into_a_void_step_is_kept_once(threads: Threads) -> None:
    for off, left in threads.run(2, flushed_into_a_void_step):
        assert left > 1 and off < 1e-3


def test_corrections_of_every_step_are_exact(threads: Threads) -> None:
    """OD-SGD with compressed buckets that are never used, and other corrections in their place."""
    schedule = gw.Delayed(k=1)
    expected = [digest(weights) for weights in reference(schedule, momentum, 2).history]
    assert [after for after, _ in threads.run(2, engine, schedule, momentum, True, gw.Uniform(FOUR_BITS, schedule=schedule))] == [
        expected,
        expected,
    ]
    cheap = gw.Uniform(gw.QSGD(bits=2), schedule=gw.Delayed(k=1, correction=gw.QSGD(bits=8)))
    first, second = (after for after, _ in threads.run(2, engine, schedule, momentum, True, cheap))
    assert first == second and first[-1] != expected[-1]


@pytest.mark.parametrize(
    "schedule",
    [
        gw.Delayed(k=1, warmup_steps=3, correction=gw.QSGD(bits=2)),
        gw.Delayed(k=None, warmup_steps=3),
    ],
    ids=repr,
)
def test_a_warm_up_is_not_compressed(threads: Threads, schedule: gw.Delayed) -> None:
    """Whatever corrections send, and where there are none."""
    expected = [digest(weights) for weights in reference(gw.Delayed(k=1, warmup_steps=3), momentum, 2).history]
    first, second = (
        after for after, _ in threads.run(2, engine, schedule, momentum, True, gw.Uniform(FOUR_BITS, schedule=schedule))
    )
    assert first == second
    assert first[:3] == expected[:3] and first[3] != expected[3]


def bytes_of(schedule: gw.Delayed) -> int:
    model = make_model()
    handle = gw.parallelize(
        model, momentum(model.parameters()), plan=gw.Uniform(FOUR_BITS, schedule=schedule), process_group=here.group
    )
    found = handle.stats()
    handle.detach()
    assert found.wire_bytes == found.intra_bytes + found.inter_bytes == sum(each.wire_bytes for each in found.buckets)
    return found.wire_bytes


def test_bytes_are_the_mean_of_usual_steps_and_corrections(threads: Threads) -> None:
    usual, corrections, every_second, cheap, warming = (
        threads.run(2, bytes_of, schedule)[0]
        for schedule in (
            gw.Delayed(k=None),
            gw.Delayed(k=1),
            gw.Delayed(k=2),
            gw.Delayed(k=1, correction=gw.QSGD(bits=8, block=32)),
            gw.Delayed(k=1, correction=gw.QSGD(bits=8, block=32), warmup_steps=3),
        )
    )
    assert warming == usual, "the buckets of the warm-up are not those of corrections"
    assert usual < cheap < corrections and abs(every_second - (usual + corrections) / 2) <= 2


# ---- CD-SGD as published: 2 bits to the owners of shards, sums back as they are


NUMEL, THRESHOLD, TWO_BIT_STEPS = 1000, 0.4, 4


def pulled() -> tuple[list[str], list[str], int]:
    """What the optimizer gets in each step, by the engine and in plain lines, and the bytes that this rank sends."""
    rank, ranks = here.rank, here.world_size
    weight = torch.nn.Linear(NUMEL, 1, bias=False)
    spec = gw.TwoBit(threshold=THRESHOLD, block=32)
    handle = gw.parallelize(weight, plan=gw.Uniform(spec, scheme="CD-SGD"), process_group=here.group)
    edges = cut([NUMEL], 32, 0, NUMEL, ranks)
    residuals = [torch.zeros(NUMEL) for _ in range(ranks)]
    found, expected = [], []
    for step in range(TWO_BIT_STEPS):
        gradients = [torch.randn(NUMEL, generator=seeded(step, each)) for each in range(ranks)]
        weight.zero_grad()
        weight(gradients[rank]).sum().backward()
        assert weight.weight.grad is not None
        found.append(digest([weight.weight.grad.flatten().clone()]))
        mean = torch.empty(NUMEL)
        for owner, (start, end) in enumerate(itertools.pairwise(edges)):
            total = torch.zeros(end - start)
            for each in range(ranks):
                part = gradients[each][start:end] * (1 / ranks)
                if each != owner:
                    part = part + residuals[each][start:end]
                    t = THRESHOLD * (1 / ranks)
                    sent = torch.where(part >= t, t, torch.where(part <= -t, -t, 0.0))
                    residuals[each][start:end] = part - sent
                    part = sent
                total = total + part
            mean[start:end] = total
        expected.append(digest([mean]))
    nbytes = handle.stats().wire_bytes
    handle.detach()
    return found, expected, nbytes


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_come_back_as_they_are(threads: Threads, ranks: int) -> None:
    for found, expected, nbytes in threads.run(ranks, pulled):
        assert found == expected
        share = NUMEL // ranks
        # a quarter of a byte an element to the owners, four bytes an element back from the own shard
        assert nbytes == pytest.approx((ranks - 1) * share * (0.25 + 4), rel=0.08)


class OfAnotherLibrary(torch.optim.Optimizer):
    """SGD, of a class whose next step gradwire does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def test_plain_local_steps_need_not_know_the_optimizer(threads: Threads) -> None:
    schedule = gw.Delayed.cd_sgd(k=3, warmup_steps=2)
    expected = threads.run(2, engine, schedule, plain_sgd, False)
    assert threads.run(2, engine, schedule, OfAnotherLibrary, False) == expected
